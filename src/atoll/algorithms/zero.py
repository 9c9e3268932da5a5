"""ZeRO: data-parallel training whose state is cut into as many slices as there are islands.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.

**ZeRO-1** (stage 1). Every island adds up gradients of its own batches at the shared weights. A reduce-scatter gives each island
its slice of the sum over all islands. The island updates that slice of the weights, with moments that no other island holds, and
an all-gather puts the weights together again. The bytes are those of an all-reduce, and so is the outcome, within rounding: DDP
at a k-th of the optimizer's memory.

**FSDP** (stage 3). As ZeRO-1, but each island also keeps only its slice of the weights. They are gathered for every forward pass
and once more for every backward pass, and dropped in between: half as many bytes again, for a k-th of the memory of everything.
The outcome is ZeRO-1's, to the bit. The simulator takes time and bytes from this text, while its replicas keep their weights.
Between the devices of a real island torch's own `fully_shard` does it, module by module.

    paper   N_d          P_os              gradients          parameters                                    P_os+g+p
    here    peers.size   state.optimizer   replica.gradient   state.params: this island's slice, in fp32    FSDP: the State alone
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.algorithms.ddp import check_buckets
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
        buckets: in the simulator: parts of the gradient, each of which is reduced while the backward pass computes the next.
    """

    buckets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_buckets(self.buckets)

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


@dataclass(frozen=True, kw_only=True)
class FSDP(ZeRO1):
    """Data-parallel training with sharded weights, gradients and optimizer."""

    async def round(self, state: ZeRO1State, replica: Replica, peers: Peers) -> ZeRO1State:
        # Each batch gathers twice; the round's last gathering, of the new weights, is the next one's first forward pass.
        for _ in range(2 * self.accumulation - 1):
            await peers.all_gather(self.on_wire(state.params))
        return await super().round(state, replica, peers)
