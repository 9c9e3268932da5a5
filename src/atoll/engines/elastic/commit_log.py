"""The recent commits, which every island remembers: when a leader dies, the next one continues its event log with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from atoll.core import events as ev
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.telemetry.event_log import unix_time_s

_REMEMBERED_COMMITS = 512
"""How far the event log can lag behind."""


class CommitRecord(NamedTuple):
    """What the event log gets from one commit. An `opening` commit precedes the first round."""

    version: StateVersion
    opening: bool
    events: Sequence[ev.Event]

    def lines(self) -> list[str]:
        return [event.to_json() for event in self.events if event.recorded]


class CommitLog:
    """The recent commits, which every island remembers.

    >>> log = CommitLog()
    >>> for number in range(1, 5):
    ...     log.append(CommitRecord(StateVersion(number, number), False, []), written=StateVersion(number - 2, number - 2))
    >>> log.epochs
    {1: 1, 2: 2, 3: 3, 4: 4}
    >>> [parts[:2] for parts in log.to_parts()]  # at the last commit the leader reported to have written the second
    [[2, 2], [3, 3], [4, 4]]
    """

    def __init__(self) -> None:
        self._records: deque[CommitRecord] = deque(maxlen=_REMEMBERED_COMMITS)
        self._written = NO_VERSION
        """The event log goes at least so far."""

    def __iter__(self) -> Iterator[CommitRecord]:
        return iter(self._records)

    @property
    def epochs(self) -> dict[int, int]:
        """Of the committed rounds."""
        return {record.version.round: record.version.epoch for record in self._records if not record.opening}

    def append(self, record: CommitRecord, written: StateVersion) -> None:
        """Remember a commit, whose participants reported that the event log goes up to `written`."""
        self._written = max(self._written, written)
        # A later leader may write the events long after they happened.
        self._records.append(record._replace(events=[replace(event, unix_time_s=unix_time_s()) for event in record.events]))

    def lines(self, version: StateVersion) -> list[str]:
        return [line for record in self._records if record.version == version for line in record.lines()]

    def to_parts(self) -> list[Any]:
        """The last commit that the event log has, and all that it may not have, as JSON data for other islands."""
        return [[*one.version, one.opening, one.lines()] for one in self._records if one.version >= self._written]

    def from_parts(self, parts: Sequence[Any]) -> None:
        """Take over the commits of another island, or of a checkpoint. Some that this island saw itself may be void."""
        self._records.clear()
        for number, epoch, opening, lines in parts:
            self._records.append(CommitRecord(StateVersion(int(number), int(epoch)), opening, [*map(ev.read_event, lines)]))
        self._written = NO_VERSION
