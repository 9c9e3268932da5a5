"""Who reads what: positions in the shards of the data, in a synchronous run."""

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
    """Deals out the data. Reader i reads shard i, or i modulo the number of shards where there are fewer: those who share a shard
    never read the same batch."""

    def __init__(self, batches: Batches) -> None:
        self.positions = [Fraction(0)] * batches.num_shards
        """In each shard, in batches."""
        self._batches = batches
        self._dealt: dict[int, deque[tuple[int, Work]]] = {}
        """How many batches, or pieces, and which, readers were dealt in this round before they asked."""

    def begin_round(self) -> None:
        """What was dealt to readers who did not ask for it in the last one is read by nobody."""
        self._dealt.clear()

    def assign_in_step(self, reader: int, count: int, pieces: int, schedule: int, readers: Iterable[int]) -> Work:
        """The same where readers ask alike in a round: whoever asks first has all who share its shard dealt theirs, in order, so
        that it does not matter who is faster: processes that do not hear of each other's asking deal so."""
        if not self._dealt.get(reader):
            for other in readers:
                if (other - reader) % self._batches.num_shards == 0:
                    self._dealt.setdefault(other, deque()).append((count, self.assign(other, count, pieces, schedule)))
        dealt, work = self._dealt[reader].popleft()
        if (dealt, work.pieces) != (count, pieces):  # it asks otherwise than the others
            return self.assign(reader, count, pieces, schedule)
        return replace(work, schedule=schedule)

    def assign(self, reader: int, count: int, pieces: int, schedule: int) -> Work:
        """So many batches, or pieces of them, for this reader, who is at this position of the schedule."""
        shard = reader % self._batches.num_shards
        start = math.ceil(self.positions[shard] * pieces)  # who reads other pieces than the last one begins with a whole one
        self.positions[shard] = Fraction(start + count, pieces)
        return Work(shard=shard, start=start, schedule=schedule, examples=self._batches.examples(shard), pieces=pieces)

    def check_readers(self, readers: int, *algorithms: Any) -> None:
        """Refuses what has more readers than shards and does not ask alike: nobody would know how far the others have read."""
        shards = len(self.positions)
        if readers > shards and not same_batches_everywhere(*algorithms):
            raise ConfigError(
                f"{readers} processes read {shards} shards of the data, and with batch=free nobody knows how far the others have "
                f"read. Use data.shards={readers}, or batch=fixed."
            )

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


def same_batches_everywhere(*algorithms: Any) -> bool:
    """Whether all who run these ask for as many batches in a round."""
    return all(getattr(algorithm, "batch", None) != "free" for algorithm in algorithms)
