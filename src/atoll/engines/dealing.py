"""Who reads what: positions in the shards of the data, in a synchronous run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from atoll.protocols import Batches, Work


class Dealing:
    """Deals out the data. Reader i reads shard i, or i modulo the number of shards where there are fewer: those who share a shard
    never read the same batch."""

    def __init__(self, batches: Batches) -> None:
        self.positions = [Fraction(0)] * batches.num_shards
        """In each shard, in batches."""
        self._batches = batches

    def deal(self, reader: int, count: int, pieces: int, schedule: int) -> Work:
        """So many batches, or pieces of them, for this reader, who is at this position of the schedule."""
        shard = reader % self._batches.num_shards
        start = math.ceil(self.positions[shard] * pieces)  # who reads other pieces than the last one begins with a whole one
        self.positions[shard] = Fraction(start + count, pieces)
        return Work(shard=shard, start=start, schedule=schedule, examples=self._batches.examples(shard), pieces=pieces)

    def examples(self, readers: Iterable[int]) -> int:
        """How many examples the shards of these readers hold."""
        return sum(self._batches.examples(shard) for shard in {reader % self._batches.num_shards for reader in readers})

    def to_parts(self) -> list[tuple[int, int]]:
        return [position.as_integer_ratio() for position in self.positions]

    def from_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        self.positions = [Fraction(*position) for position in parts]

    def set(self, shard: int, position: tuple[int, int]) -> None:
        """Put a shard's position, as a ratio of whole numbers."""
        self.positions[shard] = Fraction(*position)
