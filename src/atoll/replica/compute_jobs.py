"""What a replica is asked to compute, as a value: whoever has several of them may compute them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Weigh, Work
from atoll.replica.local_replica import LocalReplica, Trained


@dataclass(frozen=True, eq=False)
class Training:
    """Some steps of one replica."""

    replica: LocalReplica
    steps: int
    work: Work

    def __call__(self) -> tuple[None, Trained]:
        return None, self.replica.train(self.steps, self.work)

    def first_batch(self) -> Any:
        return next(self.replica.read(1, self.work))


@dataclass(frozen=True, eq=False)
class Asking:
    """A gradient of one replica; see `protocols.Replica.gradient`."""

    replica: LocalReplica
    work: Work
    at: Tree | None
    onto: Gradient | None
    weigh: Weigh
    wide: bool

    def __call__(self) -> tuple[Gradient, Trained]:
        return self.replica.gradient(self.work, at=self.at, onto=self.onto, weigh=self.weigh, wide=self.wide)

    def first_batch(self) -> Any:
        return self.replica.read_piece(self.work, self.weigh, self.at)[0]


Job = Training | Asking
