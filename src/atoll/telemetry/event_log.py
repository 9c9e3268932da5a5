"""events.jsonl, the log of a run: one line of JSON per event, and the clock that its times are on.

Each line reaches the operating system as soon as it is written, so a killed process truncates at most the last line.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar

from atoll.core.errors import CheckpointError, one_line
from atoll.core.events import Arrived, Evaluated, Event, RoundFinished, RunFinished, RunStarted, read_event

E = TypeVar("E", bound=Event)
Clock = Literal["virtual", "wall"]
"""Of a simulated cluster, or of real machines. The two are not comparable, so every figure of a time names its clock."""


_LOG_BYTES, _LOG_DIGEST = "events_bytes", "events_blake2b"  # keys in the metadata of checkpoints
_CHUNK = 1 << 20
_FIRST = f'{{"event": "{RunStarted.__name__}"'.encode()


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

    Args:
        path: the file; the sink creates its folder.
        append_at: None starts a new log and replaces an old one. The `position()` that a checkpoint stores keeps that many bytes
            of the existing log, and removes the events after it, because the resumed run repeats them.
        digested: compute the digest of the whole log, for `position_record`. That reads what is kept of the existing one.
        digest: of what is kept. CheckpointError if it has changed.
    """

    def __init__(
        self, path: str | Path, append_at: int | None = None, *, digested: bool = False, digest: str | None = None
    ) -> None:
        self.path = Path(path)
        self._digest = blake2b(digest_size=16) if digested else None
        with _explained("open", self.path):
            if append_at is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file: BinaryIO = _opened(self.path, os.O_CREAT | os.O_TRUNC)
            else:
                self._file = _open_at(self.path, append_at, self._digest, digest)

    def emit(self, event: Event) -> None:
        if event.recorded:
            with _explained("write", self.path):
                line = event.to_json().encode() + b"\n"
                self._file.write(line)
                if self._digest is not None:
                    self._digest.update(line)
                # The buffer keeps the rest of a line while the disk is full, so no line is torn inside the log.
                self._file.flush()

    def position(self) -> int:
        """The length of the log in bytes, after all of them are on the disk."""
        with _explained("write", self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def position_record(self) -> dict[str, Any]:
        """What a checkpoint stores: where its log ends, and the digest of the log if it is computed. See `at_record`."""
        digest = {} if self._digest is None else {_LOG_DIGEST: self._digest.hexdigest()}
        return {_LOG_BYTES: self.position(), **digest}

    @staticmethod
    def at_record(path: Path, record: Mapping[str, Any]) -> JsonlSink:
        """The log of a run that continues from a checkpoint with this `position_record`. CheckpointError if it was cut, or changed
        before that position."""
        return JsonlSink(path, append_at=int(record[_LOG_BYTES]), digested=True, digest=record.get(_LOG_DIGEST))

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        with _explained("write", self.path):
            self._file.close()


def read_events(path: str | Path, kinds: Collection[type[Event]] = (), *, after: int = 0) -> Iterator[Event]:
    """The events of a log, in order. A truncated last line is skipped; any other malformed line raises a CheckpointError.

    Args:
        kinds: the event classes to read. The lines of other classes are skipped without parsing, which is much faster. Empty
            reads all.
        after: skip this many bytes, which must end a line; line numbers in errors count from there.
    """
    path = Path(path)
    # Event.to_json writes the name of the event as the first key of every line.
    wanted = tuple(f'{{"event": "{kind.__name__}"'.encode() for kind in kinds)
    with _explained("read", path), path.open("rb") as file:
        file.seek(after)
        for number, line in enumerate(file, start=1):
            if not wanted or line.startswith(wanted):
                event = _parse(path, number, line)
                if event is not None:
                    yield event


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
        return read_event(line.decode())
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        if not line.endswith(b"\n"):  # only the last line can lack its end
            return None
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
    with _explained("read", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and not (line.startswith(b'{"event": "') and line.endswith(b"}\n") and b"\0" not in line):
                return f"{path} is damaged in line {number}"
            if number == 1 and not line.startswith(_FIRST):
                return f"{path} has lost its beginning"
    return None


def _opened(path: Path, flags: int) -> BinaryIO:
    """A log to write. A symbolic link is refused: what is written would lie outside of the run's folder."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o644), "r+b")


def _open_at(path: Path, append_at: int, state: blake2b | None, digest: str | None) -> BinaryIO:
    if append_at < 0:
        raise CheckpointError(f"append_at={append_at}: a log continues at 0 bytes or later. Give what position() returned.")
    file = _opened(path, 0)
    size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes < append_at:
        file.close()
        raise CheckpointError(
            f"{path} has {size_bytes} bytes, but it had {append_at} when the checkpoint was written: the log was cut or replaced. "
            f"Restore it, or resume from an earlier checkpoint."
        )
    file.seek(0)
    for start in range(0, append_at if state is not None else 0, _CHUNK):
        state.update(file.read(min(_CHUNK, append_at - start)))  # type: ignore[union-attr]
    if state is not None and digest is not None and state.hexdigest() != digest:
        file.close()
        raise CheckpointError(
            f"{path} is not the log that the checkpoint was written with: its first {append_at} bytes do not match their digest. "
            f"It was changed, or the checkpoint was saved by another run. Restore it, or resume from an earlier checkpoint."
        )
    file.truncate(append_at)
    file.seek(append_at)
    return file


@contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
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
