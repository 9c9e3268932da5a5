"""ACCO counts every micro-batch once: those in commits, those that wait, and those that were dropped."""

import copy
import math
import shutil
from dataclasses import dataclass, replace

import pytest
import torch

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.core.config.overrides import override
from atoll.core.events import Computed, RoundFinished, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.engines import run_lifecycle
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link
from atoll.runs.run_settings import candidates
from atoll.testing.conformance import detached, digests
from atoll.testing.simulated_runs import Regression, RegressionBatches, run_engine, simulate, simulator
from tests.samples import SMALL

# --------------------------------------------------------------------------------------------- every micro-batch counted once


def states_of(engine):
    return [island.state for island in engine.islands.values()]


def accounted(engine):
    """Weight of all gradients, wherever they went: commits, halves that wait, and what was dropped."""
    states = states_of(engine)
    assert len({(state.steps, state.committed) for state in states}) == 1, "all islands count the same commits"
    return states[0].committed + sum((state.first.weight if state.first else 0.0) + state.dropped for state in states)


@dataclass(frozen=True)
class Poisoned(RegressionBatches):
    """NaN in the halves of batches that `where` lists, as (shard, number of the half)."""

    where: tuple[tuple[int, int], ...] = ()

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        targets = targets.clone()
        for number, half in enumerate(torch.tensor_split(targets, 2)):
            if (shard, 2 * position + number) in self.where:
                half.fill_(math.nan)
        return inputs, targets


def poisoned(*where):
    return Regression(Poisoned(where=where))


COUNTED = [
    ACCO(optimizer=SGD(lr=0.02)),
    ACCO(optimizer=SGD(lr=0.02), pieces_per_half=2, warmup=3),
    ACCO(optimizer=SGD(lr=0.02), batch="free", pieces_per_half=2),
    ACCO(optimizer=SGD(lr=0.02), batch="free", clock="samples", warmup=2),
    ACCO(optimizer=SGD(lr=0.02), batch="free", weigh="tokens"),
]


@pytest.mark.parametrize(
    ("workload", "drops"), [(Regression(), False), (poisoned((1, 8), (2, 13)), True)], ids=["clean", "poisoned"]
)
@pytest.mark.parametrize("algorithm", COUNTED, ids=["fixed", "warm-up", "free", "samples", "tokens"])
def test_commits_waiting_halves_and_what_was_dropped_are_all_that_was_computed(algorithm, workload, drops):
    cluster = Cluster(islands=3, step_time_s=(0.5, 1.0, 2.0), link=Link(latency_s=0.3))
    done = simulate(algorithm, steps=12, workload=workload, cluster=cluster, evaluate_every=100)
    pieces = algorithm.pieces
    computed = sum(event.tokens if algorithm.weigh == "tokens" else event.batches * pieces for event in done.of(Computed))
    assert accounted(done.engine) == pytest.approx(computed, abs=1e-9)
    dropped = sum(state.dropped for state in states_of(done.engine))
    assert (dropped > 0) is drops
    dropped_tokens = dropped * (1 if algorithm.weigh == "tokens" else 8 / pieces)
    waiting_tokens = sum(state.first.tokens for state in states_of(done.engine))
    assert done.finished.tokens == sum(event.tokens for event in done.of(Computed)) - waiting_tokens - dropped_tokens


def test_a_resumed_run_continues_to_count_where_it_was():
    algorithm, saved = ACCO(optimizer=SGD(lr=0.02), batch="free"), []
    options = {"steps": 10, "cluster": Cluster(islands=3, step_time_s=(0.5, 1.0, 2.0)), "workload": poisoned((1, 4), (0, 21))}
    engine, sink = simulator(algorithm, save_every=1, **options)
    run_engine(engine, lambda e: saved.append(copy.deepcopy(detached(e.parts()))))
    for parts in saved[2:8:2]:
        again, _ = simulator(algorithm, **options)
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))
        run_engine(again)
        assert accounted(again) == accounted(engine) == sum(e.batches * 2 for e in sink.events if isinstance(e, Computed))
        assert [digests(tuple(vars(state).values())) for state in states_of(again)] == [
            digests(tuple(vars(state).values())) for state in states_of(engine)
        ]


# ---------------------------------------------------------------------------------------------------- the progress of a run


def test_by_samples_steps_are_committed_samples_over_the_nominal_batch_and_the_run_ends_by_them():
    cluster = Cluster(islands=3, step_time_s=(1.0, 0.5, 0.25), link=Link(latency_s=0.2))
    algorithm = ACCO(optimizer=SGD(lr=0.01), batch="free", clock="samples", pieces_per_half=2)
    done = simulate(algorithm, steps=30, cluster=cluster, evaluate_every=100)
    [(steps, committed)] = {(state.steps, state.committed) for state in states_of(done.engine)}
    assert steps == pytest.approx(committed / (3 * 4))
    ends = [event.steps for event in done.of(RoundFinished)]
    assert ends[-2] < 30 <= ends[-1] == int(steps)
    assert len(ends) < 25, "commits are larger than nominal, so that there are fewer"
    assert {state.optimizer.step for state in states_of(done.engine)} == {len(ends)}


@pytest.mark.parametrize(
    ("settings", "ticks"),
    [
        ({}, "commits"),
        ({"batch": "free"}, "samples"),
        ({"batch": "free", "weigh": "tokens"}, "commits"),
        ({"batch": "free", "clock": "commits"}, "commits"),
        ({"clock": "samples"}, "samples"),
    ],
    ids=repr,
)
def test_by_default_free_batches_count_samples_and_all_others_commits(settings, ticks):
    assert ACCO(**settings).ticks == ticks


def test_free_batches_alone_change_nothing_about_how_much_a_run_reads():
    """Up to one commit, which may be larger than a nominal batch."""
    cluster = Cluster(islands=3, step_time_s=(1.0, 0.5, 0.25), link=Link(latency_s=0.2))
    options = {"steps": 30, "cluster": cluster, "evaluate_every": 100}
    fixed, free = (simulate(ACCO(optimizer=SGD(lr=0.01), batch=batch), **options).finished for batch in ("fixed", "free"))
    assert fixed.tokens <= free.tokens <= fixed.tokens * (1 + 1 / free.rounds)
    assert free.rounds < fixed.rounds


def test_by_commits_the_rate_ticks_once_a_commit_and_not_for_skipped_ones():
    """Round 1's second half is poisoned on one island: of six rounds five moved the weights, at the first five rates."""
    rule = SGD(lr=Cosine(lr=0.1, steps=6))
    done = simulate(ACCO(optimizer=rule), steps=6, workload=poisoned((2, 3)), cluster=Cluster(islands=3))
    assert {(state.steps, state.optimizer.step) for state in states_of(done.engine)} == {(6.0, 5)}
    assert done.finished.rounds == 6
    assert done.finished.outer_steps == 5


# ----------------------------------------------------------------------------------------------------- what is not a number


@pytest.mark.parametrize("half", [2, 3], ids=["first half", "second half"])
@pytest.mark.parametrize("options", [{}, {"wire": "bf16", "sums": "fp32"}, {"clip_norm": 0.3}], ids=repr)
def test_one_islands_nan_makes_all_skip_that_update_and_say_once_whose_it_was(half, options):
    """Half 2 is the first, half 3 the second of round 1. A first half spoils the estimate and the commit, a second the commit
    alone, after which replicas must be back at the weights before; the engine looks at that at the end of each round."""
    algorithm = ACCO(optimizer=AdamW(lr=0.05), **options)
    islands = Cluster(islands=3)
    clear = simulate(algorithm, steps=1, workload=poisoned(), cluster=islands)
    done = simulate(algorithm, steps=2, workload=poisoned((1, half)), cluster=islands)
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(1, [1])]
    assert done.params.equal(clear.params)
    assert [digests(state.optimizer) for state in states_of(done.engine)] == [
        digests(state.optimizer) for state in states_of(clear.engine)
    ]
    assert done.finished.tokens == clear.finished.tokens
    assert done.finished.outer_steps == 1
    held = Tree.join([algorithm.held(state) for state in states_of(done.engine)])
    assert all(island.replica.weights.equals(held) for island in done.engine.islands.values())


@pytest.mark.parametrize("half", [0, 1, 2, 3, 7])
def test_after_a_skipped_update_training_continues(half):
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=8, workload=poisoned((0, half)), cluster=Cluster(islands=2))
    assert len({event.round for event in done.of(UpdateSkipped)}) == 1
    assert done.finished.outer_steps == 7
    assert done.params.is_finite()


# -------------------------------------------------------------------------------------------------------------------- resume


def test_a_run_folder_is_resumed_with_its_waiting_halves_to_the_byte(tmp_path):
    settings = [*SMALL, "train.steps=6", "train.warm_start_steps=2", "keep.evaluate_every=2", "keep.save_every=2"]
    run = override(recipes.demo_ddp(), [*settings, "keep.checkpoints=9"], candidates)
    run = replace(run, algorithm=ACCO(batch="free", clock="samples", wire="bf16", sums="fp32"))
    whole = run_lifecycle.run(run, out=tmp_path / "run")

    def left():
        return (whole.folder / "events.jsonl").read_bytes(), (whole.folder / "final.safetensors").read_bytes()

    before, saved = left(), sorted((whole.folder / "checkpoints").iterdir())
    assert len(saved) >= 2
    for checkpoint in saved[1:]:
        shutil.rmtree(checkpoint)
    (whole.folder / "final.safetensors").unlink()
    assert run_lifecycle.resume(whole.folder).summary.resumed_from_round == int(saved[0].name)
    assert left() == before
