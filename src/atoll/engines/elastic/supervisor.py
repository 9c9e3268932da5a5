"""The supervisor of an elastic run keeps the rendezvous and the islands of this machine alive until the run is finished.

It restarts a process that dies. It gives up an island that refuses to start, or that dies repeatedly soon after its start, and the
others go on; the run ends when no island is left.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import AtollError, CheckpointError, ExchangeFailed
from atoll.core.events import read_event
from atoll.core.protocols import Sink
from atoll.core.serialization import write_text
from atoll.engines.elastic.leader_event_log import QUORUM_FILE
from atoll.engines.elastic.membership import new_process
from atoll.engines.elastic.rendezvous import RegistryClient, free_port
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.liveness import Heartbeat, last_error
from atoll.engines.run_lifecycle import RunTask
from atoll.runs.folder import RunFolder
from atoll.telemetry.sinks import Fanout

_POLL_S = 0.05
_QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft logs every quorum, and torch every store that is away."""
_SHUTDOWN_S = 5.0
"""Processes that were asked to end are killed after this time."""
REFUSED, STATELESS = 2, 4
"""Exit codes: of a process that refuses its task, and of an island that found no state to start from, or none that it can read."""
_REPORT_S, _WAIT_LOG_S, _REPORTED = 0.3, 60.0, 256
"""How often the ends of islands are reported, and how often a waiting island is logged; and how many ends of each."""
_MAX_EARLY_DEATHS, _EARLY_S = 5, 10.0
"""A process that dies this often in a row, each time this soon after its start, is not restarted."""


class IslandFailed(AtollError):
    """The supervisor can keep no island of this machine alive, or not the rendezvous."""


def island_name(number: int) -> str:
    """The name of an island that the run starts: names sort as numbers do."""
    return f"island-{number:04d}"


def log_of(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


class ProcessHooks:
    """Lets a fault injector act on the processes of a run. These hooks do nothing."""

    joining = ""
    """Shown instead of how to join the run, where no joiner can reach it."""
    host: str | None = None
    """The address to listen on, if not the spec's."""
    sinks: Sequence[Sink] = ()

    def command(self, name: str, command: Sequence[str]) -> Sequence[str]:
        """The command that starts the process of this name."""
        return command

    def step(self, now_s: float, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Called in every iteration of the supervisor's loop, with the running processes by name."""


@dataclass
class Child:
    """A process that the supervisor keeps alive."""

    name: str
    command: Sequence[str]
    log: Path  # of its output
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started_s: float = 0.0  # the last time
    early_deaths: int = 0  # in a row
    is_island: bool = False
    processes: list[str] = field(default_factory=list)  # identities of an island's processes so far
    given_up: str = ""  # the reason why it is not restarted

    def release(self) -> None:
        """Close the pipe to the present process. If it is still alive, it ends."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def start(self) -> None:
        self.release()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        process = new_process(self.name)
        command = [*self.command, "--process", process] if self.is_island else self.command
        with open(self.log, "ab") as log:
            # Its input is a pipe that the supervisor never writes to: it ends when the supervisor does, however that may be.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env={**_QUIET, **os.environ}
            )
        self.processes.append(process)
        self.starts += 1
        self.started_s = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.exit_code is None

    def restart(self, *, alone: bool) -> None:
        """Restart the dead process, or give it up where a restart is of no use. `alone`: no other island is alive that may have the
        state, though it does not answer at the moment."""
        code = self.exit_code
        if code != STATELESS or alone:
            self.early_deaths = self.early_deaths + 1 if time.monotonic() - self.started_s < _EARLY_S else 0
        if code == REFUSED or (code == STATELESS and alone) or self.early_deaths >= _MAX_EARLY_DEATHS:
            self.given_up = last_error(self.log) or f"see {self.log}"
        else:
            self.start()


class Supervisor:
    """Keeps the processes of an elastic run alive. Its spec has the number of islands and the port. The sink receives the events as
    they appear in the log."""

    def __init__(self, task: RunTask, sink: Sink, hooks: ProcessHooks) -> None:
        spec = task.spec
        assert isinstance(spec, Elastic)
        self._folder, self._log, self._hooks = task.folder.path, task.log, hooks
        host = hooks.host or spec.host
        self.address = f"{host}:{spec.port or free_port(host)}"
        join_info = self._folder / "join_info.json"
        # Islands of other machines look for the lighthouse where it was before.
        former = JoinInfo.from_text(join_info.read_text("utf-8")).lighthouse if join_info.exists() else ":0"
        former_host, _, port = former.rpartition(":")
        lighthouse = f"{host}:{free_port(host, int(port) if former_host == host else 0)}"
        join_info.write_text(JoinInfo(task.run, spec, lighthouse).to_text(), "utf-8")
        self.rendezvous = self._child("lighthouse", "rendezvous", str(join_info), self.address)
        self.islands = [
            self._child(name, "island", self.address, "--name", name, "--folder", str(self._folder))
            for name in map(island_name, range(spec.processes or task.run.effective_cluster.islands))
        ]
        for child in self.islands:
            child.is_island = True
        self._tail = LogTail(self._folder, Fanout([sink, *hooks.sinks]))
        self._ends = EndReports(self._folder, self.address, self.islands, self._log)

    def _child(self, name: str, *arguments: str) -> Child:
        command = [sys.executable, "-m", "atoll", *arguments]
        return Child(name, self._hooks.command(name, command), log_of(self._folder, name))

    @property
    def _children(self) -> list[Child]:
        return [self.rendezvous, *self.islands]

    def run(self) -> None:
        """Return when the run is finished.

        Raises:
            IslandFailed: no island can be kept alive, or not the rendezvous; or all islands ended before the run was finished. All
                processes have been stopped.
        """
        try:
            for child in self._children:
                child.start()
            while not all(child.exit_code == 0 or child.given_up for child in self.islands):
                self._step()
                time.sleep(_POLL_S)
            self._tail.follow()
        finally:
            _stop(self._children)
            self._ends.close()
        if not RunFolder(self._folder).finished:
            lost = "; ".join(f"{child.name}: {child.given_up}" for child in self.islands if child.given_up)
            raise IslandFailed(
                f"all islands of this machine have ended, and the run is not finished{f' ({lost})' if lost else ''}. See "
                f"{log_of(self._folder, 'island-*')}, then resume: atoll run --resume {self._folder}."
            )

    def _step(self) -> None:
        for child in self._children:
            ended = child.exit_code is not None and (child.exit_code or child is self.rendezvous)
            if ended and not child.given_up:
                self._restart(child)
        self._tail.follow()
        self._hooks.step(time.monotonic(), {child.name: child.process for child in self._children if child.process is not None})

    def _restart(self, child: Child) -> None:
        code = child.exit_code or 0
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # An island that was started later looks for the state itself.
        child.restart(alone=not any(other.is_alive and other.started_s < child.started_s for other in self.islands))
        if not child.given_up:
            self._log(f"{child.name} has died ({reason}) and is restarted")
        elif child is self.rendezvous or all(island.given_up for island in self.islands):
            raise IslandFailed(f"{child.name} cannot be kept alive: {child.given_up}.")
        else:
            self._log(f"{child.name} cannot be kept alive, and the others go on without it: {child.given_up}")


def _stop(children: Sequence[Child]) -> None:
    running = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _SHUTDOWN_S
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
    for child in children:
        child.release()


class EndReports:
    """Reports processes of this machine's islands that have ended to the registry, so that other islands do not take them for the
    other side of a partition; and logs why islands wait. Processes of an earlier supervisor of this folder have ended with it."""

    def __init__(self, folder: Path, address: str, islands: Sequence[Child], log: Callable[[str], object]) -> None:
        self._registry, self._islands, self._log = RegistryClient(address), islands, log
        self._path, self._logged_s = folder / "processes.txt", dict[str, float]()
        self._before = self._path.read_text("utf-8").split()[-_REPORTED:] if self._path.exists() else []
        self._written = len(self._before)
        (folder / QUORUM_FILE).unlink(missing_ok=True)  # a run that is resumed begins with the islands that are started now
        self._heartbeat = Heartbeat(lambda number: self._report(), interval_s=_REPORT_S)

    def _report(self) -> None:
        started, ended = [*self._before], [*self._before]
        for child in self._islands:
            processes = child.processes[-_REPORTED:]  # read first: the child may be restarted while its exit code is read
            started += processes
            ended += processes if child.exit_code is not None else processes[:-1]
        with suppress(CheckpointError):  # on a full disk; the next supervisor cannot report these
            if len(started) != self._written:
                write_text(self._path, "".join(f"{process}\n" for process in started), CheckpointError)
                self._written = len(started)
        with suppress(ExchangeFailed):
            self._registry.report_ended(ended)
            own = {child.name for child in self._islands}.intersection(self._registry.names())
            for name, status in self._registry.statuses(sorted(own)).items():
                if status.waiting and time.monotonic() - self._logged_s.get(name, -math.inf) > _WAIT_LOG_S:
                    self._logged_s[name] = time.monotonic()
                    self._log(f"{name}: {status.waiting}")

    def close(self) -> None:
        self._heartbeat.close()


class LogTail:
    """Passes the events on that the leader appends to the run's log."""

    def __init__(self, folder: Path, sink: Sink) -> None:
        self._path, self._sink = RunFolder(folder).events, sink
        self._at = self._path.stat().st_size if self._path.exists() else 0

    def follow(self) -> None:
        """Pass on new events."""
        if not self._path.exists():
            return
        self._at = min(self._at, self._path.stat().st_size)  # a resume may have truncated it
        with open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError):  # half a line, where the log was truncated and has grown since
                    self._sink.emit(read_event(line.decode()))
