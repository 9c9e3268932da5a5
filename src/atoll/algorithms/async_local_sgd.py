"""Asynchronous Local-SGD: no worker waits for the slowest. docs/async_local_sgd.md describes it.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135.

Every worker trains from the weights that the hub dispatched it with, and pushes how far it moved. The hub applies each delta as it
arrives and dispatches the worker again from the weights it has then. A delta may be stale: the hub has moved since it was begun.

    paper   H             k          w.update   D_i            tau_grace   epsilon, beta, N, c
    here    inner_steps   workers    delta      shards         grace_s     outer: lr, momentum, period, activation

The paper's Algorithm 2 has two sides. The worker's is `round`. The hub's is `step` for the mathematics, `async_scheduler.py` for
when a worker is dispatched and with how many steps, and `shard_sampler.py` for the data it reads. Moments of the inner optimizer
stay with the worker, the position on the learning-rate schedule with the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from atoll.core.config.type_checks import SecondsOrInfinite, check_types
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, Correction, Hub, Plan, Replica, Rule, shared
from atoll.optim.codecs import CODECS, CodecName, check_feedback
from atoll.optim.delayed_nesterov import DelayedNesterov
from atoll.optim.staleness import check_weight, weight_of, weighted


@dataclass(frozen=True)
class AsyncState:
    """All that the hub's mathematics remembers."""

    params: Tree = shared()
    outer: Any = shared(donated=True)


@dataclass(frozen=True, kw_only=True)
class AsyncLocalSGD:
    """Workers that train independently and push their deltas, and a hub that applies each push on arrival.

    Args:
        inner_steps: steps of a round; with a `pace` other than even, of the fastest worker's.
        outer: the rule applied to each delta. The period of DelayedNesterov is usually the number of workers.
        weight: what each delta is multiplied by: a number; or, with k workers, `1/k` or `sqrt(k)/k`.
        correction: what is done to a delta because it is stale, before the rule sees it.
        grace_s: how long the hub waits after an arrival for others, to dispatch them together; 0 dispatches each at once.
        pace: Dynamic Local Updates: even (off), given (speeds are known) or measured (they are observed).
        speeds: in steps per second, one for each worker, where `pace` is given; empty where the engine knows them.
        shards: a worker's next shard is drawn by its `deficit` (equation 2), or is one with the fewest `visits`.
        ties: where several shards have the same chance, the worker keeps its last one, or chance decides.
        codec: how deltas and weights travel, by `atoll.optim.codecs`: as `fp32`, `bf16`, `bf16-stochastic`, `int8`, `int4`, `fp4`,
            `int2` or `topk`. The hub encodes by how much its weights have changed since the worker last had them, and remembers
            what each worker decoded: one copy of the weights per worker. A worker that is new gets the weights in fp32.
        feedback: how much of what the codec left out of a worker's deltas is added to its next one: 1 all of it, 0 none. What it
            left out of the weights is always in the next difference.
    """

    inner_steps: int
    outer: Rule = DelayedNesterov(lr=0.7, momentum=0.9, period=4)
    weight: float | Literal["1/k", "sqrt(k)/k"] = 1.0
    correction: Correction | None = None
    grace_s: SecondsOrInfinite = 0.0
    pace: Literal["even", "given", "measured"] = "even"
    speeds: tuple[float, ...] = ()
    shards: Literal["deficit", "visits"] = "deficit"
    ties: Literal["last", "chance"] = "last"
    codec: CodecName = "fp32"
    feedback: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        check_weight(self.weight)
        check_feedback(self.feedback)
        assert self.plan, "a plan refuses what it cannot be"

    @property
    def plan(self) -> Plan:
        return Plan(
            steps=self.inner_steps,
            grace_s=self.grace_s,
            pace=self.pace,
            speeds=self.speeds,
            shards=self.shards,
            ties=self.ties,
            codec=CODECS[self.codec],
            feedback=self.feedback,
        )

    def init(self, params: Tree) -> AsyncState:
        return AsyncState(params, self.outer.init(params))

    async def round(self, replica: Replica, hub: Hub) -> None:
        task = await hub.pull()
        replica.load(task.params)
        await replica.train(task.steps, task.work)
        # Old minus new: the hub's rule subtracts it, as it would a gradient.
        await hub.push(task.params - replica.params())

    def step(self, state: AsyncState, arrival: Arrival) -> AsyncState:
        delta = self._delta(state.params, arrival)
        if delta is None:
            return state
        return AsyncState(*self.outer.update(state.params, delta, state.outer))

    def _delta(self, params: Tree, arrival: Arrival) -> Tree | None:
        """What the rule is given: the delta, corrected for being late and weighted; none if it is left out."""
        weight = weight_of(self.weight, arrival.workers)
        if self.correction is not None:
            return self.correction.correct(params, arrival, weight)
        return weighted(arrival.delta, weight)
