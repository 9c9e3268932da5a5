"""What a hub needs of whoever keeps its run: a log, and checkpoints. Both lie where a hub that takes its place finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from atoll.core.events import Event
from atoll.core.flat_tree import Tree


class Log(Protocol):
    """Takes events, in order."""

    def emit(self, event: Event) -> None: ...

    def position(self) -> int:
        """How many bytes it has; all of them are on the disk."""

    def close(self) -> None: ...


class Kept(NamedTuple):
    """A checkpoint.

    Attributes:
        name: of it.
        metadata: what `save` was given.
        load: gives a part back, with the types of a value like it.
    """

    name: str
    metadata: Mapping[str, Any]
    load: Callable[[str, Any], Any]


class Lost(NamedTuple):
    """What a log holds that a checkpoint does not know of: rounds that were taken, and their local updates."""

    rounds: int
    local_updates: int


class Keeper(Protocol):
    """Keeps a run's log and its checkpoints. It is sent to the hub's process, and to that of each hub after it."""

    def hold(self) -> None:
        """Wait until no other process keeps this run; none will as long as this one lives."""

    def begin(self) -> Tree:
        """The weights that the run begins with."""

    def newest(self) -> Kept | None:
        """The newest checkpoint; none if there is none."""

    def save(self, round: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint, whole or not at all."""

    def name(self, round: int) -> str:
        """What a checkpoint of this round is called."""

    def lost(self, after: int) -> Lost:
        """What stands in the log after so many bytes."""

    def log(self, after: int) -> Log:
        """The log, cut after so many bytes, to go on with."""

    def say(self, text: str) -> None:
        """Write a line into the hub's own log."""
