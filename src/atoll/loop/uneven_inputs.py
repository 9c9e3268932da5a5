"""Islands with uneven inputs: an island may run out of batches, or fail, before the others.

In every exchange an island sends its status along. An island whose batches are used up either stays until all islands are done,
with weight 0, or leaves after that round, and the others continue without it. An island that raised is excluded at once: it
posts a leave message if its links still work, and a record in the store otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.protocols import Encoding, Mean, Scattered, Work
from atoll.engines.communication_thread import BackgroundTask, CommunicationThread
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import ExchangeTimeout, FailureAttribution
from atoll.engines.point_to_point import Group
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.round_record import ExchangeRecord
from atoll.loop.event_recorder import EventRecorder
from atoll.loop.nonfinite_guard import NonFiniteGuard
from atoll.loop.replica import LoopReplica

T = TypeVar("T")

CONTINUES, EXHAUSTED, LEFT = 0.0, 1.0, 2.0
_MESSAGE_NUMBERS = 2
"""Numbers per message besides the status. All messages have this length, so that a leave message can replace any of them."""


class UnevenCollectives(GroupCollectives):
    """The collectives of all islands, which may leave. The group has one process of each.

    Args:
        ranks: the group's members by their rank in the store.
        store: holds records of islands that left by an exception; None if there is one island.
        finish_together: exhausted islands stay until all islands are exhausted; otherwise each leaves by itself.
        needs_all: the reason why no island may fail; empty if the others can continue without it.
    """

    def __init__(
        self, group: Group, ranks: Sequence[int], store: Store | None, *, timeout_s: float, finish_together: bool, needs_all: str
    ) -> None:
        names = [f"island {number}" for number in range(group.size())]
        attribution = FailureAttribution(store, ranks[group.rank()], ranks) if store is not None else None
        super().__init__(group, timeout_s=timeout_s, attribution=attribution, names=names)
        self._store, self._finish_together, self._needs_all = store, finish_together, needs_all
        self._leaving: list[int] = []
        """Islands that leave after this round."""
        self.exhausted = False
        """Whether this island's batches are used up."""
        self.finished = False
        """Whether the last exchange was this island's final one."""

    def all_gather_on_entry(self, *numbers: float) -> list[list[float]]:
        """The numbers of all islands, before any may leave."""
        return super().all_gather_numbers(*numbers)

    def all_gather_numbers(self, *numbers: float) -> list[list[float]]:
        """The numbers of all present islands, in rank order. Excludes islands that failed."""
        assert len(numbers) <= _MESSAGE_NUMBERS, f"{len(numbers)} numbers in a message of {_MESSAGE_NUMBERS}"
        padded = [*numbers, *[0.0] * (_MESSAGE_NUMBERS - len(numbers))]
        rows = self.all_gather_surviving(*padded, EXHAUSTED if self.exhausted else CONTINUES, has_left=self._has_left)
        present = [row for row in rows if row is not None and row[-1] != LEFT]
        failed = [rank for rank, row in enumerate(rows) if row is None or row[-1] == LEFT]
        if failed and self._needs_all:
            raise ExchangeFailed(
                f"{self.listed(failed)} left by an exception, and {self._needs_all}. Fix it, and resume from the last checkpoint."
            )
        self.remove(failed)
        exhausted = [rank for rank, row in enumerate(present) if row[-1] == EXHAUSTED]
        self.finished = len(exhausted) == len(present) if self._finish_together else self.exhausted
        self._leaving = [] if self._finish_together else [rank for rank in exhausted if rank != self.rank]
        return [row[: len(numbers)] for row in present]

    def begin_round(self) -> None:
        """Excludes islands that left after the last round. Within a round all take part in all exchanges."""
        self.remove(self._leaving)
        self._leaving = []

    def listed(self, ranks: Sequence[int]) -> str:
        """The islands of these ranks by their initial numbers, as in "island 1, island 3"."""
        return ", ".join(self.names[rank] for rank in ranks)

    def record_departure(self) -> None:
        """Record in the store that this island leaves."""
        try:
            if self._store is not None:
                self._store.set(f"left/{self._group_rank}", "1")
        except RuntimeError:  # the process that hosts the store has ended, so no island can read it any more
            self._store = None

    def _has_left(self, island: int) -> bool:
        try:
            return self._store is not None and bool(self._store.check([f"left/{island}"]))
        except RuntimeError:
            return False

    def post_leave_message(self) -> object:
        """Send LEFT in place of the next status message. The caller keeps the returned handle until the peers can have read it."""
        return self.post_final(*[0.0] * _MESSAGE_NUMBERS, LEFT)


class UnevenPeers(ProcessPeers):
    """The other islands. A protocols.Peers. Weights this island's part by the share of the round's steps that its user took."""

    def __init__(
        self,
        collectives: UnevenCollectives,
        thread: CommunicationThread,
        assign: Callable[[int, int, int], Work],
        layout: Layout,
        timeout: ExchangeTimeout,
        replica: LoopReplica,
        guard: NonFiniteGuard,
        recorder: EventRecorder,
    ) -> None:
        given: dict[str, Any] = {"timeout": timeout, "on_exchange": self._record, "clock": recorder.clock}
        if recorder.is_on:
            given["on_similarity"] = recorder.record.similarities.append
        super().__init__(collectives, thread, assign, layout, **given)
        self._uneven, self._replica, self._guard, self._recorder = collectives, replica, guard, recorder
        self.launched = False
        """Whether this round has started a background exchange."""

    def begin_round(self) -> None:
        self.launched = False
        self.results.clear()
        self._uneven.begin_round()

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        self._update_status()
        share = self._replica.take_share()
        # A gradient algorithm can skip an update. A non-finite delta would end in the weights of all islands.
        if self._replica.stepped_by == "user" and not await self._guard.accepts(tree):
            tree, share = tree.zeros(), 0.0
        return await super().mean(tree, weight * share, compare=compare, encoding=encoding)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        self._update_status()
        return await super().reduce_scatter(tree, weight, wide=wide, wire=wire)

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
        self._recorder.record.exchanges.append(exchange)
        self._guard.record(exchange, self._uneven.listed(exchange.nonfinite), is_first=self._uneven.rank == 0)
