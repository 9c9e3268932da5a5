"""The supervisor of an elastic run keeps the rendezvous and the islands of this machine alive until the run is finished.

It restarts a process that dies, at once the first time, then after delays that grow, and prints why the process died. It replaces a
rendezvous that does not answer. It gives up an island that refuses to start, or that dies repeatedly soon after its start, and the
others go on; the run ends when no island is left. While the disk is full it gives up none.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import AtollError, CheckpointError, ExchangeFailed, is_disk_full
from atoll.core.events import read_event
from atoll.core.protocols import Sink
from atoll.core.verified_files import write_text
from atoll.engines.elastic.leader_event_log import QUORUM_FILE, WARNING
from atoll.engines.elastic.membership import new_process
from atoll.engines.elastic.rendezvous import RegistryClient, free_port
from atoll.engines.elastic.run_identity import run_id_of
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.liveness import PEER_MISSING, Heartbeat, append_log_line, last_error, last_lines, rotate_log
from atoll.engines.run_lifecycle import RunTask
from atoll.runs.folder import RunFolder
from atoll.telemetry.sinks import Fanout
from atoll.telemetry.units import human_bytes

_POLL_S = 0.05
_QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft logs every quorum, and torch every store that is away."""
_SHUTDOWN_S = 5.0
"""Processes that were asked to end are killed after this time."""
REFUSED, STATELESS = 2, 4
"""Exit codes: of a process that refuses its task, and of an island that found no state to start from, or none that it can read."""
_REPORT_S, _REPORTED = 0.3, 256
"""How often the ends of islands are reported, and how many of each."""
_MAX_EARLY_DEATHS, _EARLY_S = 5, 10.0
"""A process that dies this often in a row, each time this soon after its start, is not restarted."""
_PROBE_S = 1.0
"""Between two requests to the rendezvous."""
_LOOK_S = 2.0
"""Between two looks at the disk and at the processes' logs."""
_REPEAT_S = 60.0
"""The same warning is shown again after this time."""
_SPACE_BYTES = 1 << 16
"""A disk that has no room for so much is full."""


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
    is_island: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    processes: list[str] = field(default_factory=list, init=False)  # identities of an island's processes so far
    starts: int = field(default=0, init=False)
    started_s: float = field(default=0.0, init=False)  # the last time
    early_deaths: int = field(default=0, init=False)  # in a row
    deaths: int = field(default=0, init=False)  # in a row, each after a short life
    restart_s: float | None = field(default=None, init=False)  # when the dead process is restarted
    killed_for_memory: int = field(default=0, init=False)  # processes of this machine, when this one was started
    read_bytes: int = field(default=0, init=False)  # of its log
    given_up: str = field(default="", init=False)  # the reason why it is not restarted

    def release(self) -> None:
        """Close the pipe to the present process. If it is still alive, it ends."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def start(self) -> None:
        self.release()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if not self.starts and self.log.exists():
            self.read_bytes = self.log.stat().st_size  # the warnings of an earlier run were shown then
        process = new_process(self.name)
        command = [*self.command, "--process", process] if self.is_island else self.command
        with open(self.log, "ab") as log:
            # Its input is a pipe that the supervisor never writes to: it ends when the supervisor does, however that may be.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env={**_QUIET, **os.environ}
            )
        self.processes.append(process)
        self.starts += 1
        self.started_s, self.restart_s = time.monotonic(), None
        self.killed_for_memory = _killed_for_memory()

    @property
    def exit_code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.exit_code is None

    def cause_of_death(self) -> str:
        """The signal or the exit code, in words."""
        code = self.exit_code or 0
        if code < 0:
            memory = code == -signal.SIGKILL and _killed_for_memory() > self.killed_for_memory
            return f"by {signal.Signals(-code).name}" + (", as the kernel does when memory runs out" if memory else "")
        return f"exit code {code}"

    def plan_restart(self, *, alone: bool, disk_full: bool = False) -> None:
        """Decide when the dead process is restarted, or give it up where a restart is of no use. `alone`: no other island is alive
        that may have the state, though it does not answer at the moment."""
        code, now_s = self.exit_code, time.monotonic()
        lived_s = now_s - self.started_s
        if (code != STATELESS or alone) and not disk_full:
            self.early_deaths = self.early_deaths + 1 if lived_s < _EARLY_S else 0
        if not disk_full and (code == REFUSED or (code == STATELESS and alone) or self.early_deaths >= _MAX_EARLY_DEATHS):
            self.given_up = last_error(self.log) or f"see {self.log}"
            return
        backoff = EVICTED_BACKOFF if code == PEER_MISSING else BACKOFF
        self.deaths = self.deaths + 1 if lived_s < backoff.reset_s else 1
        self.restart_s = now_s + backoff.delay_s(self.deaths)

    def new_warnings(self) -> list[str]:
        """The lines for the console that the process has logged since the last call."""
        size = self.log.stat().st_size if self.log.exists() else 0
        start, self.read_bytes = (self.read_bytes if self.read_bytes <= size else 0), size
        if start == size:
            return []
        with self.log.open("rb") as log:
            log.seek(start)
            lines = log.read(size - start).decode("utf-8", errors="replace").splitlines()
        return [text.removeprefix(WARNING) for line in lines if (text := line.partition(" ")[2]).startswith(WARNING)]


@dataclass(frozen=True)
class Backoff:
    """How long a process that died waits for its restart. The delay doubles with every death that follows a life of less than
    `reset_s`. It is drawn at random from its upper half, so that processes that died together are not restarted together."""

    first_s: float  # of the first death
    second_s: float
    longest_s: float
    reset_s: float

    def delay_s(self, deaths: int) -> float:
        """After so many deaths in a row.

        >>> [Backoff(0.0, 1.0, 30.0, 60.0).longest_delay_s(deaths) for deaths in (1, 2, 3, 4, 9, 5000)]
        [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
        """
        return self.longest_delay_s(deaths) * random.uniform(0.5, 1.0)

    def longest_delay_s(self, deaths: int) -> float:
        return self.first_s if deaths <= 1 else min(self.second_s * 2.0 ** min(deaths - 2, 60), self.longest_s)


BACKOFF = Backoff(first_s=0.0, second_s=1.0, longest_s=30.0, reset_s=60.0)
EVICTED_BACKOFF = Backoff(first_s=5.0, second_s=10.0, longest_s=300.0, reset_s=600.0)
"""Of an island that was evicted, or that finds no quorum: each time it joins, the others wait for it until they evict it again."""


def _killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed for lack of memory."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as counters:
        return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
    return 0


class RendezvousHealth:
    """Asks the lighthouse and the registry once a second whether they answer, in a thread of its own. A stopped process closes no
    connection, so only an answer shows that it works. Times are those of requests, not of this process, which may be stopped too.

    Args:
        lighthouse, registry: their addresses, HOST:PORT.
        limit_s: for an answer.
        attempts: requests in a row without an answer, after which the rendezvous hangs.
        start_s: a new process may take this long until its first answer, if a former one answered at all: this process may be on
            a network that does not reach them.
    """

    def __init__(self, lighthouse: str, registry: str, *, limit_s: float = 1.5, attempts: int = 3, start_s: float = 120.0) -> None:
        self._lighthouse, self._registry, self._limit_s = lighthouse, registry, limit_s
        self._attempts, self._start_s, self._reachable = attempts, start_s, False
        self.restarted()
        self._thread = Heartbeat(lambda number: self._probe(), interval_s=_PROBE_S)

    def restarted(self) -> None:
        """A new process has been started."""
        self._process, self._failed, self._answered, self._started_s = object(), 0, False, time.monotonic()

    @property
    def hangs(self) -> bool:
        if not self._answered:
            return self._reachable and time.monotonic() - self._started_s > self._start_s
        return self._failed >= self._attempts

    def _probe(self) -> None:
        process = self._process
        answers = self._lighthouse_answers() and self._registry_answers()
        if process is self._process:  # else the answer is the former process's
            self._answered, self._failed = self._answered or answers, 0 if answers else self._failed + 1
            self._reachable = self._reachable or answers

    def _lighthouse_answers(self) -> bool:
        host, _, port = self._lighthouse.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=self._limit_s) as connection:
                # Any answer will do: this path does not exist.
                connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return bool(connection.recv(1))
        except OSError:
            return False

    def _registry_answers(self) -> bool:
        try:
            RegistryClient(self._registry).join_info()
        except ExchangeFailed:
            return False
        return True

    def close(self) -> None:
        self._thread.close()


class Supervisor:
    """Keeps the processes of an elastic run alive. Its spec has the number of islands and the port. The sink receives the events as
    they appear in the log."""

    def __init__(self, task: RunTask, sink: Sink, hooks: ProcessHooks) -> None:
        spec = task.spec
        assert isinstance(spec, Elastic)
        self._folder, self._hooks = task.folder.path, hooks

        def log(text: str) -> None:
            task.log(text)
            append_log_line(log_of(self._folder, "supervisor"), text)

        self._log: Callable[[str], object] = log
        self._disk = DiskSpace(self._folder)
        self._shown_s: dict[str, float] = {}
        """When each warning was shown last, by its text without numbers."""
        self._looked_s = 0.0
        host = hooks.host or spec.host
        self.address = f"{host}:{spec.port or free_port(host)}"
        join_info = self._folder / "join_info.json"
        former = JoinInfo.former(join_info)
        # A gateway leads to these two: they listen on loopback.
        local = "127.0.0.1" if spec.secured else host
        lighthouse = _kept(former.lighthouse if former else "", local)
        registry = _kept(former.registry if former else "", local, but=lighthouse) if spec.secured else ""
        write_text(join_info, JoinInfo(task.run, spec, lighthouse, registry, run_id_of(self._folder)).to_text())
        self.rendezvous = self._child("lighthouse", "rendezvous", str(join_info), self.address)
        self.islands = [
            self._child(name, "island", registry or self.address, "--name", name, "--folder", str(self._folder))
            for name in map(island_name, range(spec.processes or task.run.effective_cluster.islands))
        ]
        self._tail = LogTail(self._folder, Fanout([sink, *hooks.sinks]))
        self._lighthouse, self._registry = lighthouse, registry or self.address

    def _child(self, name: str, *arguments: str) -> Child:
        command = [sys.executable, "-m", "atoll", *arguments]
        return Child(name, self._hooks.command(name, command), log_of(self._folder, name), is_island=arguments[0] == "island")

    @property
    def _children(self) -> list[Child]:
        return [self.rendezvous, *self.islands]

    def run(self) -> None:
        """Return when the run is finished.

        Raises:
            IslandFailed: no island can be kept alive, or not the rendezvous; or all islands ended before the run was finished. All
                processes have been stopped.
        """
        self.health = RendezvousHealth(self._lighthouse, self._registry)
        ends = EndReports(self._folder, self._registry, self.islands, self._warn)
        try:
            for child in self._children:
                child.start()
            while not all(child.exit_code == 0 or child.given_up for child in self.islands):
                self._step()
                time.sleep(_POLL_S)
            self._tail.follow()
        finally:
            self.health.close()
            _stop(self._children)
            ends.close()
        if not RunFolder(self._folder).finished:
            lost = "; ".join(f"{child.name}: {child.given_up}" for child in self.islands if child.given_up)
            raise IslandFailed(
                f"all islands of this machine have ended, and the run is not finished{f' ({lost})' if lost else ''}. See "
                f"{log_of(self._folder, 'island-*')}, then resume: atoll run --resume {self._folder}."
            )

    def _step(self) -> None:
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._look()
        if self.rendezvous.is_alive and self.health.hangs:
            self._log(f"{self.rendezvous.name} does not answer, and is replaced")
            assert self.rendezvous.process is not None
            self.rendezvous.process.kill()
            self.rendezvous.process.wait()
        for child in self._children:
            ended = child.exit_code is not None and (child.exit_code or child is self.rendezvous)
            if ended and not child.given_up:
                self._restart(child)
        self._tail.follow()
        self._hooks.step(time.monotonic(), {child.name: child.process for child in self._children if child.process is not None})

    def _look(self) -> None:
        """Rotate the processes' logs, and show their warnings and a full disk."""
        if problem := self._disk.problem():
            self._warn(problem)
        for child in self._children:
            for text in child.new_warnings():
                self._warn(f"{child.name}: {text}")
            rotate_log(child.log, in_use=True)

    def _warn(self, text: str) -> None:
        """Show a warning, unless one that differs in numbers only was shown a moment ago."""
        now_s, key = time.monotonic(), re.sub(r"[\d.]+", "", text)
        if now_s - self._shown_s.get(key, -_REPEAT_S) >= _REPEAT_S:
            self._shown_s = {one: shown_s for one, shown_s in self._shown_s.items() if now_s - shown_s < _REPEAT_S} | {key: now_s}
            self._log(text)

    def _restart(self, child: Child) -> None:
        """Restart a dead process, when its time has come."""
        if child.restart_s is None:
            self._plan_restart(child)
        if child.restart_s is None or time.monotonic() < child.restart_s:
            return
        try:
            child.start()
        except OSError as error:  # no room for its log, or no memory for another process
            child.deaths += 1
            child.restart_s = time.monotonic() + BACKOFF.delay_s(child.deaths)
            self._warn(f"{child.name} cannot be restarted yet: {error}")
            return
        if child is self.rendezvous:
            self.health.restarted()

    def _plan_restart(self, child: Child) -> None:
        problem = self._disk.problem()
        # An island that was started later looks for the state itself.
        alone = not any(other.is_alive and other.started_s < child.started_s for other in self.islands)
        child.plan_restart(alone=alone, disk_full=bool(problem))
        if child.restart_s is not None:
            delay_s = child.restart_s - time.monotonic()
            when = f" in {delay_s:.1f} s" if delay_s > 0 else ""
            why = (last_error(child.log) or last_lines(child.log)) if (child.exit_code or 0) > 0 else ""
            text = f"{child.name} has died ({child.cause_of_death()}) and is restarted{when}"
            self._log(": ".join(filter(None, (text, why, problem))))
        elif child is self.rendezvous or all(island.given_up for island in self.islands):
            raise IslandFailed(f"{child.name} cannot be kept alive: {child.given_up}.")
        else:
            self._log(f"{child.name} cannot be kept alive, and the others go on without it: {child.given_up}")


class DiskSpace:
    """Whether the disk of a folder is full. A quota shows only when a file is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def problem(self) -> str:
        """The path and the room that is left, in words; empty if there is room."""
        probe = self._folder / f".space-{secrets.token_hex(4)}"
        try:
            with probe.open("xb", buffering=0) as file:
                left = _SPACE_BYTES
                while left:  # a nearly full disk takes a part
                    left -= file.write(bytes(left)) or 0
        except OSError as error:
            if not is_disk_full(error):
                return ""  # the processes that write there report it
            free = human_bytes(shutil.disk_usage(self._folder).free)
            return (
                f"the disk of {self._folder} is full ({free} free, {error.strerror}): no checkpoint and no log can be written. "
                f"Free space there; the run goes on, and finishes when there is room"
            )
        finally:
            with suppress(OSError):
                probe.unlink()
        return ""


def _kept(former: str, host: str, but: str = "") -> str:
    """The former address of a server if it is free, since islands of other machines look for it there; else another one."""
    former_host, _, port = former.rpartition(":")
    found = f"{host}:{free_port(host, int(port) if former_host == host else 0)}"
    return found if found != but else _kept("", host, but)


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
    other side of a partition; and warns if islands wait. Processes of an earlier supervisor of this folder have ended with it."""

    def __init__(self, folder: Path, address: str, islands: Sequence[Child], warn: Callable[[str], object]) -> None:
        self._registry, self._islands, self._warn = RegistryClient(address), islands, warn
        self._path = folder / "processes.txt"
        self._before = self._path.read_text("utf-8", "replace").split()[-_REPORTED:] if self._path.exists() else []
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
                if status.waiting:
                    self._warn(f"{name}: {status.waiting}")

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
                # Half a line, where the log was truncated and has grown since. The leader reports damage.
                with suppress(ValueError, TypeError, KeyError, AttributeError):
                    self._sink.emit(read_event(line.decode()))
