"""The supervisor of an elastic run keeps the rendezvous and the islands of this machine alive until the run is finished.

It restarts a process that dies, at once the first time, then after delays that grow, and prints why the process died. It replaces a
rendezvous that does not answer. It gives up an island that refuses to start, or that dies repeatedly soon after its start, and the
others go on; the run ends when no island is left. While the disk is full it gives up none. If the run's folder is lost, no process
can be restarted, and the run ends with the last island.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from atoll.core.errors import AtollError, CheckpointError, ExchangeFailed, is_disk_full
from atoll.core.events import read_event
from atoll.core.protocols import Sink
from atoll.core.verified_files import expanded, read_kept, write_record, write_text
from atoll.engines.elastic.gateway_client import machine_client
from atoll.engines.elastic.leader_event_log import PROCESSES_FILE, QUORUM_FILE, is_lost, write_error
from atoll.engines.elastic.rendezvous import ENDS_KEPT, RegistryClient
from atoll.engines.elastic.rendezvous_health import RendezvousHealth
from atoll.engines.elastic.run_identity import run_id_of
from atoll.engines.elastic.spec import JOIN_INFO, Elastic, JoinInfo, island_name
from atoll.engines.elastic.supervised_process import BACKOFF, RESCUED, Child
from atoll.engines.liveness import Heartbeat, append_log_line, last_error, last_lines, rotate_log
from atoll.engines.network_interfaces import LOOPBACK, free_port
from atoll.engines.run_lifecycle import RunTask
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import explained
from atoll.telemetry.sinks import Fanout
from atoll.telemetry.units import human_bytes

_POLL_S = 0.05
_SHUTDOWN_S = 5.0
"""Processes that were asked to end are killed after this time."""
_REPORT_S = 0.3
"""How often the ends of islands are reported."""
_LOOK_S = 2.0
"""Between two looks at the disk and at the processes' logs."""
_REPEAT_S = 60.0
"""The same warning is shown again after this time."""


class IslandFailed(AtollError):
    """The supervisor can keep no island of this machine alive, or not the rendezvous."""


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


class Supervisor:
    """Keeps the processes of an elastic run alive. Its spec has the number of islands and the port. The sink receives the events as
    they appear in the log."""

    def __init__(self, task: RunTask, sink: Sink, hooks: ProcessHooks) -> None:
        spec = task.spec
        assert isinstance(spec, Elastic)
        self._folder, self._hooks, self._rescue_dir = task.folder.path, hooks, spec.rescue_dir

        def log(text: str) -> None:
            with suppress(OSError):  # the terminal may be gone
                task.log(text)
            if self._folder.is_dir():  # else this would make an empty one
                append_log_line(log_of(self._folder, "supervisor"), text)

        self._log: Callable[[str], object] = log
        self._shown_s: dict[str, float] = {}
        """When each warning was shown last, by its text without numbers."""
        self._looked_s = 0.0
        host = hooks.host or spec.host
        self.address = f"{host}:{spec.port or free_port(host)}"
        join_info, former = self._folder / JOIN_INFO, JoinInfo.former(self._folder)
        # A gateway leads to these two: they listen on loopback.
        local = LOOPBACK if spec.secured else host
        lighthouse = _kept(former.lighthouse if former else "", local, self.address)
        registry = _kept(former.registry if former else "", local, self.address, lighthouse) if spec.secured else ""
        write_text(join_info, JoinInfo(task.run, spec, lighthouse, registry, run_id_of(self._folder)).to_text())
        self.rendezvous = self._child("lighthouse", "rendezvous", str(join_info), self.address)
        own_code = ["--workload", task.code] if task.code else []
        self.islands = [
            self._child(name, "island", registry or self.address, "--name", name, "--folder", str(self._folder), *own_code)
            for name in map(island_name, range(spec.processes or task.run.effective_cluster.islands))
        ]
        self._tail = LogTail(self._folder, Fanout([sink, *hooks.sinks]))
        self._lighthouse, self._registry = lighthouse, registry or self.address
        self._gateway = machine_client(self._folder, self.address, "supervisor") if spec.secured else None

    def _child(self, name: str, *arguments: str) -> Child:
        command = [sys.executable, "-m", "atoll", *arguments]
        return Child(name, self._hooks.command(name, command), log_of(self._folder, name), is_island=arguments[0] == "island")

    @property
    def _children(self) -> list[Child]:
        return [self.rendezvous, *self.islands]

    @property
    def _rescued(self) -> list[Child]:
        """The islands that have lost the run's folder, and saved the state in another."""
        return [child for child in self.islands if child.exit_code == RESCUED]

    @property
    def _has_live_island(self) -> bool:
        return any(child.is_alive for child in self.islands)

    def run(self) -> None:
        """Return when the run is finished.

        Raises:
            IslandFailed: no island can be kept alive, or not the rendezvous; or all islands ended before the run was finished. All
                processes have been stopped.
        """
        ends = EndReports(self._folder, self._registry, self.islands, self._warn)
        self.health = RendezvousHealth(self._lighthouse, self._registry, self._gateway)
        try:
            for child in self._children:
                with explained("write", child.log):
                    child.start()
            while not all(child.exit_code == 0 or child.given_up for child in self.islands):
                self._step()
                time.sleep(_POLL_S)
            self._follow()
        finally:
            self.health.close()
            _stop(self._children)
            ends.close()
        finished = False
        with suppress(OSError, CheckpointError):  # of a lost folder
            finished = RunFolder(self._folder).finished
        if not finished and self._rescued:
            saved = max((child.given_up for child in self._rescued), key=_saved_round)
            raise IslandFailed(f"the run in {self._folder} is not finished: {saved}")
        if not finished:
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
        self._follow()
        self._hooks.step(time.monotonic(), {child.name: child.process for child in self._children if child.process is not None})

    def _follow(self) -> None:
        """Show new events. Logs that cannot be read, or a terminal that is gone, end no island."""
        try:
            self._tail.follow()
        except OSError as error:
            self._warn(f"the events of {self._folder} cannot be shown ({error}); the run goes on")

    def _look(self) -> None:
        """Rotate the processes' logs, and show their warnings and why the folder cannot be written."""
        if error := write_error(self._folder):
            self._warn(self._explained(error))
        for child in self._children:
            try:
                warnings = child.new_warnings()
            except OSError as error:
                warnings = [f"its log cannot be read ({error})"]
            for text in warnings:
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
            if (lost := write_error(self._folder)) and is_lost(lost) and not self._has_live_island:
                child.given_up = str(error)
                if not self._rescued:
                    raise IslandFailed(
                        f"{self._folder} cannot be written ({lost.strerror}), and no island is left. Make it writable again, then "
                        f"resume: atoll run --resume {self._folder}."
                    ) from error
            return
        if child is self.rendezvous:
            self.health.restarted()

    def _plan_restart(self, child: Child) -> None:
        if child.exit_code == RESCUED:
            rescue = expanded(self._rescue_dir or "atoll-rescue-").absolute()
            unnamed = f"the run's folder cannot be written, and the state is saved in {rescue}*"
            child.given_up = last_error(child.log) or self._waiting(child.name) or unnamed
            self._warn(f"{child.name}: {child.given_up}")  # EndReports may have shown it a moment ago: it is not shown again
            return
        error = write_error(self._folder)
        # An island that was started later looks for the state itself.
        alone = not any(other.is_alive and other.started_s < child.started_s for other in self.islands)
        child.plan_restart(alone=alone, disk_full=is_disk_full(error))
        if child.restart_s is not None:
            delay_s = child.restart_s - time.monotonic()
            when = f" in {delay_s:.1f} s" if delay_s > 0 else ""
            why = (last_error(child.log) or last_lines(child.log)) if (child.exit_code or 0) > 0 else ""
            text = f"{child.name} has died ({child.cause_of_death()}) and is restarted{when}"
            problem = self._explained(error) if error is not None else ""
            self._log(": ".join(filter(None, (text, why, problem))))
            return
        none_left = all(island.given_up for island in self.islands)
        if child is self.rendezvous or (none_left and not self._rescued):
            raise IslandFailed(f"{child.name} cannot be kept alive: {child.given_up}.")
        others = "" if none_left else ", and the others go on without it"
        self._log(f"{child.name} cannot be kept alive{others}: {child.given_up}")

    def _waiting(self, name: str) -> str:
        """Why this island waits or has ended, as it registered; empty if that cannot be read."""
        with suppress(ExchangeFailed, KeyError):
            return RegistryClient(self._registry).statuses([name])[name].waiting
        return ""

    def _explained(self, error: OSError) -> str:
        """Why the run's folder cannot be written, in words, and what follows."""
        if not is_disk_full(error):
            goes_on = "; the run goes on, and if the folder is still lost at its end, the islands save the state in another folder"
            why = f"{self._folder} cannot be written: {error.strerror or error}"
            return f"{why}. Make it writable again{goes_on if self._has_live_island else ''}"
        free = human_bytes(shutil.disk_usage(self._folder).free)
        return (
            f"the disk of {self._folder} is full ({free} free, {error.strerror}): no checkpoint and no log can be written. "
            f"Free space there; the run goes on, and finishes when there is room"
        )


def _saved_round(text: str) -> int:
    """The round that an island saved, of its words."""
    found = re.search(r" saved round (\d+) ", text)
    return int(found[1]) if found else -1


def _kept(former: str, host: str, *others: str) -> str:
    """The former address of a server if it is free, since islands of other machines look for it there; else one unlike `others`."""
    former_host, _, port = former.rpartition(":")
    found = f"{host}:{free_port(host, int(port) if former_host == host else 0)}"
    return found if found not in others else _kept("", host, *others)


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


def former_processes(folder: Path) -> list[str]:
    """The processes that supervisors of this folder started, as far as they are kept."""
    remedy = (
        "Restore it from a copy, or remove it: islands of other machines may then take processes of this machine that have ended "
        "for the other side of a network partition, and wait for them until they are started again"
    )
    return read_kept(folder / PROCESSES_FILE, lambda record: [*map(str, record["processes"])], [], f"{remedy}.")


class EndReports:
    """Reports processes of this machine's islands that have ended to the registry, so that other islands do not take them for the
    other side of a partition; and warns if islands wait. Processes of an earlier supervisor of this folder have ended with it."""

    def __init__(self, folder: Path, address: str, islands: Sequence[Child], warn: Callable[[str], object]) -> None:
        self._registry, self._islands, self._warn = RegistryClient(address), islands, warn
        self._path, self._kept = folder / PROCESSES_FILE, max(1, ENDS_KEPT // (1 + len(islands)))
        self._before = former_processes(folder)[-self._kept :]
        self._written = self._before
        self._reported = set[str]()
        """To the registry that runs now, which cuts old reports."""
        self._id = secrets.token_hex(8)
        (folder / QUORUM_FILE).unlink(missing_ok=True)  # a run that is resumed begins with the islands that are started now
        self._heartbeat = Heartbeat(lambda number: self._report(), interval_s=_REPORT_S)

    def _report(self) -> None:
        started, ended = [*self._before], [*self._before]
        for child in self._islands:
            processes = child.processes[-self._kept :]  # read first: the child may be restarted while its exit code is read
            started += processes
            ended += processes if child.exit_code is not None else processes[:-1]
        with suppress(CheckpointError):  # on a full disk; the next supervisor cannot report these
            if started != self._written:
                write_record(self._path, {"processes": started}, CheckpointError)
                self._written = started
        with suppress(ExchangeFailed):
            if self._registry.is_new_to(self._id):
                self._reported = set()
            if new := [process for process in ended if process not in self._reported]:
                self._registry.report_ended(new)
                self._reported = {*ended}
            own = {child.name for child in self._islands}.intersection(self._registry.names())
            for name, status in self._registry.statuses(sorted(own)).items():
                if status.waiting:
                    self._warn(f"{name}: {status.waiting}")

    def close(self) -> None:
        self._heartbeat.close(wait=True)  # a request that ends while Python shuts down would abort the process


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
