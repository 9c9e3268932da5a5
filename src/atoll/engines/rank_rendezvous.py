"""How ranks on several machines find each other: they wait for all, choose a network interface, and connect to each other once.

gloo connects every pair of ranks, on ports that the system chooses, and says nothing while it waits. So ranks try the same first,
by way of the store: each can say whom it waits for, and all learn which pair cannot connect.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.liveness import WAIT_LOG_S
from atoll.engines.network_interfaces import NetworkInterface, beyond_loopback, interface_named, is_loopback, route_to
from atoll.engines.rank_store import INTERFACES, environment, machine, on_loopback

_POLL_S, _SLOW_POLL_S = 0.01, 0.2
_CONNECT_S = 10.0
"""How long a connection to another rank may take."""
_MOST_NAMED = 16
"""Ranks that a message names."""
_ADVICE = (
    f"Let the machines connect to each other on all ports; or choose their interfaces, on each: export {INTERFACES[0]}=NAME. "
    f"`atoll doctor` checks the network between two machines."
)
Log = Callable[[str], object]
Records = Mapping[int, Mapping[str, str]]


def wait_for_keys(
    store: Store, keys: Mapping[int, str], what: str, limit_s: float, log: Log, check: Callable[[], object] = lambda: None
) -> list[int]:
    """Wait until ranks have set their keys, by rank. Logs every 15 s which ranks have not. Returns those that have not after
    `limit_s`; none if all have. Raises RuntimeError if the store is gone, and what `check` raises meanwhile."""
    began_s, log_s = time.monotonic(), WAIT_LOG_S
    # One request for all ranks. A blocking request would log a warning of torch at its timeout, and delay Ctrl-C.
    while not store.check([*keys.values()]):
        check()
        waited_s = time.monotonic() - began_s
        if waited_s > min(limit_s, log_s):
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if missing and waited_s > limit_s:
                return missing
            if missing:
                log(f"waiting for {named(missing)} {what} ({waited_s:.0f} s of at most {limit_s:.0f} s)")
            log_s += WAIT_LOG_S
        time.sleep(_POLL_S if waited_s < 1 else _SLOW_POLL_S)
    return []


def named(ranks: list[int]) -> str:
    """Some ranks, for a message.

    >>> named([3]), named([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    shown = ", ".join(map(str, ranks[:_MOST_NAMED])) + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def wait_for_all(store: Store, rank: int, size: int, limit_s: float, log: Log, launch: Store | None = None) -> None:
    """Wait until every rank has started. In the store `launch` all that were started meet, whatever their numbers: with it, ranks
    that were started for different numbers of ranks or machines all raise ConfigError at once."""
    check = partial(_refuse_mismatch, launch, size)
    keys = {other: f"here/{other}" for other in range(size)}
    try:
        check()
        store.set(keys[rank], "")
        missing = wait_for_keys(store, keys, "to start", limit_s, log, check)
    except RuntimeError as error:
        raise ExchangeFailed(
            f"rank {rank} waited for the others, and rank 0's machine, or the process there that hosts the store, has ended."
        ) from error
    if missing:
        here = [other for other in keys if other not in missing]
        raise ExchangeFailed(
            f"rank {rank} waited {limit_s:g} s for {named(missing)} of {size}, which have not started; {named(here)} are here. See "
            f"that all were started, or raise the limit (engine.start_timeout_s; limit_s in an own loop)."
        )


def _refuse_mismatch(launch: Store | None, size: int) -> None:
    """Raise ConfigError if any rank was started for another number of ranks or machines than the first. All raise the same."""
    if launch is None:
        return
    machines, attempt = os.environ.get("GROUP_WORLD_SIZE", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mine = f"{size} processes" + (f" on {machines} machine{'s' if machines != '1' else ''}" if machines else "")
    key, refused = f"launch/{attempt}", f"launch/{attempt}/refused"
    first = json.loads(launch.compare_set(key, "", json.dumps({"started": mine, "host": platform.node()})))
    if first["started"] != mine:
        (one, ones), (other, others) = sorted([(first["host"], first["started"]), (platform.node(), mine)])
        problem = f"{one} was started for {ones}, and {other} for {others}"
        advice = "Give --processes and engine.nodes the same values on all machines (with torchrun: --nnodes)."
        launch.compare_set(refused, "", f"{problem}. {advice}")
    if launch.check([refused]):
        raise ConfigError(launch.get(refused).decode())


@contextmanager
def exchange_interface(store: Store, rank: int, size: int, *, spans: bool, limit_s: float, log: Log) -> Iterator[None]:
    """gloo and NCCL listen on the loopback interface alone in groups that are created here, if all ranks run on one machine. Else
    they listen on the interface that routes to the other machines, unless the user has set another; and every rank has connected to
    every rank of another machine. All ranks call this together.

    Raises:
        ExchangeFailed: two ranks cannot connect, on all ranks; or ranks are missing.
        ConfigError: this machine does not have the interface that its user has set.
    """
    if not spans:
        with on_loopback():
            yield
        return
    # Each use has keys of its own: of an earlier one the ports are closed.
    store = PrefixStore(f"interface/{store.add(f'interfaces/{rank}', 1)}", store)
    here, others = _choose(store, rank, size, limit_s, log)
    if here is None and not any(one["address"] for one in others.values()):
        yield  # a group of the user's own, without MASTER_ADDR: gloo chooses
        return
    with ExitStack() as probe:
        if here is None:
            _refuse(store, rank, others)
        _check_connections(store, rank, size, here, limit_s, log, probe)
    log(f"rank {rank} on {platform.node()} exchanges over {here} ({_why(here)})")
    with environment({name: here.name for name in INTERFACES if name not in os.environ}):
        yield


def _why(here: NetworkInterface) -> str:
    """Why this interface was chosen."""
    if INTERFACES[0] in os.environ:
        return f"{INTERFACES[0]} is set"
    return f"it routes to the other machines; for another: export {INTERFACES[0]}=NAME"


def _choose(store: Store, rank: int, size: int, limit_s: float, log: Log) -> tuple[NetworkInterface | None, Records]:
    """This rank's interface, and the addresses of the other ranks'. It is the user's; else the one that routes to the machine of
    MASTER_ADDR. On that machine the name may be a loopback address: the interface is then the one that routes to another rank."""
    given, host = os.environ.get(INTERFACES[0], "").partition(",")[0], os.environ.get("MASTER_ADDR", "")
    mine = interface_named(given) if given else route_to(host) if host else None
    problem = ""
    if given and (mine is None or is_loopback(mine.address)):
        why = "has no such interface that is up" if mine is None else "has this interface for itself alone"
        problem = f"{INTERFACES[0]}={given}: {platform.node()} {why}. For other machines it has {beyond_loopback()}."
    _publish(store, "address", rank, {"address": mine.address if mine else "", "problem": problem})
    others = _all(store, "address", rank, size, "to choose a network interface", limit_s, log)
    if problem:
        raise ConfigError(f"{problem} Set one of these, or unset it.")
    _raise_problems(others)
    routes = (route_to(one["address"]) for one in others.values() if one["address"])
    return mine or next((route for route in routes if route is not None), None), others


def _refuse(store: Store, rank: int, others: Records) -> NoReturn:
    """This rank has no route to the others: all ranks raise that."""
    addresses = ", ".join(dict.fromkeys(one["address"] for one in others.values() if one["address"]))
    problem = f"rank {rank} on {platform.node()} has no route to other ranks ({addresses}). It has {beyond_loopback()}. {_ADVICE}"
    _publish(store, "listens", rank, {"problem": problem})
    raise ExchangeFailed(problem)


def _check_connections(
    store: Store, rank: int, size: int, here: NetworkInterface, limit_s: float, log: Log, probe: ExitStack
) -> None:
    """Connect to every rank of another machine, as gloo will. Every rank learns which connections failed."""
    family = socket.AF_INET6 if ":" in here.address else socket.AF_INET
    listener = probe.enter_context(socket.create_server((here.address, 0), family=family, backlog=size))
    place = {"machine": machine(), "name": platform.node(), "interface": here.name, "address": here.address}
    _publish(store, "listens", rank, {**place, "port": str(listener.getsockname()[1]), "problem": ""})
    others = _all(store, "listens", rank, size, "to listen on its network interface", limit_s, log)
    _raise_problems(others)
    problem = next((why for number, one in others.items() if (why := _unreachable(number, one))), "")
    if problem:
        problem = (
            f"rank {rank} on {platform.node()}, {here}, cannot connect to {problem}. {platform.node()} has {beyond_loopback()}. "
            f"{_ADVICE}"
        )
    _publish(store, "reached", rank, {"problem": problem})
    # The listener stays open until all have connected.
    reached = _all(store, "reached", rank, size, "to connect to the ranks of other machines", limit_s, log)
    _raise_problems({rank: {"problem": problem}, **reached})


def _unreachable(number: int, other: Mapping[str, str]) -> str:
    """Why a rank of another machine cannot be reached; empty if it can, or if it runs on this machine."""
    if other["machine"] == machine():
        return ""
    try:
        socket.create_connection((other["address"], int(other["port"])), timeout=_CONNECT_S).close()
    except OSError as error:
        where = f"{other['address']} port {other['port']}, interface {other['interface']}"
        return f"rank {number} on {other['name']} at {where} ({error.strerror or error})"
    return ""


def _publish(store: Store, kind: str, rank: int, record: Mapping[str, str]) -> None:
    store.set(f"{kind}/{rank}", json.dumps(record))


def _all(store: Store, kind: str, rank: int, size: int, what: str, limit_s: float, log: Log) -> dict[int, dict[str, str]]:
    """What the other ranks have published."""
    keys = {other: f"{kind}/{other}" for other in range(size) if other != rank}
    try:
        missing = wait_for_keys(store, keys, what, limit_s, log)
        if not missing:
            return {other: json.loads(store.get(key)) for other, key in keys.items()}
    except RuntimeError as error:
        raise ExchangeFailed(f"rank {rank} waited for the others {what}, and the store on rank 0's machine has ended.") from error
    raise ExchangeFailed(f"rank {rank} waited {limit_s:g} s for {named(missing)} {what}. Look at their logs.")


def _raise_problems(others: Records) -> None:
    problem = next((one["problem"] for one in others.values() if one["problem"]), "")
    if problem:
        raise ExchangeFailed(problem)
