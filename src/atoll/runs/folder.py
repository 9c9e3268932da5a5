"""RunFolder: where everything about one run lies.

    run.json                 the Run as plain data; a folder with this file is a run's
    source.txt               what made it: versions, machine, commit and command, with a block for each time it was resumed
    events.jsonl             what happened, a function of the Run and its seed
    timing.jsonl             what depends on the machine
    checkpoints/             what the run needs to go on
    warm_start.safetensors   the weights that the islands began with
    final.safetensors        the trained weights
    summary.json             the figures of a finished run
    lock                     held by the process that works here

What compares or reports runs reads such folders and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

import atoll
from atoll.core.config.json_records import from_json, to_json
from atoll.core.errors import ConfigError
from atoll.core.serialization import replacing


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Make it with `create` or `open`."""

    path: Path

    # ------------------------------------------------------------------------------------------------- making and opening

    @staticmethod
    def create(path: str | Path, run_json: Mapping[str, Any], command: Sequence[str]) -> RunFolder:
        """A new folder for this Run, which the command started.

        Raises:
            ConfigError: there is something in that place already, or it cannot be written.
        """
        folder = RunFolder(Path(path))
        if folder.path.exists() and not folder.path.is_dir():
            raise ConfigError(f"{path} is a file, and a run needs a folder of its own. Use {_ANOTHER}.")
        if folder.path.is_dir() and any(folder.path.iterdir()):
            what, advice = "a folder that is not empty", f"Use {_ANOTHER}."
            if folder._run.is_file():
                what, advice = "a run's folder", f"Use --resume (in Python atoll.resume) to go on, or {_ANOTHER}."
            raise ConfigError(f"{path} is {what} already, and a new run would overwrite it. {advice}")
        with _writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
        # run.json first: it makes the folder a run's, which can be opened even if we are killed after it.
        write_text(folder._run, json.dumps(run_json, indent=2) + "\n")
        folder._append_source("started", command)
        return folder

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """The folder of a run that was started before.

        Raises:
            ConfigError: there is no such folder, or it is not a run's.
        """
        folder = RunFolder(Path(path))
        if not folder._run.is_file():
            what = "has no run.json, so it is not a run's folder" if folder.path.is_dir() else "is not a folder"
            raise ConfigError(
                f"{path} {what}. Give the folder that a run was told as --out (in Python out=), or that it printed when it started."
            )
        folder._read()
        return folder

    @property
    def run_json(self) -> dict[str, Any]:
        """The Run as plain data."""
        return self._read()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._run.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._run} cannot be read ({error}). Restore it from a copy, or start the run afresh.") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self._run} holds a {type(found).__name__} and should hold a Run. Restore it from a copy.")
        return found

    def resumed(self, command: Sequence[str]) -> None:
        """Note in source.txt with what the run goes on, which may be another version or machine."""
        self._append_source("resumed", command)

    def same_run(self, run_json: Mapping[str, Any]) -> None:
        """Check that this is the Run of the folder. Settings that an older folder lacks count as at their defaults.

        Raises:
            ConfigError: it is another Run; lists the settings that differ.
        """
        found = differences(run_json, _with_defaults(self.run_json))
        if found:
            shown = "".join(f"\n  {path}: given {given}, in the folder {own}" for path, given, own in found[:_SHOWN])
            more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"{self.path} is the folder of another run. A run is resumed with the settings it began with; these differ:"
                f"{shown}{more}\nResume without changing settings, or start a new run in {_ANOTHER}."
            )

    # -------------------------------------------------------------------------------------------------------------- paths

    @property
    def _run(self) -> Path:
        return self.path / "run.json"

    @property
    def source(self) -> Path:
        return self.path / "source.txt"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def warm_start(self) -> Path:
        return self.path / "warm_start.safetensors"

    @property
    def final(self) -> Path:
        return self.path / "final.safetensors"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    # --------------------------------------------------------------------------------------------------------------- lock

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, so that no other process works in it. A process that dies lets go by itself.

        Raises:
            ConfigError: another process holds it; says which.
        """
        with self._held() as file:
            try:
                yield
            finally:
                # The file stays: to remove it would let two processes lock two files of one name.
                with suppress(OSError):
                    file.truncate(0)

    def _held(self) -> IO[str]:
        """The lock's file, locked as long as it is open."""
        with _writing(self.path), ExitStack() as on_error:
            file = on_error.enter_context(open(self.path / "lock", "a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ConfigError(
                    f"{self.path} is in use by {holder}: two processes in one folder would spoil each other's files. "
                    f"Wait until it ends or stop it, or use {_ANOTHER}."
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            on_error.pop_all()
            return file

    # ------------------------------------------------------------------------------------------------------------- source

    def _append_source(self, verb: str, command: Sequence[str]) -> None:
        lines = {verb: datetime.now().astimezone().isoformat(timespec="seconds"), "command": shlex.join(command), **source()}
        with _writing(self.path), open(self.source, "a", encoding="utf-8") as file:
            file.write("".join(f"{name}: {value}\n" for name, value in lines.items()) + "\n")


_SHOWN = 20  # differing settings in one message
_ANOTHER = "another --out (in Python out=)"


def default_path(recipe: str, seed: int, root: Path = Path("runs"), now: datetime | None = None) -> Path:
    """A new place for a run: runs/<recipe>/seed<seed>-<yyyymmdd-hhmmss>, with a number behind it if that exists.

    >>> default_path("diloco", 3, now=datetime(2031, 12, 24, 18, 0, 5)).as_posix()
    'runs/diloco/seed3-20311224-180005'
    """
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    path = root / re.sub(r"[^\w.-]+|^\.+", "-", recipe) / f"seed{seed}-{stamp}"
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"seed{seed}-{stamp}-{count}")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, replacing what was there in one step.

    Raises:
        ConfigError: it cannot be written. What was there is untouched.
    """
    with replacing(path, ConfigError) as file:
        file.write(text.encode())


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Says what to do where a run's folder cannot be written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot write to {folder}: {why}. Make room or get access there, or use {_ANOTHER}.") from error


# ------------------------------------------------------------------------------------------------------------- comparing


def differences(given: Any, own: Any) -> list[tuple[str, str, str]]:
    """Where two Runs as plain data differ: dotted path, the one's value and the other's, as text.

    >>> differences({"seed": 1, "link": {"latency_s": 0.1}}, {"seed": 2, "link": {"latency_s": 0.1}})
    [('seed', '1', '2')]
    """
    return [(path, _short(one), _short(two)) for path, one, two in _differences(given, own, "")]


def _differences(one: Any, two: Any, at: str) -> Iterator[tuple[str, Any, Any]]:
    if _is_record(one) and _is_record(two) and one.get("type") == two.get("type"):
        for name in dict.fromkeys([*one, *two]):
            yield from _differences(one.get(name, _ABSENT), two.get(name, _ABSENT), f"{at}.{name}" if at else name)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from _differences(left, right, f"{at}.{i}")
    elif one != two or isinstance(one, bool) != isinstance(two, bool):
        yield at or "the Run", one, two


def _is_record(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("type") not in _PLAIN


_ABSENT = object()
_PLAIN = ("float", "path")  # what JSON has no word for; see `to_json`


def _short(value: Any) -> str:
    """A value on one line, a dataclass by its name and fields."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, Mapping) and value.get("type") in _PLAIN:
        return str(value["value"])
    if isinstance(value, Mapping) and "type" in value:
        inside = ", ".join(f"{name}={_short(item)}" for name, item in value.items() if name != "type")
        return f"{str(value['type']).rpartition('.')[2]}({inside})"
    return json.dumps(value)


def _with_defaults(run_json: dict[str, Any]) -> Any:
    """The same with the settings that this version added, or as it is if this version cannot read it."""
    try:
        return to_json(from_json(run_json))
    except ConfigError:
        return run_json


# ---------------------------------------------------------------------------------------------------------------- source


def source() -> dict[str, str]:
    """What a run is made with: versions, machine, and the commit if atoll runs from a checkout."""
    return {
        "atoll": _version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("atoll")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    package = Path(atoll.__file__).resolve().parent
    root = package.parents[1]
    # Only our own checkout counts: an installed copy may lie in the virtual environment of somebody else's repository.
    if package != root / "src" / "atoll" or not (root / ".git").exists():
        return "not from a checkout"
    # What a benchmark found, and pages that tell of it, change no figure.
    made_with = (".", ":(exclude)benchmarks/records", ":(exclude)docs", ":(exclude)*.md")
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", *made_with)
    if commit is None or status is None:
        return "unknown (git did not answer)"
    return f"{commit} (with changes that are not committed)" if status else f"{commit} (clean)"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
