"""RunFolder: the folder of one run. docs/runs.md lists its files. Reports and comparisons read such folders and nothing else."""

from __future__ import annotations

import errno
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import atoll
from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import joined
from atoll.core.errors import AtollError, ConfigError
from atoll.core.verified_files import DIGESTS, UNFINISHED, check_digests, open_to_append, write_digests, write_record
from atoll.runs.run_settings import Run
from atoll.telemetry.run_progress import RUN_FORMAT, read_settings
from atoll.telemetry.summary import read_summary

LOOP_RECIPE = "own loop"
"""What run.json has as the recipe of a user's loop under `atoll.islands`, which has no Run and no engine."""


def is_own_loop(record: Mapping[str, Any]) -> bool:
    """Whether this run.json is of a user's loop under `atoll.islands`."""
    return record.get("recipe") == LOOP_RECIPE and "type" not in record


def own_loop_problem(path: Path) -> str:
    """Why a command that needs a model or an engine cannot have the folder of an own loop."""
    return (
        f"{path} has the log of an own loop. Its script has the model, saves it, and trains on: see the command in "
        f"{path / 'source.txt'}. `atoll report` and `atoll compare` read this folder."
    )


class _File:
    """The path of a file in a run's folder, as an attribute of RunFolder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Make it with `create` or `open`."""

    path: Path

    # ------------------------------------------------------------------------------------------------- making and opening

    @staticmethod
    def create(path: str | Path, run: Run | Mapping[str, Any], command: Sequence[str]) -> RunFolder:
        """A new folder for this Run, or for the loop that a mapping describes. Raises ConfigError if the path holds something
        already, or cannot be written. Of several processes that create one folder, one succeeds."""
        folder, record = RunFolder(Path(path)), {"format": RUN_FORMAT, **(run if isinstance(run, Mapping) else to_json(run))}
        if not os.path.lexists(folder.path / _LOCK):  # else another process may be creating it
            folder._refuse_contents()
        with _writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
        with folder.lock():
            folder._refuse_contents()  # another process may have created it meanwhile
            # run.json comes first: with it the folder can be opened even if this process is killed right after.
            write_record(folder.settings, record)
            folder.append_source("started", command)
        return folder

    def _refuse_contents(self) -> None:
        """Raise ConfigError if the path holds something else than the lock, and a file being written, of a process that creates
        the folder."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, and a run needs a folder of its own. Use {_ANOTHER}.")
        with _writing(self.path):
            found = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if {name for name in found if not name.endswith(UNFINISHED)} - {_LOCK}:
            what, advice = "a folder that is not empty", f"Use {_ANOTHER}."
            if self.settings.is_file():
                what, advice = "a run's folder", f"Use --resume (in Python atoll.resume) to continue it, or {_ANOTHER}."
            raise ConfigError(f"{self.path} is {what} already, and a new run would overwrite it. {advice}")

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """The folder of a run that was started before. Raises ConfigError if there is no such folder, it is no run's folder, or
        another version of atoll wrote it; CheckpointError if the run is finished and its files have changed since."""
        folder = RunFolder(Path(path))
        if not folder.settings.is_file():
            what = "has no run.json, so it is no run's folder" if folder.path.is_dir() else "is not a folder"
            raise ConfigError(f"{path} {what}. Give the folder of --out (in Python out=), or the one that the run printed.")
        folder.run_json  # noqa: B018, reads and checks it
        check_digests(folder.path)
        return folder

    @property
    def run(self) -> Run:
        self.refuse_own_loop()
        found: Run = from_json(self.run_json, hint=Run)
        return found

    @property
    def run_json(self) -> dict[str, Any]:
        """The Run as JSON."""
        return read_settings(self.path)

    @property
    def finished(self) -> bool:
        """Whether the run is finished, with its weights and figures in the folder. Raises CheckpointError if it is, and its files
        have changed since."""
        if check_digests(self.path):
            return True
        try:
            read_summary(self.path)
        except AtollError:
            return False
        return self.final.exists()

    def seal(self) -> None:
        """Write the digests of the files of the finished run, which readers verify. Its logs and checkpoints are not among them:
        nothing reads them any more."""
        names = (
            self.settings,
            self.engine,
            self.events,
            self.timing,
            self.final,
            self.final_buffers,
            self.tokenizer,
            self.workload,
        )
        write_digests(self.path, [path.name for path in names], result=self.final.name)

    def unseal(self) -> None:
        """Remove the digests of a run that continues, because its final weights were removed."""
        with _writing(self.path):
            (self.path / DIGESTS).unlink(missing_ok=True)

    def refuse_own_loop(self) -> None:
        """Raise ConfigError if this is the folder of a user's loop under `atoll.islands`, which has no Run."""
        if is_own_loop(self.run_json):
            raise ConfigError(own_loop_problem(self.path))

    def refuse_own_workload(self) -> None:
        """Raise ConfigError if only the user's code can make the model of this run."""
        if (saved := self._own_workload()) is not None:
            raise ConfigError(
                f"{self.path} trained a user's workload, {saved}, whose model its settings do not describe. Make the model in your "
                f"code, and load its weights: module.load_state_dict(safetensors.torch.load_file({str(self.final)!r}), "
                f"strict=False); buffers are in {self.final_buffers.name}, if it has any."
            )

    def _own_workload(self) -> str | None:
        return self.workload.read_text().strip() if self.workload.exists() else None

    def check_workload(self, name: str | None) -> None:
        """Refuse to open a run of a user's workload without that workload, and other runs with one. `name` is the name of the
        workload's class; none stands for the Run's own model and data."""
        saved = self._own_workload()
        if saved is not None and name is None:
            raise ConfigError(
                f"{self.path} trained a user's workload, {saved}, which its settings do not describe. Give it again: "
                f"--workload FILE.py:NAME, or in Python atoll.resume({str(self.path)!r}, workload=...)."
            )
        if saved is None and name is not None:
            raise ConfigError(f"{self.path} trained its Run's own model and data, not a {name}. Leave out workload.")

    def same_run(self, run: Run) -> None:
        """Raise ConfigError with the settings that differ, if the folder is that of another Run. Settings that an older folder
        lacks are at their defaults."""
        own = self.run_json
        with suppress(ConfigError):  # of a Run that this version cannot read
            own = to_json(from_json(own, hint=type(run)))
        found = differences(to_json(run), own)
        if found:
            shown = "".join(f"\n  {path}: given {given}, in the folder {own}" for path, given, own in found[:_SHOWN])
            more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"{self.path} is the folder of another run. A run is resumed with the settings it began with; these differ:"
                f"{shown}{more}\nResume without changing settings, or start a new run in {_ANOTHER}."
            )

    # -------------------------------------------------------------------------------------------------------------- paths

    settings = _File("run.json")
    engine = _File("engine.json")
    source = _File("source.txt")
    events = _File("events.jsonl")
    timing = _File("timing.jsonl")
    checkpoints = _File("checkpoints")
    error_buffers = _File("error_buffers")
    warm_start = _File("warm_start.safetensors")
    final = _File("final.safetensors")
    final_buffers = _File("final_buffers.safetensors")
    summary = _File("summary.json")
    tokenizer = _File("tokenizer.json")
    workload = _File("workload.txt")

    # --------------------------------------------------------------------------------------------------------------- lock

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, so that no other process works in it. Raises ConfigError with the holder, if another process holds it.
        The lock of a process that dies is released."""
        with ExitStack() as held:
            with _writing(self.path):
                file = held.enter_context(open_to_append(self.path / _LOCK))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    file.seek(0)
                    holder = file.read(200).decode(errors="replace").strip("\0 \n") or "another process"
                    raise ConfigError(
                        f"{self.path} is in use by {holder}: two processes would overwrite each other's files. "
                        f"Wait until it ends or stop it, or use {_ANOTHER}."
                    ) from error
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                file.flush()
            try:
                yield
            finally:
                # The file stays: if it were removed, two processes could lock two files of one name.
                with suppress(OSError):
                    file.truncate(0)

    @property
    def in_use(self) -> bool:
        """Whether a process holds the folder. Nothing is written to find out."""
        try:
            with open(self.path / _LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock was ever there, or it cannot be read
            pass
        return False

    # ------------------------------------------------------------------------------------------------------------- source

    def append_source(self, verb: str, command: Sequence[str]) -> None:
        """Record in source.txt the version, machine and command that started or resumed the run."""
        lines = {verb: datetime.now().astimezone().isoformat(timespec="seconds"), "command": shlex.join(command), **source()}
        with _writing(self.path), open_to_append(self.source) as file:
            file.write(("".join(f"{name}: {value}\n" for name, value in lines.items()) + "\n").encode(errors="replace"))


_LOCK = "lock"
_LONGEST_NAME = 48  # a letter has up to 4 bytes, and a file's name 255
_SHOWN = 20  # differing settings in one message
_ANOTHER = "another --out (in Python out=)"


def folder_name(recipe: str) -> str:
    """A name for the folder of runs of this recipe, which another machine may have sent: it leads to no other folder.

    >>> folder_name("demo-diloco"), folder_name("../../evil")
    ('demo-diloco', '--..-evil')
    """
    return re.sub(r"[^\w.-]+|^\.+", "-", recipe)[:_LONGEST_NAME]


def default_path(recipe: str, seed: int, root: Path = Path("runs"), now: datetime | None = None) -> Path:
    """A new folder for a run: runs/<recipe>/seed<seed>-<yyyymmdd-hhmmss>, with a number behind it if that exists."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    path = root / folder_name(recipe) / f"seed{seed}-{stamp}"
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"seed{seed}-{stamp}-{count}")
    return path


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns errors of writing into one that says what to do."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        if error.errno == errno.ELOOP:
            why = f"{error.filename} is a symbolic link, and atoll writes nowhere else"
        raise ConfigError(f"cannot write to {folder}: {why}. Make room or get access there, or use {_ANOTHER}.") from error


# ------------------------------------------------------------------------------------------------------------- comparing


def differences(given: Any, own: Any, at: str = "") -> list[tuple[str, str, str]]:
    """Where two Runs as JSON differ: the dotted path, under `at`, and both values as text."""
    inside: list[tuple[str | int, Any, Any]]
    if _is_record(given) and _is_record(own) and given.get("type") == own.get("type"):
        names = dict.fromkeys([*given, *own])
        inside = [(name, given.get(name, _ABSENT), own.get(name, _ABSENT)) for name in names]
    elif isinstance(given, list) and isinstance(own, list) and len(given) == len(own):
        inside = [(number, *both) for number, both in enumerate(zip(given, own, strict=True))]
    else:
        equal = given == own and isinstance(given, bool) == isinstance(own, bool)
        return [] if equal else [(at or "the Run", _short(given), _short(own))]
    return [found for name, one, two in inside for found in differences(one, two, joined(at, name))]


def _is_record(node: Any) -> bool:
    return isinstance(node, Mapping) and node.get("type") not in _PLAIN


_ABSENT = object()
_PLAIN = ("float", "path")  # values that JSON cannot express; see `to_json`


def _short(value: Any) -> str:
    """A value on one line, with the name and fields of a dataclass."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, Mapping) and value.get("type") in _PLAIN:
        return str(value["value"])
    if isinstance(value, Mapping) and "type" in value:
        inside = ", ".join(f"{name}={_short(item)}" for name, item in value.items() if name != "type")
        return f"{str(value['type']).rpartition('.')[2]}({inside})"
    return json.dumps(value)


# ---------------------------------------------------------------------------------------------------------------- source


def source() -> dict[str, str]:
    """Versions, machine, and the commit if atoll runs from a checkout."""
    return {
        "atoll": _version(),
        **_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


_WITH_CODE = "src", "benchmarks"


def _version() -> str:
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> dict[str, str]:
    """The commit, and git's hashes of the folders with code: a commit that was not published can be found by these."""
    package = Path(atoll.__file__).resolve().parent
    root = package.parents[1]
    # Only atoll's own checkout counts: an installed copy may lie in a virtual environment of another repository.
    if package != root / "src" / "atoll" or not (root / ".git").exists():
        return {"commit": "not from a checkout"}
    # Benchmark records and pages change no result.
    made_with = (".", ":(exclude)benchmarks/records", ":(exclude)docs", ":(exclude)*.md")
    status = _git(root, "status", "--porcelain", "--", *made_with)
    commit, trees = _git(root, "rev-parse", "HEAD"), _git(root, "rev-parse", *(f"HEAD:{folder}" for folder in _WITH_CODE))
    if commit is None or trees is None or status is None:
        return {"commit": "unknown (git did not answer)"}
    state = "with uncommitted changes" if status else "clean"
    named = ", ".join(map(" ".join, zip(_WITH_CODE, trees.split(), strict=True)))
    return {"commit": f"{commit} ({state})", "trees": f"{named} ({state})"}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
