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
from typing import Any, NamedTuple

from atoll.algorithms.sharded_optimizer import Accumulating, Overlapped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Peers, Replica, own, sharded, shared


@dataclass(frozen=True)
class DPUState:
    """All that DPU remembers between rounds."""

    params: Tree = sharded(donated=True)
    optimizer: Any = sharded(donated=True)
    steps: float = shared()
    """How far the run has come: updates, or samples in units of the nominal batch."""
    waiting: Gradient | None = own(donated=True)
    """Of the batch that was computed during the last exchange."""


class Updated(NamedTuple):
    """The result of an update: the new weights, whole and as a slice. Of a skipped one: no whole, and a weight of 0."""

    whole: Tree | None
    params: Tree
    optimizer: Any
    weight: float


@dataclass(frozen=True, kw_only=True)
class DPU(Accumulating, Overlapped):
    """Delayed parameter update. The paper accumulates until the exchange is over: `batch="free"`.

    Args:
        warmup: updates at the beginning without delay, as ZeRO-1 does them. ZeRO-Offload's is 40.
    """

    warmup: int = 40

    def init(self, params: Tree, peers: Peers) -> DPUState:
        return DPUState(*self.cut(params, peers), steps=0.0)

    async def round(self, state: DPUState, replica: Replica, peers: Peers) -> DPUState:
        waiting = state.waiting or await self.add_up(replica, peers, self.accumulation)
        if state.steps < self.warmup:
            new, fresh = await self._update(state, waiting, peers), None
        else:
            update = peers.background(self._update(state, waiting, peers))
            fresh = await self.accumulate(replica, peers, self.accumulation, until=update)
            new = await update
        if new.whole is not None:
            replica.load(new.whole)
        steps = self.tick(state.steps, new.weight, peers.size * self.accumulation)
        return DPUState(new.params, new.optimizer, steps, fresh)

    async def _update(self, state: DPUState, gradient: Gradient, peers: Peers) -> Updated:
        reduced = await self.reduce(gradient, peers)
        if reduced is None:
            return Updated(None, state.params, state.optimizer, 0.0)
        new = self.step(self.rule_at(state.steps), state.params, state.optimizer, reduced)
        return Updated(await peers.all_gather(new.sent), new.params, new.state, reduced.weight)

    def rebase(self, state: DPUState, params: Tree, peers: Peers) -> DPUState:
        return replace(state, params=self.master(params), waiting=None)
