"""Islands with uneven inputs: an island may run out of batches, or fail, before the others.

In every exchange an island sends its status along. An island whose batches are used up either stays until all islands are done,
with weight 0, or leaves after that exchange, and the others continue without it. An island that raised is excluded at once: it
posts a leave message if its links still work, and a record in the store otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.protocols import Mean, Scattered, Work
from atoll.engines.processes.collectives import GroupCollectives, weighted_sum
from atoll.engines.processes.communication_thread import BackgroundTask, CommunicationThread
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.round_record import ExchangeRecord
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.loop.nonfinite_guard import NonFiniteGuard
from atoll.loop.replica import LoopReplica

T = TypeVar("T")

CONTINUES, EXHAUSTED, LEFT = 0.0, 1.0, 2.0
_MESSAGE_NUMBERS = 2
"""Numbers per message besides the status. All messages have this length, so that a leave message can replace any of them."""


class DepartureRecords:
    """Records in the store of islands that left by an exception."""

    def __init__(self, store: Store | None, island: int) -> None:
        self._store, self._island = store, island

    def add(self) -> None:
        """Record that this island leaves."""
        try:
            if self._store is not None:
                self._store.set(f"left/{self._island}", "1")
        except RuntimeError:  # the process that hosts the store has ended, so no island can read it any more
            self._store = None

    def has_left(self, island: int) -> bool:
        try:
            return self._store is not None and bool(self._store.check([f"left/{island}"]))
        except RuntimeError:
            return False


class SingleIslandCollectives:
    """The collectives of a single island: nothing is sent."""

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
        assert not ranks, "a single island cannot exclude itself"

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


class UnevenCollectives:
    """Collectives whose members may leave. A collectives_protocol.Collectives.

    Args:
        inner: the collectives of all islands.
        departures: tells whether an island that does not answer has left.
        finish_together: exhausted islands stay until all islands are exhausted; otherwise each leaves by itself.
        needs_all: the reason why no island may fail; None if the others can continue without it.
    """

    def __init__(
        self,
        inner: GroupCollectives | SingleIslandCollectives,
        departures: DepartureRecords,
        *,
        finish_together: bool,
        needs_all: str | None,
    ) -> None:
        self._inner, self._departures = inner, departures
        self._finish_together, self._needs_all = finish_together, needs_all
        self._islands = list(range(inner.size))
        """The initial numbers of the present islands, by rank."""
        self._leaving: list[int] = []
        self.exhausted = False
        """Whether this island's batches are used up."""
        self.finished = False
        """Whether the last exchange was this island's final one."""

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def timeout_s(self) -> float:
        return self._inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._inner.timeout_s = timeout_s

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    @property
    def control_bytes(self) -> int:
        return self._inner.control_bytes

    def all_gather_numbers(self, *numbers: float) -> list[list[float]]:
        """The numbers of all present islands, in rank order. Excludes islands that failed or that left at the last exchange."""
        assert len(numbers) <= _MESSAGE_NUMBERS, f"{len(numbers)} numbers in a message of {_MESSAGE_NUMBERS}"
        self._exclude(self._leaving)
        padded = [*numbers, *[0.0] * (_MESSAGE_NUMBERS - len(numbers))]
        status = EXHAUSTED if self.exhausted else CONTINUES
        rows = self._inner.all_gather_surviving(*padded, status, has_left=self._departures.has_left)
        present = [row for row in rows if row is not None and row[-1] != LEFT]
        self._exclude_failed([rank for rank, row in enumerate(rows) if row is None or row[-1] == LEFT])
        exhausted = [rank for rank, row in enumerate(present) if row[-1] == EXHAUSTED]
        self.finished = len(exhausted) == len(present) if self._finish_together else self.exhausted
        self._leaving = [] if self._finish_together else [rank for rank in exhausted if rank != self.rank]
        return [row[: len(numbers)] for row in present]

    def names(self, ranks: Sequence[int]) -> str:
        """The islands of these ranks by their initial numbers, as in "island 1, island 3"."""
        return ", ".join(f"island {self._islands[rank]}" for rank in ranks)

    def post_leave_message(self) -> object:
        """Send LEFT in place of the next status message. The caller keeps the returned handle until the peers can have read it."""
        return self._inner.post_final(*[0.0] * _MESSAGE_NUMBERS, LEFT)

    def _exclude_failed(self, ranks: Sequence[int]) -> None:
        if ranks and self._needs_all is not None:
            raise ExchangeFailed(
                f"{self.names(ranks)} left by an exception, and {self._needs_all}. Fix it, and resume from the last checkpoint."
            )
        self._exclude(ranks)

    def _exclude(self, ranks: Sequence[int]) -> None:
        self._inner.remove(ranks)
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
        return self._inner.reduce_scatter(flat, weights, sum_dtype, inner_products=inner_products, divide_by=divide_by)

    def all_gather(self, whole: Tensor) -> None:
        self._inner.all_gather(whole)


class UnevenPeers(ProcessPeers):
    """The other islands, as an algorithm sees them. A protocols.Peers.

    This island's contribution is weighted by the share of the round's steps that its user took.
    """

    def __init__(
        self,
        collectives: UnevenCollectives,
        thread: CommunicationThread,
        assign: Callable[[int, int, int], Work],
        layout: Layout,
        *,
        timeout: ExchangeTimeout,
        replica: LoopReplica,
        guard: NonFiniteGuard,
    ) -> None:
        super().__init__(collectives, thread, assign, layout, timeout=timeout, on_exchange=self._record)
        self._uneven, self._replica, self._guard = collectives, replica, guard
        self.launched = False
        """Whether this round has started a background exchange."""

    def begin_round(self) -> None:
        self.launched = False
        self.results.clear()

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        self._update_status()
        share = self._replica.take_share()
        # A gradient algorithm can skip an update. A non-finite delta would end in the weights of all islands.
        if self._replica.stepped_by == "user" and not await self._guard.accepts(tree):
            tree, share = tree.zeros(), 0.0
        return await super().mean(tree, weight * share, compare=compare)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        self._update_status()
        return await super().reduce_scatter(tree, weight, wide=wide)

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> BackgroundTask[T]:
        self._update_status()
        self.launched = True
        return super().background(coroutine)

    def _update_status(self) -> None:
        """Sets the status when an exchange starts, not when the communication thread runs it: in between the user may compute
        gradients, which the island still has to send."""
        if not self.in_background:
            self._uneven.exhausted = self._replica.exhausted

    def _record(self, exchange: ExchangeRecord) -> None:
        self._guard.record(exchange, self._uneven.names(exchange.nonfinite), is_first=self._uneven.rank == 0)
