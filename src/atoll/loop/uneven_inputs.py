"""Islands that may leave. With all that it tells, an island says whether it goes on.

An island that is through with its batches says so. Either it stays with the others until all are through, and weighs nothing
meanwhile, or the exchange in which it said so was its last, and the others go on without it. An island that left by an exception
is left out at once. It says so as well, if it can; else the store knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.engines.processes.collectives import GroupCollectives, weighted_sum

GOES_ON, THROUGH, GONE = 0.0, 1.0, 2.0
_NUMBERS = 2
"""How many numbers are told at a time, at most: all messages are of one length, so that last words fit any of them."""


class Lone:
    """The wire of an island that is alone: nothing travels."""

    def __init__(self) -> None:
        self.timeout_s, self.sent_bytes, self.control_bytes = 0.0, 0, 0
        self.rank, self.size = 0, 1

    def all_gather_numbers(self, *numbers: float) -> list[list[float]]:
        return [list(numbers)]

    def all_gather_surviving(self, *numbers: float, has_left: Callable[[int], bool]) -> list[list[float] | None]:
        return [list(numbers)]

    def post_final(self, *numbers: float) -> object:
        return None

    def remove(self, ranks: Sequence[int]) -> None:
        assert not ranks, "an island cannot leave itself out"

    def broadcast(self, whole: Tensor) -> None:
        pass

    def all_gather(self, whole: Tensor) -> None:
        pass

    def reduce_scatter(
        self,
        flat: Tensor,
        weights: Sequence[float],
        sum_dtype: torch.dtype | None = None,
        *,
        inner_products: Tensor | None = None,
        divide_by: float | None = None,
    ) -> Tensor:
        total = flat if sum_dtype in (None, flat.dtype) else torch.empty_like(flat, dtype=sum_dtype)
        weighted_sum([flat], weights, total)
        if divide_by is not None:
            total /= divide_by
        return total


class Company:
    """A wire whose members may leave. A collectives.Collectives.

    Args:
        wire: with all islands.
        left: whether an island that is missed has left.
        together: islands that are through stay until all are; else each of them leaves.
        needs_all: why no island may be lost; none if the others can go on without it.
    """

    def __init__(
        self, wire: GroupCollectives | Lone, *, left: Callable[[int], bool], together: bool, needs_all: str | None
    ) -> None:
        self._wire, self._left = wire, left
        self._together, self._needs_all = together, needs_all
        self._islands = list(range(wire.size))
        """Those that are there, by the number that they began with."""
        self._leaving: list[int] = []
        self.through = False
        """Whether this island says that it is through."""
        self.over = False
        """Whether the last exchange was the last one for this island."""

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def size(self) -> int:
        return self._wire.size

    @property
    def timeout_s(self) -> float:
        return self._wire.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._wire.timeout_s = timeout_s

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    @property
    def control_bytes(self) -> int:
        return self._wire.control_bytes

    def all_gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Everybody's numbers, in rank order. Who is gone is left out from here on, and so is who left at the last exchange."""
        assert len(numbers) <= _NUMBERS, f"{len(numbers)} numbers are told, and last words have {_NUMBERS}"
        self._leave_out(self._leaving)
        padded = [*numbers, *[0.0] * (_NUMBERS - len(numbers))]
        told = self._wire.all_gather_surviving(*padded, THROUGH if self.through else GOES_ON, has_left=self._left)
        there = [row for row in told if row is not None and row[-1] != GONE]
        self._lose([rank for rank, row in enumerate(told) if row is None or row[-1] == GONE])
        through = [rank for rank, row in enumerate(there) if row[-1] == THROUGH]
        self.over = len(through) == len(there) if self._together else self.through
        self._leaving = [] if self._together else [rank for rank in through if rank != self.rank]
        return [row[: len(numbers)] for row in there]

    def names(self, ranks: Sequence[int]) -> str:
        """What those islands are called, by the number that they began with."""
        return ", ".join(f"island {self._islands[rank]}" for rank in ranks)

    def say_goodbye(self) -> object:
        """Tell whoever tells next that this island is gone. Keep what is returned for as long as they may hear it."""
        return self._wire.post_final(*[0.0] * _NUMBERS, GONE)

    def _lose(self, ranks: Sequence[int]) -> None:
        if ranks and self._needs_all is not None:
            raise ExchangeFailed(
                f"{self.names(ranks)} left by an exception, and {self._needs_all}. Mend it, and go on from what was last saved."
            )
        self._leave_out(ranks)

    def _leave_out(self, ranks: Sequence[int]) -> None:
        self._wire.remove(ranks)
        self._islands = [island for rank, island in enumerate(self._islands) if rank not in ranks]

    def reduce_scatter(
        self,
        flat: Tensor,
        weights: Sequence[float],
        sum_dtype: torch.dtype | None = None,
        *,
        inner_products: Tensor | None = None,
        divide_by: float | None = None,
    ) -> Tensor:
        return self._wire.reduce_scatter(flat, weights, sum_dtype, inner_products=inner_products, divide_by=divide_by)

    def all_gather(self, whole: Tensor) -> None:
        self._wire.all_gather(whole)
