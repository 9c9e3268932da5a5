"""Launching a run on real processes: torchrun's agent starts one process per rank on this machine, or torchrun started this one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from atoll.core.errors import AtollError, ConfigError
from atoll.engines.liveness import PEER_MISSING, last_error
from atoll.engines.processes.rank import rank_log_path, run_rank
from atoll.engines.processes.spec import Processes
from atoll.engines.run_lifecycle import Result, RunRequest, discard
from atoll.engines.spec import started_by_torchrun

_SHUTDOWN_S = 5
"""The agent kills processes this long after it has asked them to end; newer versions of torch take it as a setting."""
_SHUTDOWN: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}


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
    """Start this number of processes of the command `atoll` with these arguments, and wait for them.

    Raises:
        ProcessFailed: one of them failed; says which and why. The others have been stopped.
        KeyboardInterrupt: the user pressed Ctrl-C. All of them have been stopped.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
        **_SHUTDOWN,
    )
    try:
        with _on_this_machine():
            elastic_launch(config, sys.executable)("-m", "atoll", *arguments)
    except ChildFailedError as error:
        raise ProcessFailed(why(error.failures, folder)) from error
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise ProcessFailed(f"the run was stopped by {error.sigval.name}. Resume: atoll run --resume {folder}") from error


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Silence torch's agent and have gloo use the loopback. The environment, the signal handlers, which the agent replaces, and
    torch's loggers are restored afterwards."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels, environment = [logger.level for logger in loggers], os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # this module reports failures itself
    # gloo listens on the address of the machine's name, which need not be this machine's.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if "GLOO_SOCKET_IFNAME" not in environment:
            del os.environ["GLOO_SOCKET_IFNAME"]
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def why(failures: Mapping[int, ProcessFailure], folder: Path) -> str:
    """Which of these failures, by rank, was the first, with its error; and how to resume."""
    first_s = min(failure.timestamp for failure in failures.values())
    rank = min(failures, key=lambda rank: (_consequence(failures[rank], first_s), failures[rank].timestamp, rank))
    error = last_error(rank_log_path(folder, rank))
    if failures[rank].exitcode < 0:
        error = f"it was killed by {signal.Signals(-failures[rank].exitcode).name}"
    saved = any((folder / "checkpoints").glob("[0-9]*"))
    advice = f"Resume: atoll run --resume {folder}" if saved else "There is no checkpoint yet."
    return f"rank {rank} has failed, and the others were stopped: {error or f'see {rank_log_path(folder, rank)}'}. {advice}"


def _consequence(failure: ProcessFailure, first_s: float) -> int:
    """How likely a failure is the consequence of another, the first of which was at `first_s`. A rank that misses another ends a
    moment after it, or in the same moment as far as the agent can tell. The agent then ends the remaining ranks."""
    if failure.exitcode < 0:
        by_the_agent = failure.exitcode == -signal.SIGTERM or failure.timestamp - first_s >= _SHUTDOWN_S - 1  # in whole seconds
        return 3 if by_the_agent else 0
    return 2 if failure.exitcode == PEER_MISSING else 1
