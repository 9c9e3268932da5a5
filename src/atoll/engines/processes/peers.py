"""The other islands of a run, as an algorithm on this rank sees them: exchanges over a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.nested_trees import recycle
from atoll.core.protocols import Encoding, Mean, Scattered, Work
from atoll.engines.communication_thread import BackgroundTask, CommunicationThread, Request
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.round_record import DeltaSimilarity, ExchangeRecord, WallClock

S = TypeVar("S")
T = TypeVar("T")


ExchangeOutcome = tuple[T, float, tuple[int, ...]]
"""The result of an exchange, the sum of the ranks' weights, and the ranks whose tree was not finite."""


class ProcessPeers:
    """A protocols.Peers over a process group.

    Args:
        assign: assigns work: steps, batches, pieces.
        timeout: of exchanges; by default the group's own.
        on_similarity: takes the inner products of compared trees; without it, nothing is compared.
    """

    def __init__(
        self,
        group: GroupCollectives,
        thread: CommunicationThread,
        assign: Callable[[int, int, int], Work],
        layout: Layout,
        *,
        clock: WallClock | None = None,
        timeout: ExchangeTimeout | None = None,
        on_exchange: Callable[[ExchangeRecord], object] = lambda exchange: None,
        on_similarity: Callable[[DeltaSimilarity], object] | None = None,
    ) -> None:
        self._group, self._thread, self._assign, self._layout = group, thread, assign, layout
        self._clock, self._timeout = clock or WallClock(), timeout or ExchangeTimeout(group.timeout_s)
        self._on_exchange, self._on_similarity = on_exchange, on_similarity
        self._computing_thread = threading.current_thread()
        self._launching = False
        self._tasks: list[BackgroundTask[Any]] = []
        """Background exchanges that may be under way. The communication thread carries them out one after the other."""
        self._buffer: Tree | None = None
        """The buffer of the last reduce-scatter: its slices lie in it, and so will what is gathered of them."""
        self.results: list[Tree] = []
        """Results of exchanges, whose buffers the engine recycles after the round."""

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def in_background(self) -> bool:
        """Whether a background exchange is under way."""
        return not all(task.done() for task in self._tasks)

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._assign(steps, steps if batches is None else batches, pieces)

    # ----------------------------------------------------------------------------------------------------------- exchanges

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        whole = tree.claim(torch.float32 if encoding is not None else None)
        return await self._exchange("mean", lambda: self._mean(whole, weight, compare, encoding))

    def _mean(self, whole: Tree, weight: float, compare: bool, encoding: Encoding | None) -> ExchangeOutcome[Mean]:
        weights, nonfinite = self._gather_weights(weight, whole)
        total, unsent = float(sum(weights)), None
        if total == 0:
            return Mean(whole.zeros(), 0.0, True, not nonfinite), 0.0, nonfinite
        products = torch.zeros(self.size, self.size, dtype=torch.float64) if compare and self._on_similarity is not None else None
        if encoding is not None:
            mean = self._group.encoded_mean(whole.flat, weights, encoding, inner_products=products)
            whole, unsent = Tree(whole.layout, mean), whole
            self.results.append(unsent)
        else:
            self._group.reduce_scatter(whole.flat, weights, inner_products=products, divide_by=total)
            self._group.all_gather(whole.flat)
        self.results.append(whole)
        if products is not None and self._on_similarity is not None:
            self._on_similarity(DeltaSimilarity(products.tolist(), weights))
        unsent = unsent if weights[self.rank] else None
        return Mean(whole, total, True, not nonfinite, unsent), total, nonfinite

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        buffer = tree.claim(wire)
        return await self._exchange("reduce_scatter", lambda: self._reduce_scatter(buffer, weight, wide))

    def _reduce_scatter(self, buffer: Tree, weight: float, wide: bool) -> ExchangeOutcome[Scattered]:
        weights, nonfinite = self._gather_weights(weight, buffer)
        self._buffer = buffer
        sum_dtype = torch.promote_types(buffer.flat.dtype, torch.float32) if wide else None
        flat = self._group.reduce_scatter(buffer.flat, [1.0] * self.size, sum_dtype)
        value = Tree(buffer.shard(self.rank, self.size).layout, flat).borrow()
        total = float(sum(weights))
        return Scattered(value, total, not nonfinite), total, nonfinite

    def _gather_weights(self, weight: float, tree: Tree) -> tuple[list[float], tuple[int, ...]]:
        """Every rank's weight, and the ranks whose tree is not finite."""
        rows = self._group.all_gather_numbers(weight, tree.is_finite())
        return [row[0] for row in rows], tuple(rank for rank, row in enumerate(rows) if not row[1])

    async def all_gather(self, shard: Tree) -> Tree:
        return await self._exchange("all_gather", lambda: self._all_gather(shard))

    def _all_gather(self, shard: Tree) -> ExchangeOutcome[Tree]:
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.flat.dtype != shard.flat.dtype:
            flat = shard.flat
            buffer = Tree(self._layout, empty(self._layout.numel, flat.dtype, flat.device))
        mine = buffer.shard(self.rank, self.size).flat
        if mine.data_ptr() != shard.flat.data_ptr():
            mine.copy_(shard.flat)
        self._group.all_gather(buffer.flat)
        self.results.append(buffer)
        return buffer, 0.0, ()

    async def total(self, number: float) -> float:
        return await self._exchange("total", lambda: (sum(row[0] for row in self._group.all_gather_numbers(number)), 0.0, ()))

    def gather_slices(self, shard: Tree) -> Tree:
        """The whole tree, of which each rank holds a slice. It is no part of training: its bytes are not counted."""
        return self._thread.call(lambda: self._group.gather_slices(shard, self._layout))

    def end_round(self, before: Any, after: Any, which: str) -> None:
        """A round has led from one State to another. Refuses a round that leaves an exchange open; `which` names it."""
        if self.in_background:
            raise ExchangeFailed(f"{which} with a background exchange open. Await it within the round.")
        self.recycle(before, after)

    def recycle(self, before: Any, after: Any) -> None:
        """Recycle the buffers of the old State and of the results of exchanges, except those that the new State holds."""
        recycle([before, *self.results], [after])
        self.results.clear()

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> BackgroundTask[T]:
        self._launching = True
        try:
            task = self._thread.launch(coroutine)
        finally:
            self._launching = False
        self._tasks = [*(each for each in self._tasks if not each.done()), task]
        return task

    async def catch_up(self, state: S) -> S:
        """No island misses an exchange here: one that does not take part ends the run."""
        return state

    def _exchange(self, what: str, call: Callable[[], ExchangeOutcome[T]]) -> Request[T]:
        """A request for the communication thread, which records when the exchange was asked for, began, and was over."""
        arrived_s, group = self._clock.now_s(), self._group
        background = self._launching or threading.current_thread() is not self._computing_thread

        def timed() -> T:
            sent, control = group.sent_bytes, group.control_bytes
            start_s = self._clock.now_s() if background else None  # it may have waited for others in the background
            group.timeout_s = self._timeout.start()
            result, weight, nonfinite = call()
            end_s = self._clock.now_s()
            self._timeout.finish()
            counted = group.sent_bytes - sent, group.control_bytes - control
            record = ExchangeRecord(what, arrived_s, end_s, *counted, weight, background, nonfinite)
            unusable = record.makes_update and (bool(nonfinite) or weight == 0)
            self._on_exchange(replace(record, unusable=unusable, start_s=start_s))
            return result

        return Request(timed)
