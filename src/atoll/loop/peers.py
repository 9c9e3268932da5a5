"""The other islands, seen from a user's loop: what this one brings weighs as much as the steps that it took."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Mean, Scattered, Work
from atoll.engines.processes.communication_thread import BackgroundTask
from atoll.engines.processes.peers import ProcessPeers
from atoll.loop.nonfinite_guard import Soundness
from atoll.loop.replica import LoopReplica
from atoll.loop.uneven_inputs import Company

S = TypeVar("S")
T = TypeVar("T")


class LoopPeers:
    """Islands that may be through before others. A protocols.Peers.

    Whether this island is through is looked at when an exchange begins, not when its turn on the line comes: meanwhile the user may
    have brought gradients, which are then still to be told of.
    """

    def __init__(self, peers: ProcessPeers, company: Company, replica: LoopReplica, soundness: Soundness) -> None:
        self._peers, self._company, self._replica, self._soundness = peers, company, replica, soundness
        self.launched = False
        """Whether something was put on its way in this round."""

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def size(self) -> int:
        return self._peers.size

    def begin_round(self) -> None:
        self.launched = False
        self._peers.results.clear()

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._peers.work(steps, batches, pieces=pieces)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        self._look()
        share = self._replica.share()
        # Who exchanges gradients can leave an update out. A delta that is not finite would end in everybody's weights.
        if self._replica.form == "train" and not await self._soundness.accepts(tree):
            tree, share = tree.zeros(), 0.0
        return await self._peers.mean(tree, weight * share, compare=compare)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
        self._look()
        return await self._peers.reduce_scatter(tree, weight, wide=wide)

    async def all_gather(self, shard: Tree) -> Tree:
        return await self._peers.all_gather(shard)

    async def total(self, number: float) -> float:
        return await self._peers.total(number)

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> BackgroundTask[T]:
        self._look()
        self.launched = True
        return self._peers.background(coroutine)

    async def catch_up(self, state: S) -> S:
        return state

    def _look(self) -> None:
        if not self._peers.in_background:
            self._company.through = self._replica.through
