"""DDP: agree on every gradient. The baseline that all the others are measured against.

Each round every island computes the gradient of its own batches at the shared weights; the mean over islands is one step of the
optimizer, taken by everybody alike. Islands talk after every step, and the slowest sets the pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.checks import check_types
from atoll.errors import ConfigError
from atoll.optim.adam import AdamW
from atoll.protocols import Gradient, Peers, Replica, Rule, Work, shared
from atoll.tree import Tree


@dataclass(frozen=True)
class DDPState:
    """All that DDP remembers between rounds."""

    params: Tree = shared()
    optimizer: Any = shared()


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Data-parallel training.

    Args:
        optimizer: the rule applied to the mean gradient. None: the run's inner optimizer.
        accumulation: batches whose gradients an island adds up before it talks.
        clip_norm: mean gradients longer than this are shortened to it. None: the run's.
    """

    optimizer: Rule | None = None
    accumulation: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.accumulation < 1:
            raise ConfigError(f"accumulation={self.accumulation}: a step needs at least 1 batch. Use 1 to talk after each.")

    @property
    def steps_per_round(self) -> int:
        return 1

    @property
    def rule(self) -> Rule:
        return self.optimizer or AdamW(lr=4e-4)

    def init(self, params: Tree, peers: Peers) -> DDPState:
        return DDPState(params, self.rule.init(params))

    async def round(self, state: DDPState, replica: Replica, peers: Peers) -> DDPState:
        state = await peers.catch_up(state)
        work = peers.work(1, batches=self.accumulation)
        total = await accumulated(replica, state.params, work, self.accumulation)
        mean = await peers.mean(total.sum.give() / total.batches)
        if not mean.heard:
            return state
        params, optimizer = self.rule.update(state.params, clip(mean.value, self.clip_norm), state.optimizer)
        return DDPState(params, optimizer)


async def accumulated(replica: Replica, at: Tree, work: Work, batches: int) -> Gradient:
    """The gradients of so many batches at these weights, added up."""
    total: Gradient | None = None
    for batch in range(batches):
        total = await replica.gradient(at, replace(work, start=work.start + batch), onto=total)
    assert total is not None
    return total


def clip(gradient: Tree, norm: float | None) -> Tree:
    """The gradient, shortened to `norm` if it is longer."""
    if norm is None:
        return gradient
    length = gradient.norm()
    return gradient * (norm / (length + 1e-6)) if length > norm else gradient
