"""DPU: the delayed parameter update. The exchange hides behind the computing of the next gradient, which is one step late.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840, section 5.2; in the form in which ACCO's
paper (arXiv 2406.02613, section 3.1) compares itself with it.

While the islands exchange the gradients of one batch, they compute those of the next, at weights without the update of the former.

    paper   theta_t        g(theta~_t)      theta~_t+1 = theta_t
    here    state.params   state.waiting    the weights that the replica holds

An update takes max(c, m), where computing takes c and an exchange m. What it costs is staleness; some steps without delay at the
beginning, when weights move most, soften it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.algorithms.sharded_optimizer import Accumulating
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Peers, Replica, own, sharded, shared


@dataclass(frozen=True)
class DPUState:
    """All that DPU remembers between rounds."""

    params: Tree = sharded(donated=True)
    optimizer: Any = sharded(donated=True)
    steps: int = shared()
    waiting: Gradient | None = own(donated=True)
    """Of the batch that was computed during the last exchange."""


@dataclass(frozen=True, kw_only=True)
class DPU(Accumulating):
    """Delayed parameter update."""

    warmup: int = 40  # updates at the beginning without delay, as ZeRO-1 does them. ZeRO-Offload's is 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup}: it is 0 updates or more. Use 0 to delay all of them.")

    def init(self, params: Tree, peers: Peers) -> DPUState:
        return DPUState(*self.cut(params, peers), steps=0)

    async def round(self, state: DPUState, replica: Replica, peers: Peers) -> DPUState:
        waiting = state.waiting or await self.add_up(replica, peers, self.accumulation)
        if state.steps < self.warmup:
            whole, params, optimizer = await self._update(state, waiting, peers)
            fresh = None
        else:
            update = peers.background(self._update(state, waiting, peers))
            fresh = await self.add_up(replica, peers, self.accumulation)
            whole, params, optimizer = await update
        if whole is not None:
            replica.load(whole)
        return DPUState(params, optimizer, state.steps + 1, fresh)

    async def _update(self, state: DPUState, gradient: Gradient, peers: Peers) -> tuple[Tree | None, Tree, Any]:
        """The new weights, whole and in a slice, and the optimizer's state; no whole if the update was skipped."""
        reduced = await self.reduce(gradient, peers)
        if reduced is None:
            return None, state.params, state.optimizer
        new = self.step(self.rule, state.params, state.optimizer, reduced)
        return await peers.all_gather(new.sent), new.params, new.state

    def rebase(self, state: DPUState, params: Tree, peers: Peers) -> DPUState:
        return replace(state, params=self.master(params), waiting=None)
