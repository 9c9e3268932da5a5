"""The run's log in the hands of one island: whoever takes it over goes on behind what counts, and whoever had it has it no more."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from atoll.core.atomic_files import replacing
from atoll.core.errors import CheckpointError
from atoll.core.events import Attended, Evaluated, Event, IslandJoined, RunStarted, Saved, SaveFailed, WarmStartFinished
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.telemetry.event_log import JsonlSink, read_events

_BEGUN = Generation(0, 1 << 31)
"""What a log without a commit tells of: the beginning, whatever its epoch."""
_BETWEEN = (Evaluated.__name__, Saved.__name__, SaveFailed.__name__)
_AT_FIRST = (RunStarted.__name__, WarmStartFinished.__name__, IslandJoined.__name__)
"""What is written between two commits, and before the first. A commit's own events end with who attended."""


class Overtaken(CheckpointError):
    """Another island has written the log while this one took it over."""


class TakenLog:
    """The log, from here on.

    A copy takes its place. So an island that wrote it before, was frozen in the middle of that and wakes, writes to a file that
    nobody reads any more.

    Args:
        path: of the log.
        keep_bytes: of what is there; the rest does not count.
        seen: `stamp` of the log that this was found in; none: whatever is there.

    Raises:
        CheckpointError: it cannot be written; Overtaken: another has written it since it was seen. What was there is untouched.
    """

    def __init__(self, path: Path, keep_bytes: int, seen: tuple[int, int] | None = None) -> None:
        with ExitStack() as failing:
            with replacing(path, CheckpointError) as file:
                file.write(path.read_bytes()[:keep_bytes] if keep_bytes else b"")
                file.flush()
                # Opened under its own name: under the log's another may put its own at any moment.
                self._sink = JsonlSink(file.name, append_at=keep_bytes)
                failing.callback(self.close)
                self.sync()  # it takes a while; what is asked next must still be so when the copy takes its place
                if seen is not None and stamp(path) != seen:
                    raise Overtaken(f"another island has written {path} while this one took it over.")
                self._inode = os.fstat(file.fileno()).st_ino
            failing.pop_all()
        self._sink.path = path

    def emit(self, event: Event) -> None:
        self._sink.emit(event)

    def sync(self) -> None:
        """All of it is on the disk when this returns."""
        self._sink.position()

    @property
    def is_ours(self) -> bool:
        """Whether nobody has taken it over since."""
        return stamp(self._sink.path)[0] == self._inode

    def close(self) -> None:
        with suppress(CheckpointError):
            self._sink.close()


def stamp(path: Path) -> tuple[int, int]:
    """Which file a log is, and how long: not the same once anybody has written it. Nothing where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_size


def agreed_part(path: Path, epochs: Mapping[int, int]) -> tuple[int, Generation]:
    """How many bytes of a log tell of commits that count, and the last of these.

    A commit that was written by an island which died at once may be one that nobody else has; and it may not be there in full.

    Args:
        path: the log.
        epochs: of the commits that count, by round. Those before the first of these are not doubted; if there are none, nothing
            in the log counts.
    """
    at, last, end, first = 0, NOTHING, 0, min(epochs, default=0)
    for line in path.read_bytes().splitlines(keepends=True) if epochs and path.exists() else ():
        end += len(line)
        name = line[: line.find(b",")].decode(errors="replace").removeprefix('{"event": ').strip('"')
        if not line.endswith(b"\n"):
            break
        if name == Attended.__name__:
            attended = json.loads(line)
            found = Generation(attended["round"], attended["epoch"])
            if found.round >= first and epochs.get(found.round) != found.epoch:
                break
            at, last = end, found
        elif name in _BETWEEN:
            at = end
        elif name in _AT_FIRST and last <= _BEGUN:
            at, last = end, _BEGUN
    return at, last


def last_commit(path: Path) -> Generation:
    """What a log tells of last, whether it counts or not."""
    attended = read_events(path, [Attended]) if path.exists() else ()
    return max((Generation(one.round, one.epoch) for one in attended if isinstance(one, Attended)), default=NOTHING)
