"""Launching a run on real processes: this command starts one process per rank on this machine, or torchrun started this one. With
`engine.nodes` the user types a command on each of several machines, and each starts the ranks of its machine.

torch's own launcher is not used: it opens its store on all interfaces, and unpickles what it finds there.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from atoll.core.errors import AtollError, ConfigError
from atoll.engines.liveness import PEER_MISSING, last_error, log_while_waiting
from atoll.engines.network_interfaces import LOOPBACK, is_loopback
from atoll.engines.processes.rank import rank_log_path, run_rank
from atoll.engines.processes.spec import Processes
from atoll.engines.rank_store import AGENT_STORE, connect_store, open_store, refuse_untrusted_network
from atoll.engines.run_lifecycle import Result, RunRequest, discard
from atoll.engines.spec import started_by_torchrun

_POLL_S = 0.05
_SHUTDOWN_S = 5.0
"""Ranks that were asked to end are killed after this time."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""They end the ranks, which have sessions of their own and so do not receive a terminal's Ctrl-C."""


_ENDED = "atoll/ended"
_END_WAIT_S = 60.0
"""How long the store of the first machine waits for the ranks of the others to end."""


class ProcessFailed(AtollError):
    """A process of a run has failed or was killed; the others were stopped."""


def start(request: RunRequest) -> Result | None:
    """Be one rank where torchrun started this process; else start all ranks on this machine and wait for them."""
    spec = request.spec
    if started_by_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if isinstance(spec, Processes) and spec.processes not in (None, started):
            raise ConfigError(f"--processes {spec.processes}, but torchrun started {started}. Leave out --processes.")
        return run_rank(request)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        raise ConfigError("RANK and WORLD_SIZE are set without MASTER_ADDR. Set MASTER_ADDR and MASTER_PORT too, or unset RANK.")
    if isinstance(spec, Processes) and spec.nodes > 1:
        if request.run is None and spec.node == 0:
            with request.open() as task:
                if task.finished:
                    return task.reopen()
        launch_node(spec, request)
        return None
    if request.run is not None:
        _refuse_own_objects(request)
    with request.open() as task:
        if task.finished:
            return task.reopen()
        _refuse_own_objects(request)
        assert isinstance(task.spec, Processes)
        processes = task.spec.processes or task.run.cluster.devices
        replace(task.spec, processes=processes).fitted(task.run)  # refuse now what the ranks would refuse
        folder = task.folder.path
    # The lock is free again: rank 0 takes it.
    launch(processes, ["run", "--resume", str(folder), *(["--quiet"] if request.log is discard else [])], folder)
    return task.reopen()


def _refuse_own_objects(request: RunRequest) -> None:
    if request.workload is not None or request.sinks:
        raise ConfigError(
            "a user's workload or sinks live in this process, and the processes that it starts would not have them. Start this "
            "script with torchrun, or leave them out."
        )


def launch(processes: int, arguments: Sequence[str], folder: Path) -> None:
    """Start this number of processes of the command `atoll` with these arguments, and wait for them; see `run_ranks`."""
    store, port = open_store(LOOPBACK)  # it lives in this process, and so outlives the ranks
    ranks = range(processes)
    run_ranks(
        [sys.executable, "-m", "atoll", *arguments],
        [_variables(rank, rank, ranks, processes, LOOPBACK, port) for rank in ranks],
        folder,
    )
    del store


def launch_node(spec: Processes, request: RunRequest) -> None:
    """Start this machine's ranks, each of which is this command again, and wait for them. The first machine hosts the store of all
    ranks; its rank 0 has the run's folder, and shows the result."""
    assert spec.address is not None
    assert spec.processes is not None
    refuse_untrusted_network(spans=True, trusted=spec.network == "trusted", setting="--set engine.network=trusted")
    if request.out is None:
        raise ConfigError(f"engine.nodes={spec.nodes} without a folder for the run, which each machine needs. Give --out FOLDER.")
    host, port, store = spec.address.rpartition(":")[0], int(spec.address.rpartition(":")[2]), None
    if spec.node == 0:
        try:
            # The machine's own name may be a loopback address here, which the others do not reach.
            found = socket.gethostbyname(host)
            store, _ = open_store("0.0.0.0" if is_loopback(found) and found != host else found, port)
        except OSError as error:
            raise ConfigError(
                f"engine.address={spec.address}: this machine cannot listen there ({error.strerror or error}). Give an address of "
                f"this machine that the others reach, and a free port; or engine.node=1 if this is the second machine."
            ) from error
    here = spec.processes // spec.nodes
    ranks = range(spec.node * here, (spec.node + 1) * here)
    request.log(f"machine {spec.node} of {spec.nodes}: {here} of {spec.processes} ranks; the ranks' store is at {spec.address}")
    variables = [_variables(rank, rank - ranks[0], ranks, spec.processes, host, port) for rank in ranks]
    run_ranks([sys.executable, *sys.orig_argv[1:]], variables, request.out)
    if store is None:
        with suppress(RuntimeError):  # the first machine waits no longer
            connect_store(host, port).add(_ENDED, 1)
        return
    deadline_s = time.monotonic() + _END_WAIT_S
    with log_while_waiting(request.log, "waiting for the ranks of the other machines to end"):
        while store.add(_ENDED, 0) < spec.nodes - 1 and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def run_ranks(command: Sequence[str], variables: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Start a process of this command with each of these sets of variables, and wait for all.

    Raises:
        ProcessFailed: one of them failed; says which and why. The others have been stopped.
        KeyboardInterrupt: the user pressed Ctrl-C. All of them have been stopped.
    """
    ranks = LaunchedRanks()
    with _caught_signals() as caught:
        try:
            for one in variables:
                ranks.start(command, one)
            while not caught and not ranks.failures and ranks.running:
                time.sleep(_POLL_S)
                ranks.poll()
        finally:
            ranks.stop(caught[0] if caught else signal.SIGTERM)
    if caught and caught[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if caught:
        raise ProcessFailed(f"the run was stopped by {caught[0].name}. Resume: atoll run --resume {folder}")
    if ranks.failures:
        raise ProcessFailed(why(ranks.failures, folder))


def _variables(rank: int, local: int, here: Sequence[int], processes: int, host: str, port: int) -> dict[str, str]:
    """torchrun's variables, by which a rank finds the others. `here`: the ranks of its machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": len(here), "MASTER_PORT": port}
    numbers["GROUP_WORLD_SIZE"] = processes // len(here)  # machines
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, AGENT_STORE: "True"}


@contextmanager
def _caught_signals() -> Iterator[list[signal.Signals]]:
    """A list of the signals that this process was sent in the meantime. Only the main thread can catch signals."""
    caught: list[signal.Signals] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, catch) for number in _SIGNALS} if in_main_thread else {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class RankFailure:
    """A rank that has ended with an error."""

    exit_code: int  # minus the signal, if one killed it
    ended_s: float
    by_launcher: bool = False  # which ended it because another rank had failed


@dataclass
class LaunchedRanks:
    """The processes of the ranks, in rank order."""

    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        environment = {**os.environ, **variables}
        self.running[int(variables.get("RANK", len(self.running)))] = subprocess.Popen(
            command, env=environment, start_new_session=True
        )

    def poll(self, by_launcher: int | None = None) -> None:
        """Note which ranks have ended. `by_launcher`: the signal that the launcher has sent to those that were running."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[rank]
            if code:
                self.failures[rank] = RankFailure(code, time.monotonic(), by_launcher is not None and code == -by_launcher)

    def stop(self, number: signal.Signals) -> None:
        """End the ranks that are still running by this signal, and kill those that do not end."""
        deadline_s = time.monotonic() + _SHUTDOWN_S
        self._signal(number)
        while self.running and time.monotonic() < deadline_s:
            self.poll(number)
            time.sleep(_POLL_S / 5)
        self._signal(signal.SIGKILL)
        while self.running:
            self.poll(signal.SIGKILL)
            time.sleep(_POLL_S / 5)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def why(failures: Mapping[int, RankFailure], folder: Path) -> str:
    """Which of these failures, by rank, was the first, with its error; and how to resume."""
    rank = min(failures, key=lambda rank: (_consequence(failures[rank]), failures[rank].ended_s, rank))
    error = last_error(rank_log_path(folder, rank))
    if failures[rank].exit_code < 0:
        error = f"it was killed by {signal.Signals(-failures[rank].exit_code).name}"
    saved = any((folder / "checkpoints").glob("[0-9]*"))
    advice = f"Resume: atoll run --resume {folder}" if saved else "There is no checkpoint yet."
    return f"rank {rank} has failed, and the others were stopped: {error or f'see {rank_log_path(folder, rank)}'}. {advice}"


def _consequence(failure: RankFailure) -> int:
    """How likely a failure is the consequence of another. A rank that misses another ends a moment after it, or in the same moment
    as far as the launcher can tell."""
    if failure.by_launcher:
        return 3
    return 0 if failure.exit_code < 0 else 2 if failure.exit_code == PEER_MISSING else 1
