"""Starting processes on this machine: torchrun's own agent, which starts one worker per process and watches them."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from atoll.core.errors import AtollError
from atoll.engines.processes.rank_log import MISSED_ANOTHER, log_of

_PATIENCE_S = 5
"""So long the agent waits for processes that it has asked to end before it kills them; newer versions of torch can be told."""
_PATIENCE: dict[str, Any] = {"shutdown_timeout": _PATIENCE_S} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}


class ProcessFailed(AtollError):
    """A process of a run has failed, or was killed; the others were stopped."""


def launch(processes: int, arguments: Sequence[str], folder: Path) -> None:
    """Start so many processes of the command `atoll` with these arguments, and wait for them.

    Raises:
        ProcessFailed: one of them failed; says which and why. The others have been stopped.
        KeyboardInterrupt: somebody pressed Ctrl-C. All of them have been stopped.
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
        **_PATIENCE,
    )
    try:
        with _on_this_machine():
            elastic_launch(config, sys.executable)("-m", "atoll", *arguments)
    except ChildFailedError as error:
        raise ProcessFailed(why(error.failures, folder)) from error
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise ProcessFailed(f"the run was stopped by {error.sigval.name}. Go on: atoll run --resume {folder}") from error


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """For a while, torch's agent is silent and processes talk over the loopback. Whoever calls may go on with something else: its
    environment, its signal handlers, which the agent replaces, and torch's loggers are left as they were."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels, environment = [logger.level for logger in loggers], os.environ.copy()
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # what it says of failures we say ourselves
    # gloo listens where the machine's name points to, which need not be this machine.
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


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def why(failures: Mapping[int, ProcessFailure], folder: Path) -> str:
    """Which of these failures, by rank, was the first, with its last words; and how the run goes on."""
    first_s = min(failure.timestamp for failure in failures.values())
    rank = min(failures, key=lambda rank: (_follows(failures[rank], first_s), failures[rank].timestamp, rank))
    words = last_words(log_of(folder, rank))
    if failures[rank].exitcode < 0:
        words = f"it was killed by {signal.Signals(-failures[rank].exitcode).name}"
    stands = f"Go on: atoll run --resume {folder}" if any((folder / "checkpoints").glob("[0-9]*")) else "Nothing was saved yet."
    return f"rank {rank} has failed, and the others were stopped: {words or f'see {log_of(folder, rank)}'}. {stands}"


def _follows(failure: ProcessFailure, first_s: float) -> int:
    """How likely a failure is to follow from another one, the first of which was at `first_s`. Those who miss a rank end a moment
    after it, or in the same moment as far as anybody can tell. The agent asks who is still there to end, and then kills it."""
    if failure.exitcode < 0:
        by_the_agent = failure.exitcode == -signal.SIGTERM or failure.timestamp - first_s >= _PATIENCE_S - 1  # in whole seconds
        return 3 if by_the_agent else 0
    return 2 if failure.exitcode == MISSED_ANOTHER else 1


def last_words(log: Path) -> str:
    """The error that a rank ended with, if it wrote one down. What it said before it was last started is of another time."""
    for line in reversed(log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []):
        if line.startswith("error: "):
            return line.removeprefix("error: ").rstrip(".")
        if _STARTED.match(line):
            break
    return ""


_STARTED = re.compile(r"\S+ (rank \d+ of \d+ on |\S+ on \S+ \(.*\), process )")
"""The first line that a rank writes, or an island that may come and go."""
