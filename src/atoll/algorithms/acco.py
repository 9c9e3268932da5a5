"""ACCO: accumulate while you communicate. The exchange of one half of a batch hides behind the computing of the other.

Nabli, Fournier, Erbacher, Serrano, Belilovsky and Oyallon, "ACCO: Accumulate While You Communicate for Communication-Overlapped
Sharded LLM Training", arXiv 2406.02613.

A batch has two halves. Islands exchange the gradients of the first half (reduce-scatter, a sharded step, all-gather) while they
compute those of the second: the result is an estimate of the next weights, from half a batch. Then they exchange both halves
together, which gives the next weights themselves, while they compute the first half of the next batch at the estimate. Estimate
and commit start from the same weights and the same optimizer state; the estimate's new state is thrown away as it is made.

    paper   theta_t        theta~_t+1   s_t               g~_t, N~_t     g_t + g~_t, N_t + N~_t    Opt
    here    state.params   `estimate`   state.optimizer   state.first    `both`                    self.rule

A gradient is a sum with its weight, which is summed over islands too, so every micro-batch weighs the same on every island.
With `batch="free"` an island computes further micro-batches until its exchange is over: a fast one contributes more, and
none is idle. Per update it sends twice what ZeRO-1 sends. With a fixed batch an update takes max(c, 2m), where computing takes c
and an exchange m, and ZeRO-1 takes c + m: ACCO pays while the exchange is the shorter of the two. DiLoCo is for longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from atoll.algorithms.sharded_optimizer import Overlapped
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Peers, PendingExchange, Replica, own, sharded, shared


@dataclass(frozen=True)
class ACCOState:
    """All that ACCO remembers between rounds. A round ends with a commit."""

    params: Tree = sharded(donated=True)
    optimizer: Any = sharded(donated=True)
    steps: float = shared()
    """How far the run has come: commits, or samples in units of the nominal batch."""
    committed: float = shared()
    """Weight of all gradients in commits so far: micro-batches, or tokens."""
    first: Gradient | None = own(donated=True)
    """The first half of the next batch, computed during the exchange of the last commit."""
    dropped: float = own(0.0)
    """Weight of this island's gradients that went into no commit."""


class Committed(NamedTuple):
    """The result of a commit: the new weights, whole and as a slice. At a weight of 0 they are the old ones."""

    whole: Tree
    params: Tree
    optimizer: Any
    weight: float


@dataclass(frozen=True, kw_only=True)
class ACCO(Overlapped):
    """Accumulate while you communicate. With a fixed batch each island computes exactly one batch per commit.

    Args:
        pieces_per_half: micro-batches in half a batch: a batch is cut into twice as many pieces, whose gradients are added up.
    """

    pieces_per_half: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pieces_per_half < 1:
            raise ConfigError(f"pieces_per_half={self.pieces_per_half}: half a batch has at least 1 micro-batch. Use 1 or more.")

    def init(self, params: Tree, peers: Peers) -> ACCOState:
        return ACCOState(*self.cut(params, peers), steps=0.0, committed=0.0)

    async def round(self, state: ACCOState, replica: Replica, peers: Peers) -> ACCOState:
        if state.steps < self.warmup:
            both = await self.add_up(replica, peers, self.pieces, pieces=self.pieces)
            return self._after(state, await self._commit(state, both, peers), both, None, replica, peers)

        first = state.first or await self._half(replica, peers)
        estimate = peers.background(self._estimate(state, first, peers))
        both = await self._half(replica, peers, onto=first, until=estimate)
        await self._load(replica, estimate)

        commit = peers.background(self._commit(state, both, peers))
        first = await self._half(replica, peers, until=commit)
        return self._after(state, await commit, both, first, replica, peers)

    async def _half(
        self, replica: Replica, peers: Peers, *, onto: Gradient | None = None, until: PendingExchange[Any] | None = None
    ) -> Gradient:
        """Half a batch; where batches are free, as much more as there is time for until the exchange is over."""
        return await self.accumulate(replica, peers, self.pieces_per_half, pieces=self.pieces, onto=onto, until=until)

    async def _estimate(self, state: ACCOState, first: Gradient, peers: Peers) -> Tree | None:
        """The weights that the first half alone would lead to; none if its gradients are of no use."""
        reduced = await self.reduce(first, peers, keep=True)  # the second half is added to it meanwhile
        if reduced is None:
            return None
        return await peers.all_gather(self.preview(self.rule_at(state.steps), state.params, state.optimizer, reduced))

    async def _load(self, replica: Replica, estimate: PendingExchange[Tree | None]) -> None:
        """Compute at the estimate from now on, if there is one."""
        weights = await estimate
        if weights is not None:
            replica.load(weights)

    async def _commit(self, state: ACCOState, both: Gradient, peers: Peers) -> Committed:
        """The weights that both halves lead to, from those that the estimate started from too."""
        reduced = await self.reduce(both, peers)
        if reduced is None:  # the replica may hold an estimate, which nothing confirms: back to the weights before it
            return Committed(await peers.all_gather(self.on_wire(state.params)), state.params, state.optimizer, 0.0)
        new = self.step(self.rule_at(state.steps), state.params, state.optimizer, reduced)
        return Committed(await peers.all_gather(new.sent), new.params, new.state, reduced.weight)

    def _after(
        self, state: ACCOState, new: Committed, both: Gradient, first: Gradient | None, replica: Replica, peers: Peers
    ) -> ACCOState:
        """The State after a commit."""
        replica.load(new.whole)
        return ACCOState(
            params=new.params,
            optimizer=new.optimizer,
            steps=self.tick(state.steps, new.weight, peers.size * self.pieces),
            committed=state.committed + new.weight,
            first=first,
            dropped=state.dropped + (0.0 if new.weight else both.weight),
        )

    def rebase(self, state: ACCOState, params: Tree, peers: Peers) -> ACCOState:
        """The first half that waits was computed at other weights: it is dropped, and counted."""
        waiting = state.first.weight if state.first else 0.0
        return replace(state, params=self.master(params), first=None, dropped=state.dropped + waiting)

    @property
    def pieces(self) -> int:
        """Into how many a batch is cut."""
        return 2 * self.pieces_per_half
