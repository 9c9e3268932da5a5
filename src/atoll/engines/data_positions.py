"""Data positions of a synchronous run: which batches each reader gets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.protocols import Batches, Work


class DataPositions:
    """The position in each shard. Reader i reads shard i modulo the number of shards; readers of one shard never read the same
    batch."""

    def __init__(self, batches: Batches) -> None:
        self.positions = [Fraction(0)] * batches.num_shards
        """In batches."""
        self._batches = batches
        self._assigned: dict[int, deque[tuple[int, Work]]] = {}
        """Work, and its batches or pieces, that readers were assigned in this round before they asked."""

    def begin_round(self) -> None:
        """Discards what readers were assigned in the last round and did not ask for."""
        self._assigned.clear()

    def assign(self, reader: int, count: int, pieces: int, schedule: int) -> Work:
        """The next `count` batches, or pieces of batches, for a reader at this schedule position."""
        shard = reader % self._batches.num_shards
        start = math.ceil(self.positions[shard] * pieces)  # a reader of other pieces than the last begins with a whole one
        self.positions[shard] = Fraction(start + count, pieces)
        return Work(shard=shard, start=start, schedule=schedule, examples=self._batches.examples(shard), pieces=pieces)

    def assign_in_step(self, reader: int, count: int, pieces: int, schedule: int, readers: Iterable[int]) -> Work:
        """The same, if all readers ask for the same in a round. The first request assigns work to all readers of the shard in
        order, so the result does not depend on which reader is faster. Processes that do not see each other's requests assign
        in this way, too."""
        if not self._assigned.get(reader):
            for other in readers:
                if (other - reader) % self._batches.num_shards == 0:
                    self._assigned.setdefault(other, deque()).append((count, self.assign(other, count, pieces, schedule)))
        assigned, work = self._assigned[reader].popleft()
        if (assigned, work.pieces) != (count, pieces):  # this reader asks for something else
            return self.assign(reader, count, pieces, schedule)
        return replace(work, schedule=schedule)

    def check_readers(self, readers: int, *algorithms: Any) -> None:
        """Rejects more readers than shards if their batches per round differ: none would know how far the others have read."""
        shards = len(self.positions)
        if readers > shards and not same_batches_everywhere(*algorithms):
            raise ConfigError(
                f"{readers} processes read {shards} shards of the data, and with batch=free no process knows how far the others "
                f"have read. Use data.shards={readers}, or batch=fixed."
            )

    def examples(self, readers: Iterable[int]) -> int:
        """The number of examples in the shards of these readers."""
        return sum(self._batches.examples(shard) for shard in {reader % self._batches.num_shards for reader in readers})

    def to_parts(self) -> list[tuple[int, int]]:
        return [position.as_integer_ratio() for position in self.positions]

    def from_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        self.positions = [Fraction(*position) for position in parts]

    def set(self, shard: int, position: tuple[int, int]) -> None:
        """Sets the position of a shard, given as a ratio of integers."""
        self.positions[shard] = Fraction(*position)


def same_batches_everywhere(*algorithms: Any) -> bool:
    """Whether all members that run these algorithms ask for the same number of batches in a round."""
    return all(getattr(algorithm, "batch", None) != "free" for algorithm in algorithms)
