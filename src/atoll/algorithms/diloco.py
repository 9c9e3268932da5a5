"""DiLoCo: train apart for a while, then agree.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, Algorithm 1.

Each round, every island starts from the shared weights and takes `inner_steps` steps on its own data. How far it moved is its
delta. The mean of the deltas is treated as a gradient, and the outer rule takes one step along it. Islands exchange once per round,
so they send `inner_steps` times fewer bytes than data-parallel training. The inner optimizer's moments stay with the island: unless
asked otherwise, they are never averaged, sent or reset.

    paper   H             k            Δ       InnerOpt               OuterOpt   θ⁽ᵗ⁾           θᵢ⁽ᵗ⁾
    here    inner_steps   peers.size   delta   inside replica.train   outer      state.params   replica.params()
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, HasMoments, Mean, Peers, Replica, Rule, Work, own, shared
from atoll.optim.codecs import CodecName, check_feedback, encoding_of
from atoll.optim.prune import agreeing, disjoint_mean, prune
from atoll.optim.sgd import Nesterov


@dataclass(frozen=True)
class DiLoCoState:
    """All that DiLoCo remembers between rounds; saving this is saving the algorithm."""

    params: Tree = shared(donated=True)
    outer: Any = shared(donated=True)
    local: Tree | None = own()
    """This island's own weights, if it missed the last exchange: its next round starts from them."""
    unsent: Tree | None = own(donated=True)
    """What the codec has left out of this island's deltas so far."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Local training with an outer optimizer on the mean movement.

    Args:
        inner_steps: steps each island takes alone between two agreements; the paper uses 500.
        outer: the rule applied to the mean delta; the paper found Nesterov best, with these rates.
        weighting: of the deltas: all the same, or by the number of examples in the island's shard (the paper's choice where shards
            differ).
        missed: from where an island that was not heard measures its next delta: from the `global` weights of that moment, which it
            is given first (the paper's Algorithm 1, line 12, read literally), or from those it last `agreed` on.
        pruned: fraction of each delta that is set to zero before averaging, neuron by neuron.
        pruning: which values go: those against the neuron's prevailing `sign` first, or the smallest by `magnitude` alone.
        merge: how deltas become one: their `mean`, or a `disjoint` merge, the mean of those values whose sign prevails (the paper's
            appendix, after TIES). It sends three times the bytes: deltas, agreeing deltas, and votes.
        moments: the inner optimizer's moments stay each island's `own`, or are `averaged` after every round (the paper's appendix:
            no gain; with Adam it sends three times the bytes).
        codec: how deltas travel: as `fp32`, or in the short forms of `atoll.optim.codecs`.
        feedback: how much of what the codec left out is added to the island's next delta: 1 all of it, 0 none. With topk, outer SGD
            and 0.95 this is SparseLoCo (arXiv 2508.15706), whose error buffer takes the place of the outer momentum.
    """

    inner_steps: int
    outer: Rule = Nesterov(lr=0.7, momentum=0.9)
    weighting: Literal["uniform", "examples"] = "uniform"
    missed: Literal["global", "agreed"] = "global"
    pruned: float = 0.0
    pruning: Literal["sign", "magnitude"] = "sign"
    merge: Literal["mean", "disjoint"] = "mean"
    moments: Literal["own", "averaged"] = "own"
    codec: CodecName = "fp32"
    feedback: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.inner_steps < 1:
            raise ConfigError(
                f"inner_steps={self.inner_steps}: a round needs at least 1 inner step. Use 1 to agree after every step."
            )
        if not 0 <= self.pruned < 1:
            raise ConfigError(f"pruned={self.pruned} is outside [0, 1): a delta must keep something. Use 0 to prune nothing.")
        check_feedback(self.feedback)
        if self.codec != "fp32" and self.merge != "mean":
            raise ConfigError(
                f"codec={self.codec} with merge={self.merge}: votes and elected values travel as fp32. Use merge=mean."
            )

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    def init(self, params: Tree, peers: Peers) -> DiLoCoState:
        return DiLoCoState(params, self.outer.init(params))

    async def round(self, state: DiLoCoState, replica: Replica, peers: Peers) -> DiLoCoState:
        work = peers.work(self.inner_steps)
        replica.load(state.params if state.local is None else state.local)
        await replica.train(self.inner_steps, work)

        last_agreed = state.params
        state = await peers.catch_up(state)
        origin = state.params if self.missed == "global" else last_agreed
        # Old minus new, not new minus old: the outer rule subtracts its input, as it would a gradient.
        delta = self._pruned(origin - replica.params(), state.unsent)

        weight = self._weight(work)
        mean = await self._merge(delta, weight, peers, encoding_of(self.codec, work, peers))
        await self._exchange_moments(replica, weight, peers)
        if not mean.heard:
            return replace(state, local=replica.params())
        if mean.weight == 0:
            return replace(state, local=None)
        params, outer = self.outer.update(state.params, mean.value, state.outer)
        return DiLoCoState(params, outer, unsent=mean.unsent if self.feedback else None)

    def _pruned(self, delta: Tree, unsent: Tree | None) -> Tree:
        """The pruned delta, and what the codec left out of the last ones."""
        delta = prune(delta, self.pruned, self.pruning)
        return delta if unsent is None else delta.add(unsent, self.feedback)

    async def _merge(self, delta: Tree, weight: float, peers: Peers, encoding: Encoding | None) -> Mean:
        if self.merge == "mean":
            return await peers.mean(delta, weight, compare=True, encoding=encoding)
        elected = await peers.mean(delta.copy(), weight, compare=True)
        values, votes = agreeing(delta, elected.value)
        mean_value, mean_votes = await peers.mean(values, weight), await peers.mean(votes, weight)
        return elected._replace(value=disjoint_mean(mean_value.value, mean_votes.value))

    async def _exchange_moments(self, replica: Replica, weight: float, peers: Peers) -> None:
        if self.moments == "own":
            return
        if not isinstance(replica, HasMoments):
            raise ConfigError(
                "moments=averaged, but atoll cannot read this island's moments: its optimizer is yours, or its devices have an "
                "algorithm of their own. Use moments=own."
            )
        means = [await peers.mean(moment, weight) for moment in replica.moments()]
        if all(mean.heard and mean.weight for mean in means):
            replica.load_moments([mean.value for mean in means])

    @property
    def averages_once(self) -> bool:
        """Whether a round averages one tree, the delta, as a commit of an elastic run does."""
        return self.merge == "mean" and self.moments == "own"

    def _weight(self, work: Work) -> float:
        return float(work.examples) if self.weighting == "examples" else 1.0
