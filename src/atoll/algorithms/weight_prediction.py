"""WP: weight prediction. Like DPU, but gradients are computed where the weights are expected to be when they are applied.

Chen, Yang and Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform",
arXiv 1809.02839; in the form in which ACCO's paper (arXiv 2406.02613, section 3.1) compares itself with it.

While the islands exchange the gradients of one batch, they compute those of the next. The result gives two steps: one that counts,
and from there a second one with the same gradient, at whose weights the next gradients are computed. The second step's optimizer
state is thrown away.

    paper   theta_t+1 = Opt(theta_t, g~_t)    theta~_t+1 = Opt(theta_t+1, g~_t)
    here    state.params                      state.ahead, which the replica holds

Only the predicted weights need be whole anywhere, so an update sends what ZeRO-1 sends, and takes max(c, m).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from atoll.algorithms.sharded_optimizer import Accumulating, Overlapped
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Peers, Replica, own, sharded, shared


@dataclass(frozen=True)
class WPState:
    """All that WP remembers between rounds."""

    params: Tree = sharded(donated=True)
    optimizer: Any = sharded(donated=True)
    ahead: Tree = sharded()
    """This island's slice of the predicted weights, as it is sent."""
    steps: float = shared()
    """How far the run has come: updates, or samples in units of the nominal batch."""
    waiting: Gradient | None = own(donated=True)
    """Of the batch that was computed during the last exchange."""


class Predicted(NamedTuple):
    """The result of an update. `whole` are the weights to compute at; None if the update was skipped, and they are the old ones."""

    whole: Tree | None
    params: Tree
    optimizer: Any
    ahead: Tree
    weight: float


@dataclass(frozen=True, kw_only=True)
class WP(Accumulating, Overlapped):
    """Weight prediction. The paper accumulates until the exchange is over: `batch="free"`."""

    def init(self, params: Tree, peers: Peers) -> WPState:
        mine, optimizer = self.cut(params, peers)
        return WPState(mine, optimizer, self._unpredicted(mine), steps=0.0)

    async def round(self, state: WPState, replica: Replica, peers: Peers) -> WPState:
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
        return WPState(new.params, new.optimizer, new.ahead, steps, fresh)

    async def _update(self, state: WPState, gradient: Gradient, peers: Peers) -> Predicted:
        reduced = await self.reduce(gradient, peers)
        if reduced is None:
            return Predicted(None, state.params, state.optimizer, state.ahead, 0.0)
        rule = self.rule_at(state.steps)
        if state.steps < self.warmup:  # the next gradients are applied to these very weights
            new = self.step(rule, state.params, state.optimizer, reduced)
            ahead = new.sent
        else:
            new = self.step(rule, state.params, state.optimizer, reduced, send=False)
            ahead = self.preview(rule, new.params, new.state, reduced)
        return Predicted(await peers.all_gather(ahead), new.params, new.state, ahead, reduced.weight)

    def _unpredicted(self, params: Tree) -> Tree:
        """The weights as they are, for want of a prediction."""
        return params.copy(self.wire_dtype(params))

    def held(self, state: WPState) -> Tree:
        return state.ahead

    def rebase(self, state: WPState, params: Tree, peers: Peers) -> WPState:
        mine = self.master(params)
        return replace(state, params=mine, ahead=self._unpredicted(mine), waiting=None)
