"""The islands of a run, seen from one process: exchanges over a wire."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from atoll.engines.dist.driving import Flight, Line, Request
from atoll.engines.dist.wire import Wire
from atoll.errors import ExchangeFailed
from atoll.protocols import Mean, Scattered, Work
from atoll.tree import Layout, Tree, empty

S = TypeVar("S")
T = TypeVar("T")


class DistPeers:
    """Processes as equals. A protocols.Peers.

    Args:
        wire: carries what is exchanged.
        line: the thread that uses it.
        deal: hands out work: steps, batches, pieces.
        layout: of the weights as a whole.
    """

    def __init__(self, wire: Wire, line: Line, deal: Callable[[int, int, int], Work], layout: Layout) -> None:
        self._wire, self._line, self._deal, self._layout = wire, line, deal, layout
        self._flight: Flight[Any] | None = None
        self._buffer: Tree | None = None
        """What was given to the last reduce-scatter: its slices lie in it, and so will what is gathered of them."""

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def size(self) -> int:
        return self._wire.size

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._deal(steps, steps if batches is None else batches, pieces)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        mean: Mean = await Request(lambda: self._mean(tree, weight))
        return mean

    def _mean(self, tree: Tree, weight: float) -> Mean:
        told = self._wire.tell(weight, tree.is_finite())
        weights, finite = [row[0] for row in told], all(row[1] for row in told)
        total = float(sum(weights))
        if total == 0:
            return Mean(tree.zeros(), 0.0, True, finite)
        whole = tree if tree.spare else tree.copy()
        mine = self._wire.scatter_sum(whole.flat, weights)
        mine /= total
        self._wire.gather(whole.flat)
        return Mean(Tree(whole.layout, whole.flat), total, True, finite)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        scattered: Scattered = await Request(lambda: self._reduce_scatter(tree, weight, wide))
        return scattered

    def _reduce_scatter(self, tree: Tree, weight: float, wide: bool) -> Scattered:
        told = self._wire.tell(weight, tree.is_finite())
        buffer = self._buffer = Tree(tree.layout, (tree if tree.spare else tree.copy()).flat)
        sums = torch.promote_types(buffer.flat.dtype, torch.float32) if wide else None
        flat = self._wire.scatter_sum(buffer.flat, [1.0] * self.size, sums)
        value = Tree(buffer.shard(self.rank, self.size).layout, flat)
        return Scattered(value, float(sum(row[0] for row in told)), all(row[1] for row in told))

    async def all_gather(self, shard: Tree) -> Tree:
        whole: Tree = await Request(lambda: self._all_gather(shard))
        return whole

    def _all_gather(self, shard: Tree) -> Tree:
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.flat.dtype != shard.flat.dtype:
            flat = shard.flat
            buffer = Tree(self._layout, empty(self._layout.numel, flat.dtype, flat.device))
        mine = buffer.shard(self.rank, self.size).flat
        if mine.data_ptr() != shard.flat.data_ptr():
            mine.copy_(shard.flat)
        self._wire.gather(buffer.flat)
        return buffer

    async def total(self, number: float) -> float:
        told: list[list[float]] = await Request(lambda: self._wire.tell(number))
        return float(sum(row[0] for row in told))

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> Flight[T]:
        if self._flight is not None and not self._flight.done():
            coroutine.close()
            raise ExchangeFailed(f"rank {self.rank} has a flight open already. Await it before the next.")
        flight = self._line.launch(coroutine)
        self._flight = flight
        return flight

    async def catch_up(self, state: S) -> S:
        """Nobody misses an exchange here: who does not come ends the run."""
        return state

