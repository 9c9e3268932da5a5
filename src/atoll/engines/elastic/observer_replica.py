"""A replica without work: an island that has just come takes part in a round by listening."""

from __future__ import annotations

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Weigh, Work


class IdleReplica:
    """Holds weights, and does nothing to them. A protocols.Replica."""

    def __init__(self, params: Tree) -> None:
        self._params = params

    def load(self, params: Tree) -> None:
        self._params = params

    def params(self) -> Tree:
        return self._params.copy()

    async def train(self, steps: int, work: Work) -> None:
        pass

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        return onto if onto is not None else Gradient(self._params.zeros(), 0.0, 0)
