"""A replica in a process of its own: computing takes the time it takes."""

from __future__ import annotations

from atoll.engines.local import LocalReplica
from atoll.protocols import Gradient, Weigh, Work
from atoll.tree import Tree


class DistReplica:
    """This island's model. A protocols.Replica."""

    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica

    def load(self, params: Tree) -> None:
        self._replica.load(params)

    def params(self) -> Tree:
        return self._replica.params()

    async def train(self, steps: int, work: Work) -> None:
        self._replica.train(steps, work)

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        return self._replica.gradient(work, at=at, onto=onto, weigh=weigh, wide=wide)[0]
