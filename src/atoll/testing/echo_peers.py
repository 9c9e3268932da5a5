"""One island alone in its process, whose peers are echoes of itself, and which holds its buffers as a real engine would have it.

For whoever wants to know what one island holds: the simulator has all of them in one process, and lets them share. Here a
reduce-scatter of a tree that was given takes place in it, and the all-gather that follows writes into the same buffer. A flight
takes turns with the main coroutine: whenever that computes or waits, the flight goes on to its next exchange.

>>> import torch
>>> peers = EchoPeers(size=4)
>>> scattered = take_turns(peers.reduce_scatter(Tree.of({"w": torch.ones(8)}), 2.0), peers)
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
from atoll.optim.in_place import take as taken
from atoll.replica.local_replica import LocalReplica

S = TypeVar("S")
T = TypeVar("T")


class Turn:
    """Awaited where others may go on."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class EchoFlight(Generic[T]):
    """A coroutine that goes on in turns with the main one. Its result can be had once, and is then nobody's but the asker's."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._result: list[T] = []

    def done(self) -> bool:
        return self._coroutine is None

    def turn(self) -> None:
        """Go on to the next exchange."""
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
    """The islands of a round, seen from the first of them; all the others bring what it brings.

    Of weights that are gathered they hold other slices than this island, which it cannot know: they echo its own, again and again.

    Args:
        size: how many islands there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._steps = self._batches = 0
        self._flight: EchoFlight[Any] | None = None
        self._layout: Layout | None = None
        """Of what was scattered last, and so of what is gathered next."""

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
        await Turn()
        value = taken(tree) if tree.spare else tree.copy()
        return Mean(value, weight * self._size, heard=True)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        await Turn()
        self._layout, finite = tree.layout, tree.is_finite()
        buffer = taken(tree) if tree.spare else tree.copy()
        mine = buffer.shard(self.rank, self._size)
        if wide and mine.wide() is not mine:  # what is summed in single precision does not fit into what travelled
            return Scattered(mine.wide() * self._size, weight * self._size, finite)
        mine.flat.mul_(self._size)
        return Scattered(mine, weight * self._size, finite)

    async def all_gather(self, shard: Tree) -> Tree:
        await Turn()
        assert self._layout is not None, "a reduce-scatter comes first"
        numel, flat = self._layout.numel, shard.flat
        if flat.untyped_storage().nbytes() == numel * flat.element_size():  # it is a window on the communication buffer
            whole = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), 0, (numel,), (1,))
        else:
            whole = empty(numel, flat.dtype, flat.device)
            whole[: flat.numel()].copy_(flat)
        for start in range(flat.numel(), numel, max(1, flat.numel())):
            rest = whole[start : start + flat.numel()]
            rest.copy_(whole[: rest.numel()])
        return Tree(self._layout, whole)

    async def total(self, number: float) -> float:
        await Turn()
        return number * self._size

    async def catch_up(self, state: S) -> S:
        return state

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> EchoFlight[T]:
        if self._flight is not None and not self._flight.done():
            coroutine.close()
            raise ExchangeFailed("a flight is open already. Await it before the next.")
        self._flight = flight = EchoFlight(coroutine)
        flight.turn()
        return flight

    def turn(self) -> None:
        """Whoever drives the main coroutine calls it whenever that waits."""
        if self._flight is not None:
            self._flight.turn()


class EchoReplica:
    """The island's model. Before and after each computing the flight has a turn, so that it is under way meanwhile."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica = replica

    def load(self, params: Tree) -> None:
        self.replica.load(params)

    def params(self) -> Tree:
        return self.replica.params()

    async def train(self, steps: int, work: Work) -> None:
        await Turn()
        self.replica.train(steps, work)
        await Turn()

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        await Turn()
        gradient, _ = self.replica.gradient(work, at=at, onto=onto, weigh=weigh, wide=wide)
        await Turn()
        return gradient


def take_turns(coroutine: Coroutine[Any, Any, T], peers: EchoPeers, waits: Callable[[], None] | None = None) -> T:
    """Runs a coroutine to its end; whenever it waits, its flight has a turn. `waits` is called whenever either has come to wait."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        for turn in (waits, peers.turn, waits):
            if turn is not None:
                turn()
