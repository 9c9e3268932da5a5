"""The run's log: one event, one line of JSON.

A log survives whatever ends the process. Each line is handed to the operating system as it is written, so that at most the last
one is cut short. A checkpoint stores `position()`, and a run that resumes from it opens the log with `append_at`, which cuts off
what happened after the checkpoint, since it is about to happen again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from atoll.core.errors import CheckpointError
from atoll.core.events import Event, from_json


class JsonlSink:
    """Writes recorded events to a file, one line each.

    Args:
        path: the file; its folder is made if need be.
        append_at: None for a log from the start, which replaces one that is there. Else the log must be there and at least this
            many bytes long, and all after them is cut off.
    """

    def __init__(self, path: str | Path, append_at: int | None = None) -> None:
        self.path = Path(path)
        try:
            self._file = _begin(self.path) if append_at is None else _continue(self.path, append_at)
        except OSError as error:
            raise _failed("open", self.path, error) from error

    def emit(self, event: Event) -> None:
        if not event.recorded:
            return
        try:
            self._file.write(event.to_json().encode() + b"\n")
            # Buffered, then flushed: after a full disk the buffer still holds what was not written, and no line is torn inside.
            self._file.flush()
        except OSError as error:
            raise _failed("write", self.path, error) from error

    def position(self) -> int:
        """How many bytes the log has; all of them are on the disk when this returns."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()
        except OSError as error:
            raise _failed("write", self.path, error) from error

    def close(self) -> None:
        """Closing twice is fine."""
        try:
            self._file.close()
        except OSError as error:
            raise _failed("write", self.path, error) from error

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_events(path: str | Path, kinds: Collection[type[Event]] = (), *, after: int = 0) -> Iterator[Event]:
    """The events of a log, in order. A last line that was cut short is left out; any other malformed line raises.

    Args:
        path: the log.
        kinds: classes to pick; the lines of others are skipped unread, which is much faster. None given means all.
        after: skip so many bytes, at which a line must begin; lines are numbered from there.
    """
    path = Path(path)
    # The first key of every line is the event's name; to_json writes it so.
    wanted = tuple(f'{{"event": "{kind.__name__}"'.encode() for kind in kinds)
    try:
        with path.open("rb") as file:
            file.seek(after)
            for number, line in enumerate(file, start=1):
                if wanted and not line.startswith(wanted):
                    continue
                event = _parse(path, number, line)
                if event is not None:
                    yield event
    except OSError as error:
        raise _failed("read", path, error) from error


def _parse(path: Path, number: int, line: bytes) -> Event | None:
    try:
        return from_json(line.decode())
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        if not line.endswith(b"\n"):  # only a last line has no end
            return None
        shown = line[:60].decode(errors="replace").rstrip()
        raise CheckpointError(
            f"{path}:{number} is not an event that this version of atoll knows ({type(error).__name__}: {error}): {shown!r}. "
            f"Restore the file, or read it with the version that wrote it."
        ) from error


def _begin(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _continue(path: Path, append_at: int) -> BinaryIO:
    if append_at < 0:
        raise CheckpointError(f"append_at={append_at}: a log continues at 0 bytes or later. Give what position() returned.")
    file = path.open("r+b")
    size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes < append_at:
        file.close()
        raise CheckpointError(
            f"{path} has {size_bytes} bytes, but the checkpoint was written when it had {append_at}: the log was cut or replaced. "
            f"Restore it, or resume from an earlier checkpoint."
        )
    file.truncate(append_at)
    file.seek(append_at)
    return file


def _failed(verb: str, path: Path, error: OSError) -> CheckpointError:
    """What went wrong with the file, and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"Free some space there, then go on with `atoll run --resume {path.parent}`."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "Check its permissions, or choose a folder that you may write to."
    elif error.errno == errno.ENOENT:
        advice = f"Is {path.parent} a run's folder? It should hold run.json and events.jsonl."
    else:
        advice = f"Check the disk, then go on with `atoll run --resume {path.parent}`."
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error}. {advice}")
