"""Fully sharded data-parallel training: nobody keeps the whole of the weights, either.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, stage 3.

As ZeRO-1, but weights are put together anew for every forward pass and once more for every backward pass, and forgotten in
between: half as many bytes again, for a k-th of the memory of everything. The outcome is ZeRO-1's, to the bit.

    paper   P_os+g+p                                    forward and backward all-gather    reduce-scatter of gradients
    here    state: this island's slice of everything    peers.all_gather                   peers.reduce_scatter

In the simulator this text gives the time and the bytes; its replicas keep their weights, as their memory is not what is simulated.
Between the devices of a real island it is torch's own `fully_shard` that does it, module by module.

>>> FSDP().steps_per_round
1
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.algorithms.zero1 import ZeRO1, ZeRO1State
from atoll.core.protocols import Peers, Replica


@dataclass(frozen=True, kw_only=True)
class FSDP(ZeRO1):
    """Data-parallel training with sharded weights, gradients and optimizer.

    Args:
        accumulation: batches whose gradients an island adds up before it hands on their sum.
    """

    async def round(self, state: ZeRO1State, replica: Replica, peers: Peers) -> ZeRO1State:
        # Each batch gathers twice; the round's last gathering, of the new weights, is the next one's first forward pass.
        for _ in range(2 * self.accumulation - 1):
            await peers.all_gather(self.on_wire(state.params))
        return await super().round(state, replica, peers)
