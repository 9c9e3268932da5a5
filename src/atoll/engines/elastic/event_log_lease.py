"""The right to write the event log: a new leader takes it, and truncates the log after the last valid commit."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from atoll.core import events as ev
from atoll.core.errors import CheckpointError
from atoll.core.verified_files import open_to_append, replacing
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.telemetry.event_log import JsonlSink, explained, read_backwards

_OPENED = StateVersion(0, 1 << 31)
"""The last version of a log that has events and no commit: round 0, whatever its epoch."""
_BETWEEN_COMMITS = (ev.Evaluated.__name__, ev.Saved.__name__, ev.SaveFailed.__name__, ev.LogDamaged.__name__)
_BEFORE_COMMITS = (ev.RunStarted.__name__, ev.WarmStartFinished.__name__, ev.IslandJoined.__name__)
"""Events outside of commits. A commit's own events end with Attended."""
_LOCK_LIMIT_S, _LOCK_POLL_S = 2.0, 0.01
"""A process that locks the log for longer is frozen."""
_COPIED_BYTES = 1 << 20


class LeaseLost(CheckpointError):
    """Another island has taken the write lease."""


class EventLogLease(JsonlSink):
    """The event log with the right to write it.

    A new holder replaces the file `events.lease`, and truncates the log in place. A holder locks the log for every line, and writes
    only if `events.lease` is still its own, so an old leader that continues after a freeze writes nothing. If a process froze
    while it held the lock, the new holder replaces the log by a copy, which the frozen process does not have open.

    Args:
        path: the log.
        keep_bytes: returns how many bytes of the log stay. It is called when no other process writes.

    Raises:
        CheckpointError: the log cannot be written.
        LeaseLost: another island has taken the lease meanwhile.
    """

    def __init__(self, path: Path, keep_bytes: Callable[[], int]) -> None:
        self.path, self._mark_path = path, path.with_name("events.lease")
        with ExitStack() as failing:
            self._mark = _replace_mark(self._mark_path)
            failing.callback(self._mark.close)
            with explained("open", path), open_to_append(path) as log:
                if _lock(log):
                    self.check()
                    super().__init__(path, append_at=keep_bytes(), dated=True)
                else:
                    self._replace_by_copy(path, keep_bytes())
            failing.pop_all()

    def _replace_by_copy(self, path: Path, keep_bytes: int) -> None:
        with replacing(path, CheckpointError) as copy, path.open("rb") as log:
            left = keep_bytes
            while left and (block := log.read(min(left, _COPIED_BYTES))):
                copy.write(block)
                left -= len(block)
            copy.flush()
            # Opened under its temporary name: another island may replace the log at any moment.
            super().__init__(copy.name, append_at=keep_bytes, dated=True)
            self.check()
        self.path = path

    def emit(self, event: ev.Event) -> None:
        with self._locked():
            super().emit(event)

    def position(self) -> int:
        with self._locked():
            return super().position()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.check()
        if not _lock(self._file):
            raise CheckpointError(f"a process that does not respond has locked {self.path}.")
        try:
            self.check()
            yield
        finally:
            with suppress(OSError, ValueError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _check_repair(self) -> None:
        self.check()  # another holder's copy is no damage

    @property
    def is_held(self) -> bool:
        """Whether no other island has taken the lease since."""
        try:
            return os.path.samestat(os.fstat(self._mark.fileno()), self._mark_path.stat())
        except (OSError, ValueError):
            return False

    def check(self) -> None:
        if not self.is_held:
            raise LeaseLost(f"another island has taken the write lease of {self.path}.")

    def close(self) -> None:
        """Closes the log. What a full disk did not take is not written any more: the next holder writes it."""
        self._unwritten = b""
        super().close()
        self._mark.close()


def _replace_mark(path: Path) -> IO[bytes]:
    """A new file of this name, open: while it is open, no other file gets its inode."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    with explained("write", path):
        file = unfinished.open("xb")
        try:
            os.replace(unfinished, path)
        except OSError:
            file.close()
            unfinished.unlink()
            raise
    return file


def _lock(file: IO[bytes]) -> bool:
    """Lock the file, unless another process holds its lock for too long: a writer holds it for one line, a new leader for the time
    that it takes to read the end of the log."""
    deadline_s = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
        except OSError:  # a file system without locks: `events.lease` alone protects the log
            return True
        time.sleep(_LOCK_POLL_S)


class CommittedPrefix(NamedTuple):
    """How many bytes of an event log belong to valid commits, the last of these, and the number of damaged lines near the end that
    the log does not report."""

    num_bytes: int
    last: StateVersion
    damaged: int


def committed_prefix(path: Path, epochs: Mapping[int, int]) -> CommittedPrefix:
    """The valid part of an event log: a leader that died may have written a commit that no other island has, or part of one.
    `epochs` are those of the valid commits, by round. Earlier rounds are valid, and only what follows them is read; without any
    epoch nothing in the log is valid."""
    if not epochs or not path.exists():
        return CommittedPrefix(0, NO_VERSION, 0)
    first = min(epochs)
    start = next((at for at, attended in read_backwards(path, ev.Attended) if attended.round < first), 0)
    at, last, end, damaged = start, NO_VERSION, start, 0
    with explained("read", path), path.open("rb") as log:
        log.seek(start)
        for line in log:
            end += len(line)
            if not line.endswith(b"\n"):
                break
            found = re.match(rb'\0*\{"event": "(\w+)"', line)
            name = found[1].decode() if found is not None and line.endswith(b"}\n") else ""
            if name == ev.Attended.__name__:
                try:
                    attended = json.loads(line.lstrip(b"\0"))
                    version = StateVersion(int(attended["round"]), int(attended["epoch"]))
                except (ValueError, TypeError, KeyError):
                    damaged += 1
                    continue
                if version.round >= first and epochs.get(version.round) != version.epoch:
                    break
                at, last = end, version
            elif name in _BETWEEN_COMMITS:
                at, damaged = end, 0 if name == ev.LogDamaged.__name__ else damaged
            elif name in _BEFORE_COMMITS and last <= _OPENED:
                at, last = end, _OPENED
            elif not name:
                damaged += 1
    return CommittedPrefix(at, last, damaged)
