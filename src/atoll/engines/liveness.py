"""Liveness of the processes of a run: which of them are alive, which of them failed first, and how long an exchange may take.

A closed connection reveals a dead process, but only to the processes that exchange over it. A rank that waits for a value in a
store needs heartbeats: the store does not report failures. What a process wrote before it died is in its text log.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Generic, NoReturn, TypeVar

from torch.distributed.distributed_c10d import Store

from atoll.core.errors import AtollError, ExchangeFailed
from atoll.core.verified_files import open_to_append

HEARTBEAT_S = 2.0
SILENCE_LIMIT_S = 30.0
"""A rank whose count has not changed for this long is taken for dead."""
FIRST_TIMEOUT_S = 600.0
"""Before the first exchange, peers may still be reading their data, or compiling."""
LEAST_TIMEOUT_S = 60.0
TIMEOUT_INTERVALS = 10.0
"""The timeout in multiples of the longest interval between two exchanges so far."""
PEER_MISSING = 3
"""The exit code of a process that ends because a peer is missing or does not match."""
WAIT_LOG_S = 15.0
"""How often a process says whom it waits for."""
_READ_S = 1.0  # a monitor reads the store at most this often

Peer = TypeVar("Peer", bound=Hashable)


class FailureDetector(Generic[Peer]):
    """Takes a peer for dead when its heartbeat has not changed for longer than a limit.

    >>> detector = FailureDetector(limit_s=10.0)
    >>> detector.observe("a", heartbeat=1, now_s=0.0)
    >>> detector.observe("a", heartbeat=1, now_s=8.0)  # the same heartbeat again is no sign of life
    >>> detector.is_alive("a", now_s=9.0), detector.is_alive("a", now_s=11.0)
    (True, False)
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard: dict[Peer, tuple[object, float]] = {}

    def observe(self, peer: Peer, heartbeat: object, now_s: float) -> None:
        """The peer's heartbeat, as it is read now: it is a sign of life if it differs from the last one."""
        if peer not in self._heard or self._heard[peer][0] != heartbeat:
            self._heard[peer] = (heartbeat, now_s)

    def heard_s(self, peer: Peer) -> float:
        """When the heartbeat last changed; minus infinity for an unknown peer."""
        return self._heard[peer][1] if peer in self._heard else -math.inf

    def is_alive(self, peer: Peer, now_s: float) -> bool:
        return now_s - self.heard_s(peer) <= self.limit_s

    def forget(self, peer: Peer) -> None:
        self._heard.pop(peer, None)


class Heartbeat:
    """Calls `beat` every `interval_s` seconds on a daemon thread, with the number of the beat, until `close` or an OSError or
    RuntimeError: then the other side is gone, and the next request to it says so."""

    def __init__(self, beat: Callable[[int], object], *, interval_s: float = HEARTBEAT_S) -> None:
        self._beat, self._interval_s = beat, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(self._interval_s):
            number += 1
            try:
                self._beat(number)
            except (OSError, RuntimeError):
                return

    def close(self, *, wait: bool = False) -> None:
        """Stop; with `wait`, return when a beat that is under way is over."""
        self._closed.set()
        if wait:
            self._thread.join()


@contextmanager
def log_while_waiting(log: Callable[[str], object], what: str, every_s: float = WAIT_LOG_S) -> Iterator[None]:
    """Log what the caller waits for, and for how long it has waited, every so many seconds."""
    repeated = Heartbeat(lambda number: log(f"{what} ({number * every_s:.0f} s)"), interval_s=every_s)
    try:
        yield
    finally:
        repeated.close(wait=True)


def store_heartbeat(store: Store, rank: int) -> Heartbeat:
    """A heartbeat that counts in a store under this rank's key."""
    store.set(_heartbeat_key(rank), "0")
    return Heartbeat(lambda number: store.set(_heartbeat_key(rank), str(number)))


def _heartbeat_key(rank: int) -> str:
    return f"heartbeat/{rank}"


class HeartbeatMonitor:
    """Watches another rank's heartbeat and exit reason in the store. A caller may ask in a tight loop: the store is read once a
    second."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._detector: FailureDetector[int] = FailureDetector(SILENCE_LIMIT_S)
        self._detector.observe(rank, "", time.monotonic())
        self._read_s, self._exit_reason = 0.0, ""

    def silent_s(self) -> float:
        """How long ago the rank's heartbeat last changed."""
        now_s = time.monotonic()
        if now_s - self._read_s > _READ_S:
            self._read_s = now_s
            self._exit_reason = _get(self._store, _exit_key(self._rank))
            self._detector.observe(self._rank, _get(self._store, _heartbeat_key(self._rank)), now_s)
        return now_s - self._detector.heard_s(self._rank)

    def failure(self) -> str:
        """Why the rank is taken for dead, for an error message; empty while it is alive."""
        silent_s = self.silent_s()
        if self._exit_reason:
            return f"it has ended ({self._exit_reason})"
        return f"its last heartbeat was {silent_s:.0f} s ago" if silent_s > self._detector.limit_s else ""


class FailureAttribution:
    """Finds the rank that failed first. A rank that misses a peer ends too, so its peers miss it in turn: all ranks report missing
    ranks in `store`, which outlives them. `ranks` has the global rank of each member of the group; methods take and return ranks
    of the group."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks

    def report_missing(self, rank: int) -> tuple[int, str]:
        """Reports that a rank of the group is missing. Returns the rank that failed first, and who reported it first if another
        rank did."""
        failed, path = self._ranks[rank], [self._rank]
        try:
            # A cycle has no end: its ranks wait for each other, and each names the one it misses.
            while (missed := self._missed_by(failed)) is not None and missed not in path:
                path.append(failed)
                failed = missed
            self._store.set(f"missing/{self._rank}", str(failed))
        except RuntimeError:  # without the store, the missing rank is named
            return rank, ""
        if failed not in self._ranks:
            return rank, f", which missed rank {failed}"
        return self._ranks.index(failed), f" (rank {path[-1]} missed it first)" if len(path) > 1 else ""

    def record_exit_reason(self, text: str) -> None:
        """This process ends for a reason of its own, which its peers can then report."""
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(_exit_key(self._rank), text)

    def exit_reason(self, rank: int) -> str:
        """The reason that this rank of the group recorded when it ended; empty if it recorded none."""
        with suppress(RuntimeError):
            return _get(self._store, _exit_key(self._ranks[rank]))
        return ""

    def _missed_by(self, rank: int) -> int | None:
        missed = _get(self._store, f"missing/{rank}")
        return int(missed) if missed else None


def _exit_key(rank: int) -> str:
    return f"exit-reason/{rank}"


def _get(store: Store, key: str) -> str:
    """The value of a key; empty if it was never set."""
    return store.get(key).decode() if store.check([key]) else ""


class ExchangeTimeout:
    """How long this process waits in an exchange before the exchange has failed.

    By default it is ten times the longest interval between the ends of two exchanges, computing and waiting included, and at least
    60 s; before the first exchange it is 600 s. The interval that is under way counts too: a peer's round may take longer still.
    `fixed_s` sets another timeout, for good.
    """

    def __init__(self, fixed_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.fixed_s, self._now = fixed_s, now
        self._finished_s, self._longest_s = now(), 0.0
        self._reported_s: float | None = None

    @property
    def timeout_s(self) -> float:
        """As far as it is known before the next exchange starts."""
        if self.fixed_s is not None:
            return self.fixed_s
        return max(LEAST_TIMEOUT_S, TIMEOUT_INTERVALS * self._longest_s) if self._longest_s else FIRST_TIMEOUT_S

    def start(self) -> float:
        """An exchange starts. Returns its timeout in seconds."""
        if self.fixed_s is not None:
            return self.fixed_s
        return max(self.timeout_s, TIMEOUT_INTERVALS * (self._now() - self._finished_s))

    def finish(self) -> None:
        """The exchange is over."""
        now_s = self._now()
        self._longest_s, self._finished_s = max(self._longest_s, now_s - self._finished_s), now_s

    def restart(self) -> None:
        """Begin a new interval: the time since the last exchange went into something else than a round, such as a checkpoint."""
        self._finished_s = self._now()

    def is_news(self) -> bool:
        """Whether this is the first call, or the timeout has changed by a factor of 2 since the last call that returned true."""
        timeout_s, reported_s = self.timeout_s, self._reported_s
        if reported_s is not None and reported_s / 2 < timeout_s < reported_s * 2:
            return False
        self._reported_s = timeout_s
        return True

    @property
    def reason(self) -> str:
        """Where the timeout comes from, for the log."""
        if self.fixed_s is not None:
            return "as given"
        if not self._longest_s:
            return "before the first exchange; from then on ten times the longest interval between two, and at least 60 s"
        return f"ten times the longest interval between two exchanges ({self._longest_s:.3g} s), and at least {LEAST_TIMEOUT_S:g} s"


@contextmanager
def recorded_exit_reason(store: Store, rank: int, size: int) -> Iterator[None]:
    """Records why this rank fails, so that its peers can report it, unless it fails because a peer is missing."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ExchangeFailed):
            text = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            FailureAttribution(store, rank, range(size)).record_exit_reason(" ".join(text.split()))
        raise


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM of a service manager and SIGHUP of a terminal that closes interrupt this process as Ctrl-C does. Each does so once: a
    second one, such as a closing shell sends, must not interrupt what ends the run. A signal that is ignored, as under nohup,
    stays ignored."""
    caught = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in caught}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def exit_with(error: BaseException, log: IO[str] | None = None, code: int | None = None) -> NoReturn:
    """End this process at once, with the error in its log and on its console. It does not wait for threads: communication may hang.
    The exit code is `code`, or by default the one of the error's type."""
    known, interrupted = isinstance(error, AtollError), isinstance(error, KeyboardInterrupt)
    text = "interrupted" if interrupted else f"error: {' '.join(str(error).split())}"
    for file in dict.fromkeys([log, None if interrupted else sys.stderr]):
        with suppress(OSError):  # a full disk
            if file is not None and not (known or interrupted):
                traceback.print_exception(error, file=file)
            if file is not None:
                print(dated(text) if file is log else text, file=file, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    default = 130 if interrupted else PEER_MISSING if isinstance(error, ExchangeFailed) else 2 if known else 1
    os._exit(default if code is None else code)


# --------------------------------------------------------------------------------------------------- text logs of processes

LOG_LIMIT_BYTES, LOGS_KEPT = 16 << 20, 3
"""A log that has grown beyond the limit is moved to NAME.log.1, and so on; the oldest is removed."""
_READ_BYTES = 1 << 20


def dated(text: str) -> str:
    """A line of a log: date, time and time zone in ISO 8601, then the text."""
    return f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} {text}"


def write_log_line(file: IO[str], text: str) -> None:
    with suppress(OSError):  # a log that cannot be written ends nothing
        print(dated(text), file=file, flush=True)


def append_log_line(log: Path, text: str) -> None:
    """Append a line to a log that no process keeps open, and rotate it."""
    with suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        rotate_log(log)
        with open_to_append(log) as file:
            file.write(f"{dated(text)}\n".encode())


def rotate_log(log: Path, *, in_use: bool = False) -> None:
    """Move a log that has grown beyond the limit. A log that its process keeps open, for appending, is copied and truncated: what
    the process writes between the end of the copy and the truncation is lost. If the disk is full, the log stays as it is."""
    unfinished = _rotated(log, 0)
    with suppress(OSError):
        if log.stat().st_size <= LOG_LIMIT_BYTES:
            return
        try:
            if in_use:
                unfinished.unlink(missing_ok=True)  # an earlier process has died
                with open_to_append(log) as old, unfinished.open("xb") as new:
                    old.seek(0)
                    while block := old.read(_READ_BYTES):
                        new.write(block)
                    new.flush()
                    old.truncate(0)
            else:
                os.replace(log, unfinished)
            for number in range(LOGS_KEPT, 0, -1):
                if _rotated(log, number - 1).exists():
                    os.replace(_rotated(log, number - 1), _rotated(log, number))
        finally:
            unfinished.unlink(missing_ok=True)


def _rotated(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def last_error(log: Path) -> str:
    """The error that a process ended with, as `exit_with` wrote it to its log. Lines from before its last start are ignored."""
    errors = (found[1] for line in _lines_since_start(log) if (found := _ERROR.match(line)))
    return next(errors, "").rstrip(".")


def last_lines(log: Path, count: int = 3) -> str:
    """What a process wrote last, on one line."""
    lines = [line.strip() for line in _lines_since_start(log) if line.strip()]
    return " | ".join(reversed(lines[:count]))


def _lines_since_start(log: Path) -> Iterator[str]:
    """The lines of a log from the last back to the last start of its process."""
    for path in (log, _rotated(log, 1)):
        for line in reversed(_tail(path).splitlines()):
            if _STARTED.match(line):
                return
            yield line


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return ""


_STARTED = re.compile(r"\S+ (rank \d+ of \d+ on |\S+ on \S+ \(.*\), process )")
"""The first line that a rank, or an island of an elastic run, writes."""
_ERROR = re.compile(r"(?:\d\S+ )?error: (.*)")
