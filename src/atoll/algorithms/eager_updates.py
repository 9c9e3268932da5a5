"""Eager updates (experimental): an island takes its outer step at once; the others' part of the mean is one round old.

Kale et al., "Eager updates for overlapped communication and computation in DiLoCo", arXiv 2502.12996.

The deltas of a round travel during all of the next one, so an exchange may take as long as a round, and islands never wait for it.
Until it is over, an island does not know the mean. It steps along a guess, with its own delta of this round and the others' deltas
of the round before,

    guess = delta(t) / k + (mean(t-1) - delta(t-1) / k)

where k is the number of islands in the newest mean at the time of each delta. So islands begin their rounds with different
weights. The global weights follow the means, one round behind.

The guesses of an island that sends every delta telescope: its weights are those of all means so far, and a share of its own last
delta. An island that joins, or that missed a mean, begins again from there: with the global weights and its share.

    paper   H             M            Delta_m   Delta        OuterOpt
    here    inner_steps   peers.size   delta     late.value   outer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Peers, Replica, Rule, own, shared
from atoll.optim.sgd import Nesterov


@dataclass(frozen=True)
class EagerState:
    """All that the algorithm remembers between rounds."""

    params: Tree = shared()
    """The global weights: initial ones plus the outer steps of all means so far. The mean of the last round is not in them yet."""
    outer: Any = shared()
    begin: Tree | None = own()
    """The weights that this island begins its next round with; None: the global ones."""
    momentum: Any = own()
    """The outer rule's state after the steps that led to `begin`."""
    delta: Tree | None = own()
    """This island's delta of its last round, which it sends at the start of the next one; None: it has none to send."""
    share: float = own(0.0)
    """The part of `delta` that is in `begin`."""


@dataclass(frozen=True, kw_only=True)
class Eager:
    """DiLoCo whose deltas travel during the next round.

    Args:
        inner_steps: steps of a round.
        outer: the rule applied to the mean delta, and to an island's guess of it. The paper finds lower rates better than DiLoCo's.
    """

    inner_steps: int
    outer: Rule = Nesterov(lr=0.4, momentum=0.9)

    def __post_init__(self) -> None:
        check_types(self)
        if self.inner_steps < 1:
            raise ConfigError(
                f"inner_steps={self.inner_steps}: a round needs at least 1 inner step. Use 1 to step after every one."
            )

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    @property
    def averages_once(self) -> bool:
        """No commit of an elastic run could have the delta of its round: the round exchanges the one before."""
        return False

    def init(self, params: Tree, peers: Peers) -> EagerState:
        return EagerState(params, self.outer.init(params))

    async def round(self, state: EagerState, replica: Replica, peers: Peers) -> EagerState:
        work = peers.work(self.inner_steps)
        state = await peers.catch_up(state)
        # An island without a delta, before its second round, sends one of weight 0: all islands exchange in every round.
        first, last = state.delta is None, state.params.zeros() if state.delta is None else state.delta
        flight = peers.background(peers.mean(last.copy(), 0.0 if first else 1.0, compare=True))

        begin = state.params if state.begin is None else state.begin
        replica.load(begin)
        await replica.train(self.inner_steps, work)
        delta = (state.params if first else begin) - replica.params()

        late = await flight
        if not late.heard:  # the island trains on with its own weights; the others never get its last delta
            return replace(state, begin=replica.params(), momentum=None, delta=None)
        if not (first or late.weight):  # an island's last delta was not finite, and neither are the weights that it led to
            return replace(state, begin=None, momentum=None, delta=None)
        share = 1 / (late.weight + first if late.weight else peers.size)
        params, outer = self.outer.update(state.params, late.value, state.outer) if late.weight else (state.params, state.outer)
        if first:
            begin, momentum = self.outer.update(params, delta * share, outer)
        else:
            guess = late.value.add(delta, share).add_(last, -state.share)
            begin, momentum = self.outer.update(begin, guess, state.momentum)
        return EagerState(params, outer, begin, momentum, delta, share)
