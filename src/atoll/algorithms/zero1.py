"""ZeRO-1: data-parallel training whose optimizer state is cut into as many slices as there are islands.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, stage 1.

Every island adds up gradients of its own batches at the shared weights. A reduce-scatter gives each island its slice of the sum
over all; it updates that slice of the weights, with moments that nobody else holds, and an all-gather puts the weights together
again. The bytes are those of an all-reduce, and so is the outcome, within rounding: DDP at a k-th of the optimizer's memory.

    paper   N_d          P_os                    gradients                  parameters
    here    peers.size   state.optimizer         replica.gradient           state.params: this island's slice, in single precision

>>> ZeRO1(accumulation=4).steps_per_round
1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.algorithms.sharded_optimizer import Accumulating
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Peers, Replica, sharded


@dataclass(frozen=True)
class ZeRO1State:
    """All that ZeRO-1 remembers between rounds."""

    params: Tree = sharded(donated=True)
    optimizer: Any = sharded(donated=True)


@dataclass(frozen=True, kw_only=True)
class ZeRO1(Accumulating):
    """Data-parallel training with a sharded optimizer.

    Args:
        accumulation: batches whose gradients an island adds up before it talks.
    """

    def init(self, params: Tree, peers: Peers) -> ZeRO1State:
        return ZeRO1State(*self.cut(params, peers))

    async def round(self, state: ZeRO1State, replica: Replica, peers: Peers) -> ZeRO1State:
        gradient = await self.add_up(replica, peers, self.accumulation)
        reduced = await self.reduce(gradient, peers)
        if reduced is None:
            return state
        new = self.step(self.rule, state.params, state.optimizer, reduced)
        replica.load(await peers.all_gather(new.sent))
        return ZeRO1State(new.params, new.state)

    def rebase(self, state: ZeRO1State, params: Tree, peers: Peers) -> ZeRO1State:
        return replace(state, params=self.master(params))
