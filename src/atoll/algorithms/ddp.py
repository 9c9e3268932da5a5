"""DDP: agree on every gradient. The baseline that all the others are measured against.

Each round every island computes the gradient of its own batches at the shared weights; the mean over islands is one step of the
optimizer, which every island takes. Islands communicate after every step, and the slowest sets the pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.memoize import once
from atoll.core.protocols import Gradient, Peers, Replica, Rule, Weigh, shared
from atoll.optim.adam import AdamW


@dataclass(frozen=True)
class DDPState:
    """All that DDP remembers between rounds."""

    params: Tree = shared(donated=True)
    optimizer: Any = shared(donated=True)


@dataclass(frozen=True, kw_only=True)
class StepsOnGradients:
    """The settings of algorithms that step with the mean of all islands' gradients.

    Args:
        optimizer: the rule applied to the mean gradient. None: the run's inner optimizer.
        clip_norm: mean gradients longer than this, as a whole, are shortened to it. None: the run's.
        weigh: what weighs the same in the mean gradient: `batches`, or `tokens`, for batches that are padded.
    """

    optimizer: Rule | None = None
    clip_norm: float | None = None
    weigh: Weigh = "batches"

    def __post_init__(self) -> None:
        check_types(self)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm}: it is more than 0. Leave it out to take train.clip_norm.")

    @property
    def steps_per_round(self) -> int:
        return 1

    @property
    def rule(self) -> Rule:
        return self.optimizer or AdamW(lr=4e-4)


@dataclass(frozen=True, kw_only=True)
class DDP(StepsOnGradients):
    """Data-parallel training.

    Args:
        accumulation: batches whose gradients an island adds up before it exchanges them.
        buckets: in the simulator: parts of the gradient, each of which is sent while the backward pass computes the next.
    """

    accumulation: int = 1
    buckets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulation(self.accumulation)
        check_buckets(self.buckets)

    def init(self, params: Tree, peers: Peers) -> DDPState:
        return DDPState(params.wide(), self.rule.init(params.wide()))

    async def round(self, state: DDPState, replica: Replica, peers: Peers) -> DDPState:
        state = await peers.catch_up(state)
        replica.load(state.params)
        total = await self._gradient(replica, peers)
        weight = total.weight if self.weigh == "tokens" else 1.0
        mean = await peers.mean(total.mean(), weight)
        if not (mean.heard and mean.finite and mean.weight):
            return state
        gradient = clip(mean.value, self.clip_norm)
        params, optimizer = self.rule.update(state.params, gradient, state.optimizer)
        return DDPState(params, optimizer)

    async def _gradient(self, replica: Replica, peers: Peers) -> Gradient:
        """Of this island's batches, added up, at the weights that its replica holds."""
        work = peers.work(1, batches=self.accumulation)
        total = await replica.gradient(work, weigh=self.weigh)
        for batch in range(1, self.accumulation):
            total = await replica.gradient(replace(work, start=work.start + batch), onto=total, weigh=self.weigh)
        return total

    def rebase(self, state: DDPState, params: Tree, peers: Peers) -> DDPState:
        return replace(state, params=params.wide())


def check_accumulation(batches: int) -> None:
    if batches < 1:
        raise ConfigError(f"accumulation={batches}: a step needs at least 1 batch. Use 1 to exchange after each.")


def check_buckets(buckets: int) -> None:
    if buckets < 1:
        raise ConfigError(f"buckets={buckets}: a gradient has at least 1 bucket. Use 1 to exchange it after the backward pass.")


def clip(gradient: Tree, norm: float | None) -> Tree:
    """The gradient in single precision at least, shortened to `norm` if it is longer."""
    return once(_clipped, gradient, norm)


def _clipped(gradient: Tree, norm: float | None) -> Tree:
    gradient = gradient.wide()
    if norm is None:
        return gradient
    length = gradient.norm()
    return gradient * (norm / (length + 1e-6)) if length > norm else gradient
