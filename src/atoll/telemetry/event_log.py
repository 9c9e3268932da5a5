"""events.jsonl, the log of a run: one line of JSON per event, and the clock that its times are on.

Each line reaches the operating system as soon as it is written, so a killed process truncates at most the last line.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from atoll.core.errors import CheckpointError, one_line
from atoll.core.events import (
    Arrived,
    Evaluated,
    Event,
    LogDamaged,
    RoundFinished,
    RunFinished,
    RunStarted,
    WarmStartFinished,
    read_event,
)

E = TypeVar("E", bound=Event)
Clock = Literal["virtual", "wall"]
"""Of a simulated cluster, or of real machines. The two are not comparable, so every figure of a time names its clock."""
_BLOCK = 1 << 20  # bytes that are read at once
_LOG_BYTES, _LOG_DIGEST = "events_bytes", "events_blake2b"  # keys in the metadata of checkpoints


class ClosingSink(ABC):
    """A sink that a `with` statement closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class JsonlSink(ClosingSink):
    """Writes recorded events to a file, one line each.

    It appends, so a program that truncates the log in between (logrotate with copytruncate) leaves no gap of zeros. When the log
    is shorter than what was written, or another file has its name, the sink writes the beginning of the run again and a LogDamaged.

    Args:
        path: the file; the sink creates its folder.
        append_at: None starts a new log and replaces an old one. The `position()` that a checkpoint stores keeps that many bytes
            of the existing log, and removes the events after it, because the resumed run repeats them.
        dated: write the absolute time of each event. Such a log need not equal another one, so the sink also continues one that is
            shorter than `append_at`, or has another digest, with a LogDamaged.
        digested: compute the digest of the whole log, for `position_record`. That reads what is kept of the existing one.
        digest: of what is kept. CheckpointError if it has changed, unless the log is dated.
    """

    def __init__(
        self,
        path: str | Path,
        append_at: int | None = None,
        *,
        dated: bool = False,
        digested: bool = False,
        digest: str | None = None,
    ) -> None:
        self.path, self._dated = Path(path), dated
        self._digest = blake2b(digest_size=16) if digested else None
        self._beginning: list[bytes] = []
        """The lines without which a log has no summary."""
        self._unwritten = b""
        """The rest of a line while the disk is full, so that no line is torn inside the log."""
        with explained("open", self.path):
            if append_at is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._size = self._check_position(append_at)
            self._file = _opened(self.path)
            changed = self._digest_kept(digest)  # before anything is removed
            found = os.fstat(self._file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_size > self._size:
                self._file.truncate(self._size)
            self._read_beginning()
        if changed and found.st_size >= self._size:  # of a shorter log the next event tells
            self.emit(LogDamaged(what="it is not the log that the checkpoint was written with", lost_bytes=0))

    def _check_position(self, append_at: int | None) -> int:
        if append_at is not None and append_at < 0:
            raise CheckpointError(f"append_at={append_at}: a log continues at 0 bytes or later. Give what position() returned.")
        size_bytes = 0 if append_at is None or self._dated else self.path.stat().st_size
        if size_bytes < (append_at or 0) and not self._dated:
            raise CheckpointError(
                f"{self.path} has {size_bytes} bytes, but it had {append_at} when the checkpoint was written: the log was cut or "
                f"replaced. Restore it, or resume from an earlier checkpoint."
            )
        return append_at or 0

    def _read_beginning(self) -> None:
        if not self._size:
            return
        with self.path.open("rb") as log:
            for line in log:
                if line.startswith(_BEGINNING):
                    self._beginning.append(line)
                elif self._beginning:
                    break

    def _digest_kept(self, digest: str | None = None) -> bool:
        """Computes the digest of the log up to its position. Returns whether it differs from the one that a checkpoint has."""
        if self._digest is None or not self._size:
            return False
        left = self._size
        with self.path.open("rb") as log:
            while block := log.read(min(_BLOCK, left)):
                self._digest.update(block)
                left -= len(block)
        changed = digest is not None and self._digest.hexdigest() != digest
        if changed and not self._dated:
            self._file.close()
            raise CheckpointError(
                f"{self.path} is not the log that the checkpoint was written with: its first {self._size} bytes do not match their "
                f"digest. It was changed, or the checkpoint was saved by another run. Restore it, or resume from an earlier "
                f"checkpoint."
            )
        return changed

    @property
    def has_beginning(self) -> bool:
        """Whether the log has the event with which a run begins."""
        return bool(self._beginning)

    def emit(self, event: Event) -> None:
        if not event.recorded:
            return
        if self._dated and event.unix_time_s is None:
            event = replace(event, unix_time_s=unix_time_s())
        line = event.to_json().encode() + b"\n"
        with explained("write", self.path):
            self._repair()
            if line.startswith(_BEGINNING):
                self._beginning.append(line)
            self._write(line)

    def _write(self, lines: bytes = b"") -> None:
        self._unwritten += lines
        if self._digest is not None:
            self._digest.update(lines)
        while self._unwritten:
            count = self._file.write(self._unwritten) or 0
            self._size += count
            self._unwritten = self._unwritten[count:]

    def _repair(self) -> None:
        """Continue a log that another program has truncated, moved or replaced."""
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            return
        moved = not (self.path.exists() and os.path.samestat(found, self.path.stat()))
        if found.st_size >= self._size and not moved:
            return
        self._check_repair()
        if moved:
            file = _opened(self.path)
            self._file.close()
            self._file = file
        kept, lost = _whole_lines(self.path), self._size
        self._file.truncate(kept)
        self._size, self._unwritten = kept, b""
        if self._digest is not None:
            self._digest = blake2b(digest_size=16)
            self._digest_kept()
        what = "another program has moved it or replaced it" if moved else "another program has truncated it"
        damage = LogDamaged(what=what, lost_bytes=max(0, lost - kept), unix_time_s=unix_time_s() if self._dated else None)
        self._write(b"".join([*([] if kept else self._beginning), damage.to_json().encode() + b"\n"]))

    def _check_repair(self) -> None:
        """Raises if this process may not write the log any more."""

    def position(self) -> int:
        """The length of the log in bytes, after all of them are on the disk."""
        with explained("write", self.path):
            self._write()
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def position_record(self) -> dict[str, Any]:
        """What a checkpoint stores: where its log ends, and the digest of the log if it is computed. See `at_record`."""
        digest = {} if self._digest is None else {_LOG_DIGEST: self._digest.hexdigest()}
        return {_LOG_BYTES: self.position(), **digest}

    @staticmethod
    def at_record(path: Path, record: Mapping[str, Any], *, dated: bool = False) -> JsonlSink:
        """The log of a run that continues from a checkpoint with this `position_record`. CheckpointError if it was cut, or changed
        before that position, unless it is dated."""
        return JsonlSink(path, append_at=int(record[_LOG_BYTES]), dated=dated, digested=True, digest=record.get(_LOG_DIGEST))

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if not self._file.closed:
            try:
                with explained("write", self.path):
                    self._write()
            finally:
                self._file.close()


def _opened(path: Path) -> FileIO:
    """A log to append to. A symbolic link is refused: what is written would lie outside of the run's folder."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "ab")


def unix_time_s() -> float:
    return round(time.time(), 3)


def _whole_lines(path: Path) -> int:
    """The number of bytes up to the end of the last line."""
    at = path.stat().st_size
    with path.open("rb") as file:
        while at:
            start = max(0, at - _BLOCK)
            file.seek(start)
            end = file.read(at - start).rfind(b"\n")
            if end >= 0:
                return start + end + 1
            at = start
    return 0


def read_events(path: str | Path, kinds: Collection[type[Event]] = (), *, after: int = 0) -> Iterator[Event]:
    """The events of a log, in order. A truncated last line is skipped. In the place of a damaged line there is a LogDamaged, unless
    `kinds` lacks it. A line of another version of atoll raises a CheckpointError.

    Args:
        kinds: the event classes to read. The lines of other classes are skipped without parsing, which is much faster. Empty
            reads all.
        after: skip this many bytes, which must end a line; line numbers in errors count from there.
    """
    path = Path(path)
    wanted = _prefixes(kinds)
    with explained("read", path), path.open("rb") as file:
        file.seek(after)
        for number, line in enumerate(file, start=1):
            if not wanted or line.startswith(wanted):
                event = _parse(path, number, line)
                if event is not None and (not kinds or isinstance(event, tuple(kinds))):
                    yield event


def read_events_of(path: Path, record: Mapping[str, Any]) -> Iterator[Event]:
    """The events before the position of a checkpoint's `position_record`."""
    left = int(record[_LOG_BYTES])
    with explained("read", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            left -= len(line)
            if left < 0:
                return
            event = _parse(path, number, line)
            if event is not None:
                yield event


def read_backwards(path: Path, kind: type[E]) -> Iterator[tuple[int, E]]:
    """The events of one class from the last to the first, each with the position of its line in bytes. It skips damaged lines. A
    reader that stops early reads the end of the log alone."""
    wanted = _prefixes([kind])
    with explained("read", path), path.open("rb") as file:
        start = line_end = file.seek(0, os.SEEK_END)
        rest, whole, dropped = b"", False, 0
        while start:
            start, end = max(0, start - _BLOCK), start
            file.seek(start)
            # The first piece may begin before this block. Zeros, which a file system leaves after a crash, belong to no line.
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            for line in (*reversed(lines), *(() if start else (rest,))):
                text = line.lstrip(b"\0")
                if whole and text.startswith(wanted):
                    event = _parse(path, 0, text)
                    if isinstance(event, kind):
                        yield line_end - len(text), event
                whole, line_end, dropped = True, line_end - len(line) - dropped - 1, 0
            stripped = rest.lstrip(b"\0")
            rest, dropped = stripped, dropped + len(rest) - len(stripped)


def _prefixes(kinds: Collection[type[Event]]) -> tuple[bytes, ...]:
    """How lines of these classes begin: Event.to_json writes the name of the event as the first key."""
    return tuple(f'{{"event": "{kind.__name__}"'.encode() for kind in kinds)


_BEGINNING = _prefixes([RunStarted, WarmStartFinished])


def read_kind(folder: str | Path, kind: type[E]) -> list[E]:
    """The events of one class from the log of the run in a folder."""
    return [event for event in read_events(Path(folder) / "events.jsonl", kinds=(kind,)) if isinstance(event, kind)]


def clock_of(engine: str) -> Clock:
    """The clock that an engine's times are on.

    >>> clock_of("simulator"), clock_of("processes")
    ('virtual', 'wall')
    """
    return "virtual" if engine in ("simulator", "sim") else "wall"


def clock_at(event: Arrived | Evaluated | RoundFinished | RunFinished) -> Clock:
    return "wall" if event.virtual_time_s is None else "virtual"


def read_clock(folder: str | Path) -> Clock:
    """The clock of the run in a folder; virtual if its log has no RunStarted."""
    starts = read_kind(folder, RunStarted)
    return clock_of(starts[0].engine) if starts else "virtual"


def _parse(path: Path, number: int, line: bytes) -> Event | None:
    try:
        text = line.lstrip(b"\0").decode()
        if not text.startswith('{"event": "'):
            raise ValueError("it does not begin like an event")
        return read_event(text)
    except (ValueError, RecursionError) as error:  # no JSON: bytes were changed or lost
        if not line.endswith(b"\n"):  # only the last line can lack its end
            return None
        return LogDamaged(what=f"line {number} cannot be read ({one_line(error)})", lost_bytes=len(line))
    except (TypeError, AttributeError, KeyError) as error:
        shown = line[:60].decode(errors="replace").rstrip()
        raise CheckpointError(
            f"{path}:{number} is not an event that this version of atoll knows ({one_line(error)}): {shown!r}. "
            f"Restore the file, or read it with the version that wrote it."
        ) from error


def log_damage(path: Path) -> str | None:
    """What is wrong with the log of a run that has begun; None if nothing is. A truncated last line is not damage: a kill leaves
    one. Only the form of each line is looked at, so that a long log costs no more than to read it."""
    if not path.is_file() or not path.stat().st_size:
        return f"{path} is {'empty' if path.is_file() else 'missing'}"
    with explained("read", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and not (line.startswith(b'{"event": "') and line.endswith(b"}\n") and b"\0" not in line):
                return f"{path} is damaged in line {number}"
            if number == 1 and not line.startswith(_prefixes([RunStarted])):
                return f"{path} has lost its beginning"
    return None


@contextmanager
def explained(verb: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a CheckpointError with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"Free some space there, then continue with `atoll run --resume {path.parent}`."
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "Check its permissions, or choose a folder that you may write to."
        elif error.errno == errno.ELOOP:
            advice = "It is a symbolic link, and atoll writes into the run's folder alone. Put the file itself there."
        elif error.errno == errno.ENOENT:
            advice = f"Is {path.parent} the folder of a run? It should hold run.json and events.jsonl."
        else:
            advice = f"Check the disk, then continue with `atoll run --resume {path.parent}`."
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror or error}. {advice}") from error
