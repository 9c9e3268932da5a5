"""What was committed lately: every island remembers it, and whoever writes the run's log next has what the last one left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from atoll.core.events import Event, from_json
from atoll.engines.elastic.state_version import NOTHING, Generation

_REMEMBERED = 512  # commits: so long a log can lag behind


class Minute(NamedTuple):
    """What is to be written of one commit.

    Attributes:
        generation: that was committed.
        opening: whether it was before a round, and not a round itself.
        events: what happened.
    """

    generation: Generation
    opening: bool
    events: Sequence[Event]


class Minutes:
    """The minutes of one island.

    >>> minutes = Minutes()
    >>> for number in range(1, 5):
    ...     minutes.add(Minute(Generation(number, number), False, []), written=Generation(number - 2, number - 2))
    >>> minutes.epochs
    {1: 1, 2: 2, 3: 3, 4: 4}
    >>> [parts[:2] for parts in minutes.to_parts()]  # whoever writes said at the last meeting that it has written of the second
    [[2, 2], [3, 3], [4, 4]]
    """

    def __init__(self) -> None:
        self._kept: deque[Minute] = deque(maxlen=_REMEMBERED)
        self._written = NOTHING
        """So far the log is known to go."""

    def __iter__(self) -> Iterator[Minute]:
        return iter(self._kept)

    @property
    def epochs(self) -> dict[int, int]:
        """Of the commits, by round."""
        return {minute.generation.round: minute.generation.epoch for minute in self._kept if not minute.opening}

    def add(self, minute: Minute, written: Generation) -> None:
        """Something was committed.

        Args:
            minute: what.
            written: how far the log goes, as those said who committed it.
        """
        self._written = max(self._written, written)
        self._kept.append(minute)

    def begin_with(self, generation: Generation, lines: Sequence[str] = ()) -> None:
        """This island goes on from a checkpoint, of whose commit these lines tell: what came after it is void."""
        self._replace([Minute(generation, False, [*map(from_json, lines)])])

    def lines(self, generation: Generation) -> list[str]:
        """What is to be written of this commit."""
        return [line for minute in self._kept if minute.generation == generation for line in _lines(minute)]

    def _replace(self, minutes: Sequence[Minute]) -> None:
        self._kept.clear()
        self._kept.extend(minutes)
        self._written = NOTHING

    # ------------------------------------------------------------------------------------------------------- to other islands

    def to_parts(self) -> list[Any]:
        """What may not be in the log yet, and the last commit that is, as plain data."""
        return [[*minute.generation, minute.opening, _lines(minute)] for minute in self._kept if minute.generation >= self._written]

    def from_parts(self, parts: Sequence[Any]) -> None:
        """Remember what another island does. What this one saw itself may have come to nothing."""
        self._replace(
            [Minute(Generation(number, epoch), opening, [*map(from_json, lines)]) for number, epoch, opening, lines in parts]
        )


def _lines(minute: Minute) -> list[str]:
    return [event.to_json() for event in minute.events if event.recorded]
