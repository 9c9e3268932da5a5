"""`atoll doctor`: what this machine has, whether it and another one reach each other, and what to do."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atoll.cli.recipe_settings import run_of
from atoll.core.config.type_checks import shown_text
from atoll.core.errors import AtollError, ConfigError
from atoll.engines.machine_check import OtherMachine, answer_machine, ask_machine
from atoll.engines.network_interfaces import LOOPBACK, beyond_loopback, is_dialled, is_loopback, route_to
from atoll.engines.warm_start_training import RunPreparation
from atoll.runs.workloads import data_fingerprint
from atoll.telemetry.units import human_bytes

_LEAST_FREE_BYTES = 5 << 30
_MOST_SKEW_S = 30.0
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 128 << 20
_COMPARED = ("atoll", "Python", "torch", "data")
_EXTRA_OF = {"elastic": "torchft", "ray": "ray"}
"""The extra that an engine needs on every machine."""


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what this machine has, and what the other has. `advice` says what to do about a problem."""

    what: str
    here: str
    there: str = ""
    advice: str = ""


def examine(address: str | None, listen: str | None, recipe: str, settings: Sequence[str]) -> bool:
    """Print what was found, and what to do. Returns whether there is anything to do.

    Args:
        address: WORD@HOST:PORT, as the machine that answers there has printed it; None: with `listen` this machine answers, without
            it is alone.
        listen: HOST:PORT of this machine; with `address`, where the other machine connects back.
        recipe: whose data the machines compare, with these settings.
    """
    findings = list(local_findings(recipe, settings))
    facts = {one.what: one.here[:200] for one in findings if one.what in (*_COMPARED, "machine", "CUDA", "extras", "free disk")}
    other: OtherMachine | None = None
    if address is not None:
        _check_address(address)
        try:
            other = ask_machine(address, facts, listen)
        except (OSError, ValueError) as error:
            findings.append(unreached(address.rpartition("@")[2], error))
    elif listen is not None:
        other = answer_machine(listen, facts, lambda line: print(line, file=sys.stderr, flush=True))
    if other is not None:
        findings = [*compared(findings, other), *network_findings(other)]
    _show(findings, other)
    return any(one.advice for one in findings)


def _check_address(address: str) -> None:
    word, _, where = address.rpartition("@")
    if not is_dialled(where) or not re.fullmatch(r"\w{0,32}", word, re.ASCII):
        raise ConfigError(
            f"{shown_text(address)}: it is WORD@HOST:PORT, as `atoll doctor --listen HOST:PORT` prints it on the other machine, "
            f"such as 5f0c2a91d34e@192.0.2.7:29500."
        )


# --------------------------------------------------------------------------------------------------------------- this machine


def local_findings(recipe: str, settings: Sequence[str]) -> Iterator[Finding]:
    name = socket.gethostname()
    yield Finding("machine", f"{name}, {platform.system()} {platform.machine()}")
    yield Finding("atoll", version("atoll"))
    yield Finding("Python", platform.python_version())
    yield Finding("torch", torch.__version__)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding(
        "CUDA",
        f"{torch.version.cuda}: {len(gpus)} x {', '.join(dict.fromkeys(gpus))}" if gpus else "no GPU: runs compute on the CPU",
    )
    yield _extras()
    yield Finding("interfaces", beyond_loopback())
    yield _resolved(name)
    yield _disk("free disk", Path(), _LEAST_FREE_BYTES, "in this folder, where runs are written")
    if _SHARED_MEMORY.is_dir():
        yield _disk(
            "shared memory", _SHARED_MEMORY, _LEAST_SHARED_BYTES, "in /dev/shm, which Ray and NCCL use; a container has --shm-size"
        )
    yield _data(recipe, settings)


def _extras() -> Finding:
    """Which extras are installed. A missing one is no problem until an engine or a setting needs it."""
    needed: dict[str, list[str]] = {}
    for line in requires("atoll") or ():
        found = re.fullmatch(r"([\w.-]+)[^;]*;.*extra == ['\"](\w+)['\"].*", line)
        if found and found[2] != "dev":
            needed.setdefault(found[2], []).append(found[1])
    missing = [extra for extra, names in needed.items() if not all(map(_is_installed, names))]
    have = ", ".join(extra for extra in needed if extra not in missing) or "none"
    return Finding("extras", have + (f"; not installed: {', '.join(missing)}" if missing else ""))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _resolved(name: str) -> Finding:
    """What this machine's name resolves to. gloo and Ray would use that address; atoll asks for the route instead."""
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding("own name", f"{name} is not known; atoll uses the interface that routes to the other machine")
    loopback = "; atoll uses the interface that routes to the other machine instead" if is_loopback(address) else ""
    return Finding("own name", f"{name} is {address}{loopback}")


def _disk(what: str, path: Path, least_bytes: int, where: str) -> Finding:
    free = shutil.disk_usage(path).free
    advice = f"Free some space {where}: {human_bytes(free)} are left." if free < least_bytes else ""
    return Finding(what, human_bytes(free), advice=advice)


def _data(recipe: str, settings: Sequence[str]) -> Finding:
    """A fingerprint of a recipe's data, which must be the same on all machines of a run."""
    try:
        fingerprint = str(data_fingerprint(RunPreparation(run_of(recipe, settings, None).resolved).single_shard))
    except AtollError as error:
        return Finding("data", f"{recipe}: not readable", advice=f"Data of {recipe}: {error}")
    return Finding("data", f"{recipe}: {sha256(fingerprint.encode()).hexdigest()[:12]}")


# ---------------------------------------------------------------------------------------------------------- the other machine


def compared(findings: Sequence[Finding], other: OtherMachine) -> Iterator[Finding]:
    """The findings beside those of the other machine."""
    for one in findings:
        there = other.facts.get(one.what, "")
        yield replace(one, there=there, advice=one.advice or _difference(one.what, one.here, there))


def _difference(what: str, here: str, there: str) -> str:
    """What to do about versions or data that differ.

    >>> _difference("torch", "2.13.0+cpu", "2.13.0+cu128"), _difference("Python", "3.11.7", "3.11.2")
    ('', '')
    """
    if what not in _COMPARED:
        return ""
    if what == "data":
        if here == there:
            return ""
        return (
            f"The data differ ({here} here, {there or 'none'} there): give both the same recipe and settings; corpus=stdlib is the "
            f"text of each machine's Python, so run `atoll data prepare` once, and copy the folder."
        )
    depth = {"Python": 2, "torch": 2}.get(what, 3)
    if here.split("+")[0].split(".")[:depth] == there.split("+")[0].split(".")[:depth]:
        return ""
    return f"Install the same {what} on both: this machine has {here}, the other {there or 'none'}."


def network_findings(other: OtherMachine) -> Iterator[Finding]:
    """Reachability both ways, and the clocks."""
    route = route_to(other.address.rpartition(":")[0] or other.address)
    way = f"over {route}" if route is not None else "over the loopback interface"
    took = "" if other.connect_s is None else f", {other.connect_s * 1000:.1f} ms to connect"
    yield Finding("reachable", f"{other.address} {way}{took}", "answers" if other.connect_s is not None else "asked here")
    if other.back is None:
        here = route.address if route is not None else LOOPBACK
        text = f"not tried; to try it: --listen {here}:0" if other.connect_s is not None else "not tried"
        yield Finding("the other way", "", text)
    else:
        advice = (
            f"The other machine cannot connect here ({other.back}). Open this machine's ports to it: --engine processes and Ray "
            f"connect both ways. An elastic run needs one way only: start it on the other machine, and join it from here."
        )
        yield Finding("the other way", "", "connects" if not other.back else "cannot connect", advice if other.back else "")
    ahead = f"{abs(other.skew_s):.2f} s {'ahead' if other.skew_s > 0 else 'behind'}"
    advice = (
        f"The other machine's clock is {ahead}: set both by NTP, or logs of the machines do not match."
        if abs(other.skew_s) > _MOST_SKEW_S
        else ""
    )
    yield Finding("clock", "", ahead, advice)


def unreached(address: str, error: OSError | ValueError) -> Finding:
    """What to do about a machine that does not answer."""
    host = address.rpartition(":")[0]
    listens = f"on the other machine run `atoll doctor --listen {address}`, with its own address, first"
    if isinstance(error, socket.gaierror):
        advice = f"{host} is not known here. Use its IP address, or add it to /etc/hosts or to your name server."
    elif isinstance(error, ConnectionRefusedError):
        name = _loopback_name(host)
        advice = name or f"{address} is reached, and nothing listens there: {listens}."
    elif isinstance(error, ValueError):
        advice = f"Another program answers at {address} ({error}): choose another port, and {listens}."
    else:
        advice = (
            f"{address} does not answer ({error.strerror or error}): see that the address is right, that the machines are in one "
            f"network or VPN, and that no firewall blocks the port. A machine behind NAT can join an elastic run, and run none."
        )
    return Finding("reachable", address, "no", advice)


def _loopback_name(host: str) -> str:
    """What to do about a name that resolves to this machine itself."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    if not is_loopback(address) or is_loopback(host):
        return ""
    return f"{host} is {address} here, which is this machine itself: correct its line in /etc/hosts, or use its IP address."


# ------------------------------------------------------------------------------------------------------------------ the screen


def _show(findings: Sequence[Finding], other: OtherMachine | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, header_style="bold")
    for heading in ("", "this machine", *(["the other machine"] if other is not None else [])):
        table.add_column(heading, overflow="fold")
    for one in findings:
        mark = "[red]x[/red] " if one.advice else "  "
        cells = [f"{mark}{one.what}", escape(one.here), *([escape(one.there)] if other is not None else [])]
        table.add_row(*cells)
    console.print(table)
    print("\nWhat to do:" if any(one.advice for one in findings) else f"\nWhat to do: nothing.{_next(findings, other)}")
    for number, advice in enumerate((one.advice for one in findings if one.advice), 1):
        console.print(f"{number}. {advice}", markup=False, highlight=False, soft_wrap=True)


def _next(findings: Sequence[Finding], other: OtherMachine | None) -> str:
    """Which engines both machines can run, by their network and their extras."""
    if other is None:
        return " To check the network to another machine: `atoll doctor --listen HOST:PORT` there, and here what it prints."
    texts = [text for one in findings if one.what == "extras" for text in (one.here, one.there)]
    extras = set.intersection(*({*text.partition(";")[0].split(", ")} for text in texts))
    both_ways = other.back == ""
    reached = {"processes": both_ways, "elastic": True, "ray": both_ways}
    engines = [name for name, reaches in reached.items() if reaches and _EXTRA_OF.get(name) in (None, *extras)]
    named = re.sub(r", (\w+)$", r" and \1", ", ".join(engines))
    can = f" These machines can run --engine {named} together." if engines else ""
    lacking = [f"{name} needs the extra {extra} on both." for name, extra in _EXTRA_OF.items() if extra not in extras]
    one_way = [] if both_ways else ["--engine processes and ray connect both ways."]
    return " ".join([can, *one_way, *lacking])
