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

from atoll.core.config.type_checks import Seconds, check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, HasMoments, Mean, Peers, Replica, Rule, Work, own, shared
from atoll.optim.codecs import CodecName, check_feedback, encoding_of
from atoll.optim.prune import agreeing, disjoint_mean, prune
from atoll.optim.sgd import Nesterov

_FIRST_MOMENTS = {"exp_avg", "momentum_buffer"}
"""Not grad_avg of a centered RMSprop, which subtracts its square from square_avg: apart, the difference could be negative."""


@dataclass(frozen=True)
class DiLoCoState:
    """All that DiLoCo remembers between rounds; saving this is saving the algorithm."""

    params: Tree = shared(donated=True)
    outer: Any = shared(donated=True)
    local: Tree | None = own()
    """This island's own weights, if it missed the last exchange: its next round starts from them."""
    unsent: Tree | None = own(donated=True, residual=True)
    """The error buffer: what the codec has left out of this island's deltas so far, each times its weight. So an island owes the
    mean the same, whatever the weight of its next delta."""
    tokens: int = own(0)
    """What this island has trained on since its last delta that was heard."""
    late: bool = own(False)
    """Whether the last exchange was over before this island came: it has a delta to send, and does not train before it has."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Local training with an outer optimizer on the mean movement.

    Args:
        inner_steps: steps each island takes alone between two agreements; the paper uses 500.
        outer: the rule applied to the mean delta; the paper found Nesterov best, with these rates.
        weighting: of the deltas in their mean: `uniform`, by the `examples` in the island's shard (the paper's choice where shards
            differ), or by the `tokens` that the island has trained on for its delta.
        missed: from where an island that was not heard measures its next delta: from the `global` weights of that moment, which it
            is given first (the paper's Algorithm 1, line 12, read literally), or from those it last `agreed` on.
        pruned: fraction of each delta that is set to zero before averaging, neuron by neuron.
        pruning: which values go: those against the neuron's prevailing `sign` first, or the smallest by `magnitude` alone.
        merge: how deltas become one: their `mean`, or a `disjoint` merge, the mean of those values whose sign prevails (the paper's
            appendix, after TIES). It sends three times the bytes: deltas, agreeing deltas, and votes.
        moments: the inner optimizer's moments stay each island's `own`, or are `averaged` (the paper's appendix: no gain; after
            every round and with Adam it sends three times the bytes).
        moment_rounds: rounds between two averages of the first moments (exp_avg and momentum_buffer), and of all others. (3, 6) are
            the clocks of DES-LOC (arXiv 2505.22549), with which Adam sends 1.5 times the bytes of a run without averaged moments.
        quorum: a round ends when so many islands have trained and sent their deltas; none: all of them.
        grace_s: how long a quorum waits for further deltas.
        late: what becomes of the delta of an island that came later: it is `carried` into the round that is open then, or
            `dropped`. Either way the island goes on from the weights of that round.
        codec: how deltas travel, by `atoll.optim.codecs`: as `fp32`, `bf16`, `bf16-stochastic`, `int8`, `int4`, `fp4`, `int2` or
            `topk`.
        feedback: how much of what the codec left out is added to the island's next delta: 1 all of it, 0 none. With topk, outer SGD
            and 0.95 this is SparseLoCo (arXiv 2508.15706), whose error buffer takes the place of the outer momentum.
    """

    inner_steps: int
    outer: Rule = Nesterov(lr=0.7, momentum=0.9)
    weighting: Literal["uniform", "examples", "tokens"] = "uniform"
    missed: Literal["global", "agreed"] = "global"
    pruned: float = 0.0
    pruning: Literal["sign", "magnitude"] = "sign"
    merge: Literal["mean", "disjoint"] = "mean"
    moments: Literal["own", "averaged"] = "own"
    moment_rounds: tuple[int, int] = (1, 1)
    quorum: int | None = None
    grace_s: Seconds = 0.0
    late: Literal["carried", "dropped"] = "carried"
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
        if min(self.moment_rounds) < 1:
            raise ConfigError(
                f"moment_rounds={self.moment_rounds}: moments are averaged every round or more rarely. Use 1 or more."
            )
        self._check_quorum()
        if self.codec != "fp32" and self.merge != "mean":
            raise ConfigError(
                f"codec={self.codec} with merge={self.merge}: votes and elected values travel as fp32. Use merge=mean."
            )

    def _check_quorum(self) -> None:
        if self.quorum is not None and self.quorum < 1:
            raise ConfigError(
                f"quorum={self.quorum}: a round needs at least 1 delta. Use 1 or more, or none to wait for all islands."
            )
        if self.grace_s < 0:
            raise ConfigError(f"grace_s={self.grace_s}: it is 0 seconds or more. Use 0 to wait for the quorum alone.")
        if self.quorum is None and self.grace_s:
            raise ConfigError(f"grace_s={self.grace_s} without a quorum, which waits for all islands anyway. Set quorum, or use 0.")
        if self.quorum is not None and self.merge != "mean":
            raise ConfigError(
                f"quorum={self.quorum} with merge={self.merge}: its three means would have three quorums. Use merge=mean."
            )

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    def init(self, params: Tree, peers: Peers) -> DiLoCoState:
        return DiLoCoState(params, self.outer.init(params))

    async def round(self, state: DiLoCoState, replica: Replica, peers: Peers) -> DiLoCoState:
        steps = 0 if state.late else self.inner_steps  # a late island has trained already, and has still to send its delta
        work = peers.work(steps)
        replica.load(state.params if state.local is None else state.local)
        tokens = state.tokens + (await replica.train(steps, work) if steps else 0)

        last_agreed = state.params
        state = await peers.catch_up(state)
        origin = state.params if self.missed == "global" else last_agreed
        weight = self._weight(state, work, tokens)
        # Old minus new, not new minus old: the outer rule subtracts its input, as it would a gradient.
        delta = self._pruned(origin - replica.params(), state.unsent, weight)

        mean = await self._merge(delta, weight, peers, encoding_of(self.codec, work, peers))
        if not mean.late:
            await self._exchange_moments(replica, work, weight, peers)
        if not mean.heard:
            return self._unheard(state, replica, tokens, late=mean.late)
        if mean.weight == 0:
            return replace(state, local=None, tokens=0, late=False)
        params, outer = self.outer.update(state.params, mean.value, state.outer)
        unsent = state.unsent if mean.unsent is None else mean.unsent
        return DiLoCoState(params, outer, unsent=unsent if self.feedback else None)

    def _pruned(self, delta: Tree, unsent: Tree | None, weight: float) -> Tree:
        """The pruned delta and, at its weight, the error buffer, which a delta of bf16 would round."""
        delta = prune(delta, self.pruned, self.pruning)
        return delta if unsent is None or weight == 0 else delta.wide().add_(unsent, self.feedback / weight)

    async def _merge(self, delta: Tree, weight: float, peers: Peers, encoding: Encoding | None) -> Mean:
        if self.merge == "mean":
            return await peers.mean(delta, weight, compare=True, encoding=encoding)
        elected = await peers.mean(delta.copy(), weight, compare=True)
        values, votes = agreeing(delta, elected.value)
        mean_value, mean_votes = await peers.mean(values, weight), await peers.mean(votes, weight)
        return elected._replace(value=disjoint_mean(mean_value.value, mean_votes.value))

    def _unheard(self, state: DiLoCoState, replica: Replica, tokens: int, *, late: bool) -> DiLoCoState:
        """The others went on without this island's delta."""
        if late and self.late == "dropped":
            return replace(state, local=None, tokens=0, late=True)
        return replace(state, local=replica.params(), tokens=tokens, late=late)

    async def _exchange_moments(self, replica: Replica, work: Work, weight: float, peers: Peers) -> None:
        number = work.schedule // self.inner_steps + 1
        if self.moments == "own" or all(number % rounds for rounds in self.moment_rounds):
            return
        if not isinstance(replica, HasMoments):
            raise ConfigError(
                "moments=averaged, but atoll cannot read this island's moments: its optimizer is yours, or its devices have an "
                "algorithm of their own. Use moments=own."
            )
        moments = replica.moments()
        due = [name for name in moments if number % self.moment_rounds[name not in _FIRST_MOMENTS] == 0]
        means = {name: await peers.mean(moments[name], weight) for name in due}
        if all(mean.heard and mean.weight for mean in means.values()):
            replica.load_moments(moments | {name: mean.value for name, mean in means.items()})

    @property
    def averages_once(self) -> bool:
        """Whether a round averages one tree, its delta, as a commit of an elastic run does."""
        return self.merge == "mean" and self.moments == "own"

    def _weight(self, state: DiLoCoState, work: Work, tokens: int) -> float:
        if state.late and self.late == "dropped":
            return 0.0
        return float({"uniform": 1, "examples": work.examples, "tokens": tokens}[self.weighting])
