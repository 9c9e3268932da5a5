"""Gradients and losses that are not finite, and islands that diverge: every rank reports them."""

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import AtollError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Evaluated, RoundFinished, UpdateSkipped
from atoll.engines.accounting import MAX_SKIPPED
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine, simulate
from tests.process_pool import context_of, engine_of, outcomes, run_on_processes

RULE = AdamW(lr=0.05)
SYNCHRONOUS = [DDP(optimizer=RULE), ZeRO1(optimizer=RULE), ACCO(optimizer=RULE)]


@dataclass(frozen=True)
class Poisoned(RegressionBatches):
    """One shard has NaN targets, at some positions or from one on."""

    bad_shard: int = 1
    bad: tuple[int, ...] = ()
    bad_from: float = math.inf

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        bad = shard == self.bad_shard and (position in self.bad or position >= self.bad_from)
        return inputs, torch.full_like(targets, math.nan) if bad else targets


def named(algorithm):
    return type(algorithm).__name__


def attempted(group, algorithm, workload, steps, inside=None, devices=1):
    """The error of this rank, its finished rounds, and its events."""
    engine, sink = engine_of(context_of(group, devices, inside=inside is not None), algorithm, workload, steps, None, inside)
    error = None
    try:
        run_engine(engine)
    except AtollError as raised:
        error = raised
    engine.close()
    return error, engine.round, sink.events


# -------------------------------------------------------------------------------------------------------- skipped updates


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=named)
def test_all_islands_skip_an_update_with_nonfinite_gradients_as_in_the_simulator(four, algorithm):
    workload = Regression(hidden=3, batches=Poisoned(bad=(1, 3)))
    expected = simulate(algorithm, steps=6, cluster=Cluster(islands=3), workload=workload)
    results = four.run(run_on_processes, algorithm, workload, 6, size=3)
    assert all(result.params.equal(expected.params) for result in results)
    assert results[0].params.is_finite()
    skipped = [
        [(e.round, e.islands) for e in events if isinstance(e, UpdateSkipped)] for events in (results[0].events, expected.events)
    ]
    assert skipped[0] == skipped[1] != []
    assert all(islands == [1] for _, islands in skipped[0])
    for name in ("tokens", "outer_steps", "rounds"):
        assert getattr(results[0].finished, name) == getattr(expected.finished, name)


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=named)
def test_too_many_skipped_updates_in_a_row_end_the_run_on_all_ranks(four, algorithm):
    workload = Regression(hidden=3, batches=Poisoned(bad_from=0))
    results = four.run(attempted, algorithm, workload, 30, size=3)
    for error, rounds, _ in results:
        assert isinstance(error, TrainingDiverged)
        assert f"{MAX_SKIPPED} updates in a row were skipped" in str(error)
        assert rounds == MAX_SKIPPED - 1
    losses = [event.loss for event in results[0][2] if isinstance(event, Evaluated)]
    assert len(losses) == MAX_SKIPPED
    assert len(set(losses)) == 1, "each round was evaluated, and the weights did not change"


def test_too_many_skipped_updates_inside_an_island_end_the_run_and_name_the_island(four):
    workload = Regression(hidden=3, batches=Poisoned(bad_shard=2, bad_from=0))
    errors = outcomes(4, inside_attempt, workload)
    for rank in (2, 3):
        assert f"{MAX_SKIPPED} updates in a row were skipped inside island 1" in errors[rank][1]
    for rank in (0, 1):
        assert re.search(r"could not (receive from|send to) rank [23]", errors[rank][1])


def inside_attempt(group, workload):
    error, *_ = attempted(group, DiLoCo(inner_steps=30), workload, 30, DDP(optimizer=RULE), 2)
    return str(error)


# ----------------------------------------------------------------------------------------------------------------- divergence


def test_a_nan_loss_ends_the_run_and_is_located(four):
    """The island that trained on it ends at once; the others miss it."""
    workload = Regression(batches=Poisoned(bad=(4,)))
    (_, first), (_, second) = outcomes(2, error_text, DiLoCo(inner_steps=3), workload, 9)
    assert second.startswith("the loss is nan on island 1 in round 1, at inner step 4.")
    assert "checkpoints from before this round are valid" in second
    assert re.search(r"could not (receive from|send to) rank 1", first)


def error_text(group, algorithm, workload, steps):
    error, *_ = attempted(group, algorithm, workload, steps)
    return str(error)


def test_weights_that_are_no_longer_finite_end_the_run_on_all_ranks(four):
    """The outer step overflows, though every loss was finite."""
    algorithm = DiLoCo(inner_steps=2, outer=SGD(lr=1e18))
    for error, *_ in four.run(attempted, algorithm, Regression(), 8, size=2):
        assert isinstance(error, TrainingDiverged)


@dataclass(frozen=True, kw_only=True)
class Diverging(DiLoCo):
    """One island changes the weights after the exchange."""

    who: int = 1

    async def round(self, state, replica, peers):
        after = await super().round(state, replica, peers)
        return replace(after, params=after.params + 1e-3) if peers.rank == self.who else after


def test_diverged_islands_are_named_on_all_ranks(four):
    for error, rounds, events in four.run(attempted, Diverging(inner_steps=2, who=2), Regression(), 4, size=4):
        assert isinstance(error, ExchangeFailed)
        assert "islands [2] hold other weights than island 0 after round 2" in str(error)
        assert rounds == 2
        assert len([e for e in events if isinstance(e, RoundFinished)]) in (0, 2)
