"""ZeRO-1: data-parallel training whose optimizer state is cut into as many slices as there are islands.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, stage 1.

Every island adds up gradients of its own batches at the shared weights. A reduce-scatter gives each island its slice of the sum
over all; it updates that slice of the weights, with moments that nobody else holds, and an all-gather puts the weights together
again. The bytes are those of an all-reduce, and so is the outcome, within rounding: DDP at a k-th of the optimizer's memory.

    paper   N_d          P_os                    gradients                  parameters
    here    peers.size   state.optimizer         replica.gradient           state.params; state.slice is this island's

>>> ZeRO1(accumulation=4).steps_per_round
1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from atoll.algorithms.ddp import accumulated
from atoll.checks import check_types
from atoll.errors import ConfigError
from atoll.optim.adam import AdamW
from atoll.protocols import Peers, Replica, Rule, sharded, shared
from atoll.tree import Tree


@dataclass(frozen=True)
class ZeRO1State:
    """All that ZeRO-1 remembers between rounds."""

    params: Tree = shared()
    slice: Tree = sharded()
    """This island's part of the weights, from which the whole is put together."""
    optimizer: Any = sharded()


@dataclass(frozen=True, kw_only=True)
class ZeRO1:
    """Data-parallel training with a sharded optimizer.

    Args:
        optimizer: the rule applied to the mean gradient, elementwise. None: the run's inner optimizer.
        accumulation: batches whose gradients an island adds up before it talks.
        clip_norm: mean gradients longer than this, as a whole, are shortened to it. None: the run's.
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

    def init(self, params: Tree, peers: Peers) -> ZeRO1State:
        mine = params.shard(peers.rank, peers.size).copy()
        return ZeRO1State(params, mine, self.rule.init(mine))

    async def round(self, state: ZeRO1State, replica: Replica, peers: Peers) -> ZeRO1State:
        work = peers.work(1, batches=self.accumulation)
        total = await accumulated(replica, state.params, work, self.accumulation)
        summed = await peers.reduce_scatter(total.sum.give(), weight=total.batches)
        gradient = await clip_slice(summed.value / summed.weight, self.clip_norm, peers)
        mine, optimizer = self.rule.update(state.slice, gradient, state.optimizer)
        return ZeRO1State(await peers.all_gather(mine), mine, optimizer)


async def clip_slice(gradient: Tree, norm: float | None, peers: Peers) -> Tree:
    """This island's slice of a gradient, shortened so that the whole is no longer than `norm`."""
    if norm is None:
        return gradient
    length = math.sqrt(await peers.total(gradient.dot(gradient)))
    return gradient * (norm / (length + 1e-6)) if length > norm else gradient
