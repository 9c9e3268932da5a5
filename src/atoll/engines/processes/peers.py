"""The islands of a run, seen from one process: exchanges over a wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import Mean, Scattered, Work
from atoll.engines.processes.collectives import Collectives
from atoll.engines.processes.communication_thread import CommunicationThread, Flight, Request
from atoll.engines.processes.round_record import DeltaSimilarity, ExchangeRecord
from atoll.engines.wall_clock import ExchangeTimeout, WallClock

S = TypeVar("S")
T = TypeVar("T")


_UPDATES = ("mean", "reduce_scatter")
"""What updates are made of."""


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What an exchange brought, the weight of it, and ranks whose tree was not finite."""

    result: T
    weight: float = 0.0
    unsound: tuple[int, ...] = ()


class ProcessPeers:
    """Processes as equals. A protocols.Peers.

    Args:
        wire: carries what is exchanged.
        line: the thread that uses it.
        deal: hands out work: steps, batches, pieces.
        layout: of the weights as a whole.
        clock: of the run.
        limit: of exchanges, which is told how long they take.
        note: takes a record of each meeting.
        liken: takes what is known of the likeness of trees that are to be compared; none compares nothing.
        last: whether nobody reads the State of a round any more once its mean is there.
    """

    def __init__(
        self,
        wire: Collectives,
        line: CommunicationThread,
        deal: Callable[[int, int, int], Work],
        layout: Layout,
        *,
        clock: WallClock | None = None,
        limit: ExchangeTimeout | None = None,
        note: Callable[[ExchangeRecord], object] = lambda meeting: None,
        liken: Callable[[DeltaSimilarity], object] | None = None,
        last: bool = False,
    ) -> None:
        self._wire, self._line, self._deal, self._layout = wire, line, deal, layout
        self._clock, self._limit, self._note, self._liken = clock or WallClock(), limit, note, liken
        self._last = last
        self._here = threading.current_thread()
        self._launching = False
        self._flight: Flight[Any] | None = None
        self._buffer: Tree | None = None
        """What was given to the last reduce-scatter: its slices lie in it, and so will what is gathered of them."""
        self.results: list[Tree] = []
        """What exchanges made since this was last emptied."""

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def size(self) -> int:
        return self._wire.size

    @property
    def flying(self) -> bool:
        return self._flight is not None and not self._flight.done()

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._deal(steps, steps if batches is None else batches, pieces)

    # ----------------------------------------------------------------------------------------------------------- exchanges

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        return await self._meeting("mean", lambda: self._mean(tree, weight, compare))

    def _mean(self, tree: Tree, weight: float, compare: bool) -> _Outcome[Mean]:
        weights, unsound = self._tell(weight, tree)
        total = float(sum(weights))
        if total == 0:
            return _Outcome(Mean(tree.zeros(), 0.0, True, not unsound), 0.0, unsound)
        whole = tree if tree.spare else tree.copy()
        products = torch.zeros(self.size, self.size, dtype=torch.float64) if compare and self._liken is not None else None
        self._wire.reduce_scatter(whole.flat, weights, inner_products=products, divide_by=total)
        self._wire.all_gather(whole.flat)
        value = self._lent(Tree(whole.layout, whole.flat))
        if products is not None and self._liken is not None:
            self._liken(DeltaSimilarity(tuple(map(tuple, products.tolist())), tuple(weights)))
        return _Outcome(Mean(value, total, True, not unsound, self._last), total, unsound)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        return await self._meeting("reduce_scatter", lambda: self._reduce_scatter(tree, weight, wide))

    def _reduce_scatter(self, tree: Tree, weight: float, wide: bool) -> _Outcome[Scattered]:
        weights, unsound = self._tell(weight, tree)
        buffer = self._buffer = Tree(tree.layout, (tree if tree.spare else tree.copy()).flat)
        sums = torch.promote_types(buffer.flat.dtype, torch.float32) if wide else None
        flat = self._wire.reduce_scatter(buffer.flat, [1.0] * self.size, sums)
        value = Tree(buffer.shard(self.rank, self.size).layout, flat)
        total = float(sum(weights))
        return _Outcome(Scattered(value, total, not unsound), total, unsound)

    def _tell(self, weight: float, tree: Tree) -> tuple[list[float], tuple[int, ...]]:
        """Everybody's weight, and whose tree is not finite."""
        told = self._wire.all_gather_numbers(weight, tree.is_finite())
        return [row[0] for row in told], tuple(rank for rank, row in enumerate(told) if not row[1])

    async def all_gather(self, shard: Tree) -> Tree:
        return await self._meeting("all_gather", lambda: _Outcome(self._lent(self._all_gather(shard))))

    def _all_gather(self, shard: Tree) -> Tree:
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.flat.dtype != shard.flat.dtype:
            flat = shard.flat
            buffer = Tree(self._layout, empty(self._layout.numel, flat.dtype, flat.device))
        mine = buffer.shard(self.rank, self.size).flat
        if mine.data_ptr() != shard.flat.data_ptr():
            mine.copy_(shard.flat)
        self._wire.all_gather(buffer.flat)
        return buffer

    async def total(self, number: float) -> float:
        return await self._meeting("total", lambda: _Outcome(float(sum(row[0] for row in self._wire.all_gather_numbers(number)))))

    def _lent(self, tree: Tree) -> Tree:
        """What an exchange made: nobody's, once the round is over."""
        self.results.append(tree)
        return tree

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> Flight[T]:
        if self.flying:
            coroutine.close()
            raise ExchangeFailed(f"rank {self.rank} has a flight open already. Await it before the next.")
        self._launching = True
        try:
            flight = self._flight = self._line.launch(coroutine)
        finally:
            self._launching = False
        return flight

    async def catch_up(self, state: S) -> S:
        """Nobody misses an exchange here: who does not come ends the run."""
        return state

    # ------------------------------------------------------------------------------------------------------------ keeping time

    def _meeting(self, what: str, call: Callable[[], _Outcome[T]]) -> Request[T]:
        """An exchange by the line, with a note of when it was asked for and when it was over."""
        arrived_s, wire = self._clock.now_s(), self._wire
        background = self._launching or threading.current_thread() is not self._here

        def timed() -> T:
            before = wire.sent_bytes, wire.control_bytes
            if self._limit is not None:
                wire.timeout_s = self._limit.start()
            outcome = call()
            end_s = self._clock.now_s()
            if self._limit is not None:
                self._limit.finish()
            sent, control = wire.sent_bytes - before[0], wire.control_bytes - before[1]
            useless = what in _UPDATES and (bool(outcome.unsound) or outcome.weight == 0)
            self._note(ExchangeRecord(what, arrived_s, end_s, sent, control, outcome.weight, background, outcome.unsound, useless))
            return outcome.result

        return Request(timed)
