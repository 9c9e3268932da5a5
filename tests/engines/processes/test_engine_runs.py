"""Whole runs on real processes, in the ways in which they could differ from the simulator's."""

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import pytest
import torch.distributed as dist

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Compared, Computed, Evaluated, Exchanged, LimitSet, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Recorder, Regression, RegressionBatches, run_engine, simulate
from tests.process_pool import context_of, engine_of, run_on_processes

RULE = AdamW(lr=0.05)
ALGORITHMS = [
    DDP(optimizer=RULE, accumulation=2),
    ZeRO1(optimizer=RULE, clip_norm=0.5),
    DiLoCo(inner_steps=3),
    ACCO(optimizer=RULE, pieces_per_half=2),
]


def named(algorithm):
    return type(algorithm).__name__


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


# ------------------------------------------------------------------------------------------------------------ piece sizes


def run_in_chunks(group, algorithm, workload, steps, chunk_bytes):
    """A run with messages of at most `chunk_bytes`."""
    context = context_of(group)
    own = dist.new_group(timeout=timedelta(seconds=60))
    context.counterparts = GroupCollectives(own, timeout_s=60.0, chunk_bytes=chunk_bytes)
    engine, _ = engine_of(context, algorithm, workload, steps)
    finished = run_engine(engine)
    params = engine.params.copy()
    engine.close()
    return params, finished


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
def test_small_pieces_change_no_bit(four, algorithm):
    workload, steps = Regression(hidden=3, batches=RegressionBatches(num_shards=3)), 2 * algorithm.steps_per_round
    expected = simulate(algorithm, steps=steps, cluster=Cluster(islands=3), workload=workload)
    for chunk_bytes in (1, 12):  # one element, and three of a tensor's fifteen
        results = four.run(run_in_chunks, algorithm, workload, steps, chunk_bytes, size=3)
        assert all(params.equal(expected.params) for params, _ in results)
        assert results[0][1].sent_bytes_per_island == expected.finished.sent_bytes_per_island


# ------------------------------------------------------------------------------------------------------------ data shards


@dataclass(frozen=True)
class RecordedReads(RegressionBatches):
    """Records what is read."""

    @cached_property
    def read(self):
        return []

    def batch(self, shard, position):
        self.read.append((shard, position))
        return super().batch(shard, position)


def run_and_record_reads(group, algorithm, workload, steps):
    """The weights, and what this rank read. The replica looks at the first batch once more, to see whether it draws dropout."""
    engine, _ = engine_of(context_of(group), algorithm, workload, steps)
    workload.batches.read.clear()
    run_engine(engine)
    params, read = engine.params.copy(), list(workload.batches.read)
    read.remove((0, 0))
    engine.close()
    return params, read


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], DiLoCo(inner_steps=2)], ids=named)
def test_with_fewer_shards_than_processes_each_batch_is_read_once_and_the_bits_are_the_simulators(four, algorithm):
    steps, batches = 4 * algorithm.steps_per_round, 8
    workload = Regression(hidden=3, batches=RecordedReads(num_shards=3))
    expected = simulate(algorithm, steps=steps, cluster=Cluster(islands=4), workload=workload)
    results = four.run(run_and_record_reads, algorithm, workload, steps)
    assert all(params.equal(expected.params) for params, _ in results)
    read = sorted(place for _, places in results for place in places)
    shared = [(0, position) for position in range(2 * batches)]  # by ranks 0 and 3
    assert read == shared + [(shard, position) for shard in (1, 2) for position in range(batches)]


def test_free_batches_need_a_shard_for_each_process(four):
    workload = Regression(batches=RegressionBatches(num_shards=2))
    errors = four.run(refused, ACCO(optimizer=RULE, batch="free"), workload, size=3)
    assert all("3 processes read 2 shards" in text and "data.shards=3" in text for text in errors)


def refused(group, algorithm, workload):
    try:
        engine_of(context_of(group), algorithm, workload, 2)
    except ConfigError as error:
        return str(error)
    return None


def test_each_process_draws_the_dropout_of_its_island_in_the_simulator(four):
    workload = Regression(hidden=4, dropout=0.5)
    for algorithm in ALGORITHMS:
        steps = 3 * algorithm.steps_per_round
        expected = simulate(algorithm, steps=steps, cluster=Cluster(islands=3), workload=workload)
        first, *_ = four.run(run_on_processes, algorithm, workload, steps, size=3)
        assert first.params.equal(expected.params), algorithm


# ----------------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, DiLoCo(inner_steps=2, weighting="examples")], ids=named)
def test_events_are_the_simulators_except_for_their_times(four, algorithm):
    workload, steps = Regression(hidden=3), 3 * algorithm.steps_per_round
    expected = simulate(algorithm, steps=steps, cluster=Cluster(islands=3), workload=workload)
    first, *_ = four.run(run_on_processes, algorithm, workload, steps, size=3)
    met, should = of(first.events, Exchanged), expected.of(Exchanged)
    for what in {event.what for event in should}:
        for one, two in zip([e for e in met if e.what == what], [e for e in should if e.what == what], strict=True):
            for name in ("round", "islands", "heard", "sent_bytes", "background", "inside"):
                assert getattr(one, name) == getattr(two, name), (what, name)
            assert what not in ("mean", "reduce_scatter") or one.weight == two.weight
            assert max(one.arrived_s) <= one.start_s <= one.end_s
            assert one.background or one.start_s == max(one.arrived_s)
    for one, two in zip(of(first.events, Compared), expected.of(Compared), strict=True):
        assert one.round == two.round
        assert one.norms == pytest.approx(two.norms, rel=1e-5)
        assert one.mean_norm == pytest.approx(two.mean_norm, rel=1e-5)
        assert one.cosine_mean == pytest.approx(two.cosine_mean, abs=1e-5)
        assert one.cosine_std == pytest.approx(two.cosine_std, abs=1e-5)
    assert _spans(first.events) == _spans(expected.events)
    for one, two in zip(of(first.events, RoundFinished), expected.of(RoundFinished), strict=True):
        for name in ("round", "islands", "steps", "tokens", "local_updates", "sent_bytes_per_island"):
            assert getattr(one, name) == getattr(two, name), name
        assert one.loss == pytest.approx(two.loss, rel=1e-12)


def _spans(events):
    return sorted((e.round, e.island, e.steps, e.batches, e.tokens, e.loss) for e in of(events, Computed))


def test_times_are_on_the_wall_clock_and_in_order(four):
    first, *_ = four.run(run_on_processes, ALGORITHMS[2], Regression(hidden=3), 9, size=3)
    finished = of(first.events, RoundFinished)
    times = [event.wall_time_s for event in finished]
    assert all(event.virtual_time_s is None for event in finished)
    assert times == sorted(times)
    assert times[-1] <= first.finished.wall_time_s
    assert all(0 <= event.start_s <= event.end_s <= times[event.round] for event in of(first.events, Computed) if event.island == 0)
    assert 0 < first.finished.utilisation <= 1
    (limit,) = of(first.events, LimitSet)
    assert (limit.limit_s, limit.why) == (60.0, "as given")


def evaluated_rounds(group, algorithm, workload, steps, evaluate_every, save_every):
    saved = []
    options = {"evaluate_every": evaluate_every, "save_every": save_every}
    engine, sink = engine_of(context_of(group), algorithm, workload, steps, **options)
    run_engine(engine, lambda engine: saved.append(engine.round))
    engine.close()
    return [(e.round, e.steps, e.loss) for e in of(sink.events, Evaluated)], saved


def test_evaluations_and_checkpoints_follow_the_same_rounds_as_the_simulators(four):
    workload, algorithm, steps, saved = Regression(hidden=3), DiLoCo(inner_steps=2), 14, []
    sink = Recorder()
    simulated = SimEngine(
        algorithm,
        SimSetup(
            cluster=Cluster(islands=2),
            params=Tree.of(workload.module()),
            batches=workload.batches,
            make_replica=lambda island: LocalReplica(workload, optimizer=SGD(lr=0.05), seed=island),
            evaluate=Evaluator(workload),
            sink=sink,
            steps=steps,
            evaluate_every=2,
            save_every=3,
        ),
    )
    run_engine(simulated, lambda engine: saved.append(engine.round))
    (events, rounds), (silent, too) = four.run(evaluated_rounds, algorithm, workload, steps, 2, 3, size=2)
    assert events == [(e.round, e.steps, e.loss) for e in of(sink.events, Evaluated)]
    assert [round for round, _, _ in events] == [0, 2, 4, 6, 7]
    assert rounds == too == saved == [3, 6, 7]
    assert silent == []


def run_with_pause(group, algorithm, workload, steps, pause_s):
    engine, sink = engine_of(context_of(group), algorithm, workload, steps, pause_s=pause_s)
    run_engine(engine)
    engine.close()
    return sink.events


def test_a_pause_adds_to_the_time_of_each_batch(four):
    pause_s = 0.01
    for algorithm in (ALGORITHMS[3], DiLoCo(inner_steps=3)):
        events, _ = four.run(run_with_pause, algorithm, Regression(), 3, pause_s, size=2)
        for event in of(events, Computed):
            assert event.end_s - event.start_s >= pause_s * event.batches


# ------------------------------------------------------------------------------------------------------------ free batches


def run_free(group, algorithm, workload, steps):
    engine, sink = engine_of(context_of(group), algorithm, workload, steps)
    finished = run_engine(engine)
    own = engine.parts()[f"own-{engine.context.rank}"].value
    params = engine.params.copy()
    engine.close()
    return params, finished, sink.events, engine.round, engine.steps_taken, own["pending_tokens"]


FREE = [kind(optimizer=RULE, batch="free", warmup=warmup) for kind, warmup in ((ACCO, 0), (DPU, 1), (WP, 1))]


@pytest.mark.parametrize("algorithm", FREE, ids=named)
def test_free_batches_end_at_the_same_commit_on_all_ranks_and_every_piece_counts_once(four, algorithm):
    results = four.run(run_free, algorithm, Regression(hidden=3, batches=RegressionBatches(num_shards=3)), 6, size=3)
    params, finished, events, rounds, steps, _ = results[0]
    assert all(other[0].equal(params) for other in results)
    assert {(other[3], other[4]) for other in results} == {(rounds, steps)}
    assert steps >= 6
    assert rounds == finished.rounds <= 6
    computed, waiting = sum(event.tokens for event in of(events, Computed)), sum(other[5] for other in results)
    assert finished.tokens == computed - waiting
    assert waiting > 0
    for round in range(rounds):
        assert {event.island for event in of(events, Computed) if event.round == round} == {0, 1, 2}


# ------------------------------------------------------------------------------------------------------------- evaluation


def evaluate_slowly(group, workload, timeout_s, takes_s):
    """The first evaluation takes longer than the timeout of an exchange."""
    until_s = time.monotonic() + takes_s

    def evaluate(params, buffers):
        while time.monotonic() < until_s:
            pass
        return {"loss": 0.0}

    engine, _ = engine_of(context_of(group), DiLoCo(inner_steps=1), workload, 2, evaluate=evaluate, timeout_s=timeout_s)
    run_engine(engine)
    engine.close()
    return engine.round


def test_an_evaluation_that_is_longer_than_the_timeout_fails_no_exchange(four):
    assert four.run(evaluate_slowly, Regression(), 0.8, 1.3, size=3) == [2, 2, 2]
