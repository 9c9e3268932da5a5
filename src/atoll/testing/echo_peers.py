"""One island whose peers echo its own contributions, with the buffers that a real engine would use.

It shows what memory one island needs. (The simulator runs all islands in one process and lets them share buffers.) The sum of a
reduce-scatter lies in the buffer of a donated tree, and the all-gather that follows writes into the same buffer. A background
exchange alternates with the main coroutine: whenever that computes or waits, the exchange runs until it waits.

>>> import torch
>>> peers = EchoPeers(size=4)
>>> scattered = run_alternating(peers.reduce_scatter(Tree.of({"w": torch.ones(8)}), 2.0), peers)
>>> scattered.value["w"], scattered.weight
(tensor([4., 4.]), 8.0)
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import Gradient, Mean, Scattered, Weigh, Work
from atoll.replica.local_replica import LocalReplica

S = TypeVar("S")
T = TypeVar("T")


class Yield:
    """Awaited where another coroutine may run."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class EchoBackground(Generic[T]):
    """A coroutine that alternates with the main one. Its result can be awaited once, so that no reference to it stays."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._result: list[T] = []

    def done(self) -> bool:
        return self._coroutine is None

    def turn(self) -> None:
        """Run until the coroutine waits."""
        if self._coroutine is None:
            return
        try:
            self._coroutine.send(None)
        except StopIteration as end:
            self._coroutine = None
            self._result.append(end.value)

    def __await__(self) -> Generator[None, None, T]:
        while not self.done():
            yield
        return self._result.pop()


class EchoPeers:
    """The peers of the first of `size` islands. Each contributes what this island contributes.

    In an all-gather the slices of the others are unknown here. They repeat this island's slice.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._steps = self._batches = 0
        self._background: EchoBackground[Any] | None = None
        self._layout: Layout | None = None
        """Of the last reduce-scatter, and so of the next all-gather."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self._size

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        work = Work(shard=0, start=self._batches, schedule=self._steps, examples=1, pieces=pieces)
        self._steps += steps
        self._batches += steps if batches is None else batches
        return work

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        await Yield()
        return Mean(tree.claim(), weight * self._size, heard=True)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        buffer = tree.claim(wire)
        await Yield()
        self._layout, finite = buffer.layout, buffer.is_finite()
        mine = buffer.shard(self.rank, self._size)
        if wide and mine.wide() is not mine:  # what is summed in single precision does not fit into what travelled
            return Scattered(mine.wide() * self._size, weight * self._size, finite)
        mine.flat.mul_(self._size)
        return Scattered(mine, weight * self._size, finite)

    async def all_gather(self, shard: Tree) -> Tree:
        await Yield()
        assert self._layout is not None, "all_gather before reduce_scatter"
        numel, flat = self._layout.numel, shard.flat
        if flat.untyped_storage().nbytes() == numel * flat.element_size():  # a view of the communication buffer
            whole = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), 0, (numel,), (1,))
        else:
            whole = empty(numel, flat.dtype, flat.device)
            whole[: flat.numel()].copy_(flat)
        for start in range(flat.numel(), numel, max(1, flat.numel())):
            rest = whole[start : start + flat.numel()]
            rest.copy_(whole[: rest.numel()])
        return Tree(self._layout, whole)

    async def total(self, number: float) -> float:
        await Yield()
        return number * self._size

    async def catch_up(self, state: S) -> S:
        return state

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> EchoBackground[T]:
        if self._background is not None and not self._background.done():
            coroutine.close()
            raise ExchangeFailed("a background exchange is open already. Await it before the next.")
        self._background = exchange = EchoBackground(coroutine)
        exchange.turn()
        return exchange

    def turn(self) -> None:
        """Called whenever the main coroutine waits."""
        if self._background is not None:
            self._background.turn()


class EchoReplica:
    """The island's model. The background exchange runs before and after each computation, so that both are in progress at once."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica = replica

    def load(self, params: Tree) -> None:
        self.replica.load(params)

    def params(self) -> Tree:
        return self.replica.borrowed()

    async def train(self, steps: int, work: Work) -> None:
        await Yield()
        self.replica.train(steps, work)
        await Yield()

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        await Yield()
        gradient, _ = self.replica.gradient(work, at=at, onto=onto, weigh=weigh, wide=wide)
        await Yield()
        return gradient


def run_alternating(coroutine: Coroutine[Any, Any, T], peers: EchoPeers, waits: Callable[[], None] | None = None) -> T:
    """Run a coroutine to its end, alternating with its background exchange. `waits` is called whenever either waits."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        for turn in (waits, peers.turn, waits):
            if turn is not None:
                turn()
