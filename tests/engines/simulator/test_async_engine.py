"""The asynchronous simulator: times and bytes by hand, workers that join, leave and die, and faulty algorithms that do not hang."""

import copy
import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import (
    Arrived,
    Computed,
    Dispatched,
    Evaluated,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    RoundFinished,
    RunFinished,
    WindowClosed,
)
from atoll.core.flat_tree import Tree
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.staleness import Polynomial
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import CONTROL_BYTES, Away, Cluster, Link, Lost, Outage
from atoll.testing.conformance import detached
from atoll.testing.simulated_runs import Recorder, Regression, RegressionBatches, run_engine, simulate, simulator

FREE = Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)
PARAMS_BYTES = 24  # six weights of four bytes
# Half a second of latency, and the weights need two seconds up and one second down.
SLOW = Link(latency_s=0.5, bandwidth_mbit_per_s=PARAMS_BYTES * 8 / 2 / 1e6, download_mbit_per_s=PARAMS_BYTES * 8 / 1 / 1e6)
PLAIN = AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3))


def two(**settings):
    """Two workers, one of one second a step and one of two, on slow links."""
    return Cluster(**{"islands": 2, "step_time_s": (1.0, 2.0), "link": SLOW, **settings})


def run(algorithm=PLAIN, *, steps=6, cluster=None, shards=2, **options):
    return simulate(
        algorithm, steps=steps, cluster=cluster or two(), workload=Regression(RegressionBatches(num_shards=shards)), **options
    )


def engine_of(cluster, *, steps=6, workload=None, evaluate=None, algorithm=PLAIN, **options):
    """An engine whose every argument can be given."""
    what, sink = workload or Regression(RegressionBatches(num_shards=2)), Recorder()
    engine = AsyncSimEngine(
        algorithm,
        SimSetup(
            cluster=cluster,
            params=Tree.of(what.module()),
            batches=what.batches,
            make_replica=lambda island: LocalReplica(what, optimizer=SGD(lr=0.05), seed=island),
            evaluate=evaluate or Evaluator(what),
            sink=sink,
            steps=steps,
            **options,
        ),
    )
    return engine, sink


def when(done, kind, *names):
    """Of each such event, the island and these fields, to the nanosecond."""
    return [(event.island, *(round(getattr(event, name), 9) for name in names)) for event in done.of(kind)]


# ------------------------------------------------------------------------------------------------------ times and bytes


def test_encoded_weights_and_updates_are_charged_as_bytes_and_as_time():
    """The first pull is whole: 1.5 s. Six weights in int8 are one block of 258 bytes, 258/24 times as long on the link."""
    size, up_s, down_s = 258, 2 * 258 / PARAMS_BYTES, 258 / PARAMS_BYTES
    done = run(replace(PLAIN, codec="int8"), steps=6, cluster=two(islands=1, step_time_s=(1.0,)), shards=1)
    first, second = done.of(Dispatched)[:2]
    assert [event.sent_bytes for event in done.of(Dispatched)] == [PARAMS_BYTES, size]
    assert [event.sent_bytes for event in done.of(Arrived)] == [size, size]
    assert done.finished.sent_bytes_per_island == 2 * size
    assert (first.begin_s, second.virtual_time_s) == (1.5, pytest.approx(1.5 + 3 + 0.5 + up_s))
    assert second.begin_s == pytest.approx(second.virtual_time_s + 0.5 + down_s)


def test_an_update_that_was_lost_leaves_nothing_in_the_error_buffer():
    """Its data are read again, and without inner moments the second update is the lost one: the weights are those of no loss."""
    lossy = two(islands=1, step_time_s=(1.0,), lost=(Lost(island=0, round=0),))
    lost, whole = (run(replace(PLAIN, codec="int4"), steps=9, cluster=each, shards=1) for each in (lossy, replace(lossy, lost=())))
    assert lost.params.same_bits(whole.params)
    assert lost.finished.virtual_time_s > whole.finished.virtual_time_s


def test_a_round_takes_its_pull_its_steps_and_its_push():
    """Worker 0: 1.5 to pull, 3 to compute, 2.5 to push, so 7 in all; worker 1: 1.5 + 6 + 2.5 = 10."""
    done = run()
    assert when(done, Arrived, "pushed_s", "virtual_time_s") == [(0, 4.5, 7.0), (1, 7.5, 10.0), (0, 11.5, 14.0), (1, 17.5, 20.0)]
    assert when(done, Dispatched, "virtual_time_s", "begin_s") == [
        (0, 0.0, 1.5),
        (1, 0.0, 1.5),
        (0, 7.0, 8.5),
        (1, 10.0, 11.5),
        (0, 14.0, 15.5),
    ]
    assert when(done, Computed, "start_s", "end_s") == [(0, 1.5, 4.5), (1, 1.5, 7.5), (0, 8.5, 11.5), (1, 11.5, 17.5)]


def test_a_run_stops_at_the_step_that_reaches_its_updates_and_counts_bytes_and_time_exactly():
    done = run()
    finished = done.finished
    assert (finished.rounds, finished.outer_steps, finished.local_updates, finished.steps) == (4, 4, 12, 6)
    assert finished.virtual_time_s == pytest.approx(20.0)
    assert finished.tokens == 12 * 8
    assert finished.sent_bytes_per_island == 2 * PARAMS_BYTES
    assert finished.control_bytes_per_island == 2 * CONTROL_BYTES
    assert {event.sent_bytes for event in done.of(Arrived, Dispatched)} == {PARAMS_BYTES}


def test_bytes_per_island_are_a_mean_over_islands_that_were_present():
    done = run(steps=4, cluster=two(islands=3, outages=(Outage(island=2, start_s=0.0, stop_s=1000.0),)))
    assert [event.sent_bytes_per_island for event in done.of(RoundFinished)] == [12.0, 24.0, 36.0, 48.0]


def test_utilisation_counts_rounds_that_the_end_cut_short():
    """In 20 s worker 0 computed 3 + 3 + 3 (the last in a round that was still pushing), worker 1 computed 6 + 6."""
    assert run().finished.utilisation == pytest.approx((9 / 20 + 12 / 20) / 2)
    # Stopped at 14: worker 0 computed 3 + 3; worker 1 6, and 2.5 of what it began at 11.5.
    assert run(steps=4).finished.utilisation == pytest.approx((6 / 14 + 8.5 / 14) / 2)


def test_the_authors_schedule_of_the_first_rounds_under_the_clock():
    """20 steps of 0.58, 0.75, 1.51 and 3.33 s, grace 0.5 s, links that take no time: rounds of 11.6, 15.0, 30.2 and 66.6 s. Worker
    1 arrives at 30.0 and worker 2 at 30.2, so the hub dispatches both at 30.2, and worker 1 next arrives at 45.2."""
    algorithm = AsyncLocalSGD(
        inner_steps=20, outer=Momentum(lr=0.07), weight="sqrt(k)/k", grace_s=0.5, shards="visits", ties="chance"
    )
    cluster = Cluster(islands=4, step_time_s="very", link=FREE)
    done = run(algorithm, steps=40, cluster=cluster, shards=4, evaluate_every=80)
    assert when(done, Arrived, "virtual_time_s") == [
        (0, 11.6),
        (1, 15.0),
        (0, 23.2),
        (1, 30.0),
        (2, 30.2),
        (0, 34.8),
        (1, 45.2),
        (0, 46.4),
    ]
    [both] = [event for event in done.of(WindowClosed) if len(event.islands) > 1]
    assert both.islands == [1, 2]
    assert [both.opened_s, both.virtual_time_s, *both.idle_s] == pytest.approx([30.0, 30.2, 0.2, 0.0])
    # 80 local updates are four arrivals, 160 are eight.
    assert [(e.local_updates, round(e.virtual_time_s, 9)) for e in done.of(Evaluated)] == [(0, 0.0), (80, 30.0), (160, 46.4)]


def test_evaluations_and_checkpoints_happen_at_multiples_and_at_the_end():
    saved = []
    engine, sink = engine_of(two(), steps=12, evaluate_every=7, save_every=10)
    run_engine(engine, lambda e: saved.append(e.hub.scheduler.local_updates))
    judged = [event.local_updates for event in sink.events if isinstance(event, Evaluated)]
    assert judged == [0, 9, 15, 21, 24]  # 7, 14 and 21 are passed in steps of three; 24 is the end
    assert saved == [12, 21, 24]


def test_the_callers_weights_stay_as_they_are():
    params = Tree.of(Regression(RegressionBatches(num_shards=2)).module())
    digest, view = params.digest(), params.flat
    run(AsyncLocalSGD(inner_steps=1), steps=50, params=params)
    assert params.digest() == digest
    assert params.flat is view


@dataclass(frozen=True)
class Readable:
    """An algorithm whose hub steps in the readable form."""

    of: AsyncLocalSGD

    def __getattr__(self, name):
        return getattr(self.of, name)


@pytest.mark.parametrize(
    "rule", [DelayedNesterov(lr=0.5, period=9), Buffered(rule=Nesterov(lr=0.3), size=3)], ids=lambda rule: type(rule).__name__
)
def test_dispatched_weights_survive_the_fused_step(rule):
    """Nine workers of very different speeds: buffers are reused, and no worker may train from one that was overwritten."""
    algorithm = AsyncLocalSGD(inner_steps=2, outer=rule, grace_s=0.4, correction=Polynomial(threshold=40))
    cluster = Cluster(islands=9, step_time_s=(0.2, 0.3, 0.5, 0.7, 1.1, 1.3, 1.7, 1.9, 9.0), step_time_jitter=0.3, link=FREE)
    fused, readable = (
        simulate(kind, steps=20, cluster=cluster, workload=Regression(hidden=5), inner=AdamW(lr=0.01), evaluate_every=10**6)
        for kind in (algorithm, Readable(algorithm))
    )
    assert torch.allclose(fused.params.flat, readable.params.flat, rtol=1e-4, atol=1e-5)
    assert when(fused, Arrived, "virtual_time_s", "shard") == when(readable, Arrived, "virtual_time_s", "shard")


@dataclass(frozen=True)
class Normed(Regression):
    def module(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def test_weights_are_evaluated_with_the_buffers_of_the_last_arrival():
    """BatchNorm counts its batches: each worker's count is that of its own steps, and goes on from round to round."""
    seen = []

    def evaluate(params, buffers):
        seen.append(int(buffers["1.num_batches_tracked"]))
        return {"loss": 0.0}

    workload = Normed(RegressionBatches(num_shards=2))
    engine, _ = engine_of(two(link=FREE, step_time_s=(1.0, 2.5)), steps=9, workload=workload, evaluate=evaluate)
    run_engine(engine)
    assert seen == [0, 3, 6, 3, 9, 12, 6]  # worker 0 at 3 and 6, worker 1 at 7.5, worker 0 at 9 and 12, worker 1 at 15
    assert int(engine.buffers()["1.num_batches_tracked"]) == 6


# ----------------------------------------------------------------------------------------------------- joining and leaving


@pytest.mark.parametrize(
    ("dies_s", "computed_s", "next_works"),
    [
        (1.0, 0.0, [(1, 0, 0), (1, 3, 3), (0, 3, 3)]),  # in its pull
        (1.5, 0.0, [(1, 0, 0), (1, 3, 3), (0, 3, 3)]),  # as it begins
        (5.0, 3.5, [(1, 0, 0), (1, 3, 3), (0, 3, 3)]),  # while it computes
        (8.0, 6.0, [(0, 3, 3), (1, 0, 0), (1, 3, 3)]),  # in its push; at 7 its shard was still counted
    ],
)
def test_the_data_of_a_dead_workers_round_is_dispatched_to_the_others(dies_s, computed_s, next_works):
    """Worker 0 arrives every 7 s, and takes the abandoned shard as soon as that lags."""
    done = run(cluster=two(outages=(Outage(island=1, start_s=dies_s),)))
    assert when(done, Returned, "round", "shard", "steps", "virtual_time_s") == [(1, 1, 1, 3, dies_s)]
    assert when(done, IslandLeft, "virtual_time_s") == [(1, dies_s)]
    assert when(done, Arrived, "virtual_time_s") == [(0, 7.0), (0, 14.0), (0, 21.0), (0, 28.0)]
    assert [(event.shard, event.start, event.schedule) for event in done.of(Dispatched)[2:]] == next_works
    assert done.finished.local_updates == 12
    ledger = done.engine.accounting.ledgers[1]
    assert (ledger.computed_s, ledger.present_s, ledger.sent_bytes) == (pytest.approx(computed_s), dies_s, 0)


def test_a_worker_that_rejoins_begins_with_fresh_moments():
    cluster = two(outages=(Outage(island=1, start_s=12.0, stop_s=13.0),))
    done = run(cluster=cluster, inner=AdamW(lr=0.01))
    assert when(done, IslandJoined, "virtual_time_s") == [(1, 13.0)]
    assert when(done, Returned, "virtual_time_s", "round") == [(1, 12.0, 3)]
    # It delivered one round at 10, died in its second, and the hub dispatches it at 13 with its weights of that time.
    assert when(done, Dispatched, "virtual_time_s", "version")[4] == (1, 13.0, 2)
    assert when(done, Arrived, "virtual_time_s") == [(0, 7.0), (1, 10.0), (0, 14.0), (0, 21.0)]
    # Back at 13, it has trained from 14.5 to 20.5, and the run ends at 21.
    assert float(done.engine.workers[1].replica.state()["optimizer"][0]["step"]) == 3.0


def test_a_joiner_is_dispatched_at_once_while_others_wait_in_a_window():
    """Grace 5: worker 0 arrives at 7 and waits for worker 1, which arrives at 10. Worker 2 joins at 8."""
    algorithm = AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3), grace_s=5.0)
    cluster = Cluster(islands=3, step_time_s=(1.0, 2.0, 0.1), link=SLOW, outages=(Outage(island=2, start_s=0.0, stop_s=8.0),))
    done = run(algorithm, steps=5, cluster=cluster)
    assert when(done, IslandJoined, "virtual_time_s") == [(2, 8.0)]
    assert when(done, Dispatched, "virtual_time_s", "version")[2:5] == [(2, 8.0, 1), (0, 10.0, 2), (1, 10.0, 2)]
    first, second = done.of(WindowClosed)[:2]
    assert (first.islands, first.virtual_time_s, first.idle_s) == ([0, 1], pytest.approx(10.0), pytest.approx([3.0, 0.0]))
    # 8 + 1.5 + 0.3 + 2.5 = 12.3: its own window ends at 17.3, and worker 0 arrives at 17.
    assert (second.islands, second.opened_s) == ([2, 0], pytest.approx(12.3))


def test_a_window_closes_when_the_worker_it_waits_for_dies():
    algorithm = AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3), grace_s=5.0)
    done = run(algorithm, cluster=two(outages=(Outage(island=1, start_s=9.0),)))
    first = done.of(WindowClosed)[0]
    assert (first.islands, first.virtual_time_s, first.idle_s) == ([0], 9.0, pytest.approx([2.0]))


def test_a_worker_that_waits_may_die_without_holding_up_the_others():
    algorithm = AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3), grace_s=5.0)
    done = run(algorithm, cluster=two(outages=(Outage(island=0, start_s=8.0),)))
    assert done.of(Returned) == []  # its update of 7 s stays applied
    assert [window.islands for window in done.of(WindowClosed)][:2] == [
        [],
        [1],
    ]  # no worker of the first window is left to be dispatched
    assert when(done, Arrived, "virtual_time_s") == [(0, 7.0), (1, 10.0), (1, 20.0), (1, 30.0)]


def test_all_workers_may_join_late():
    late = tuple(Outage(island=island, start_s=0.0, stop_s=100.0 + island) for island in range(2))
    done = run(cluster=two(outages=late))
    assert when(done, Arrived, "virtual_time_s")[:2] == [(0, 107.0), (1, 111.0)]
    assert done.finished.utilisation > 0.4  # time before they joined does not count


def test_a_run_without_workers_raises_instead_of_hanging():
    gone = (Outage(island=0, start_s=9.0), Outage(island=1, start_s=12.0))
    with pytest.raises(ExchangeFailed, match=r"at 12.00 s no worker is left and none will return, after 6 of 12 .*stop_s"):
        run(cluster=two(outages=gone))


def test_a_run_survives_a_pause_without_workers():
    gone = (Outage(island=0, start_s=9.0, stop_s=50.0), Outage(island=1, start_s=12.0))
    done = run(cluster=two(outages=gone))
    assert when(done, Arrived, "virtual_time_s") == [(0, 7.0), (1, 10.0), (0, 57.0), (0, 64.0)]
    assert done.engine.accounting.ledgers[0].present_s == pytest.approx(9.0 + 14.0)


def test_of_a_join_and_a_leave_at_one_moment_the_join_is_first():
    swap = (Outage(island=0, start_s=9.0), Outage(island=1, start_s=0.0, stop_s=9.0))
    done = run(cluster=two(outages=swap))
    assert [type(event).__name__ for event in done.of(IslandJoined, IslandLeft)] == ["IslandJoined", "IslandLeft"]
    assert {event.island for event in done.of(Arrived)} == {0, 1}


def test_a_lost_update_costs_time_and_bytes_and_changes_no_weight():
    """Round 1 is worker 1's first. Its update is due at 10 and is lost, and the worker begins again, on the same work."""
    done = run(cluster=two(lost=(Lost(island=1, round=1),)))
    assert when(done, Arrived, "virtual_time_s") == [(0, 7.0), (0, 14.0), (1, 20.0), (0, 21.0)]
    assert when(done, Returned, "round", "virtual_time_s") == [(1, 1, 10.0)]
    again = done.of(Dispatched)[3]
    assert (again.island, again.shard, again.start, again.version) == (1, 1, 0, 1)
    assert done.engine.accounting.ledgers[1].sent_bytes == 2 * PARAMS_BYTES
    # The six seconds of its first round count as computing, though its update was lost. At 21, where the run ends, it pulls.
    assert done.engine.accounting.ledgers[1].computed_s == pytest.approx(12.0)
    assert done.finished.tokens == 12 * 8


def test_each_randomly_lost_update_is_returned_once_and_the_run_completes():
    done = run(cluster=two(drop_probability=0.4, link=FREE), steps=60, seed=3)
    lost, arrived = when(done, Returned, "round"), when(done, Arrived, "round")
    assert len(lost) > 10
    assert len({*lost, *arrived}) == len(lost) + len(arrived)
    assert done.finished.local_updates == sum(event.steps for event in done.of(Arrived)) == 120
    assert done.finished.utilisation == pytest.approx(1.0)  # on links that take no time all workers compute all the time


def test_presence_of_all_workers_adds_up_to_the_time_that_passed():
    cluster = two(outages=(Outage(island=1, start_s=5.0, stop_s=9.0),))
    done = run(cluster=cluster)
    end_s = done.finished.virtual_time_s
    assert [ledger.present_s for ledger in done.engine.accounting.ledgers] == pytest.approx([end_s, end_s - 4.0])


# ------------------------------------------------------------------------------------------------------------- bad updates


@dataclass(frozen=True)
class Poisoned(RegressionBatches):
    """Shard 1 is not a number."""

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        return inputs, targets * math.nan if shard == 1 else targets


def test_a_worker_that_pushes_nan_repeatedly_ends_the_run_with_finite_weights():
    engine, sink = engine_of(two(), steps=50, workload=Regression(Poisoned(num_shards=2)))
    with pytest.raises(TrainingDiverged, match=r"worker 1 has brought 3 unusable updates in a row: .*not finite.*clip_norm"):
        run_engine(engine)
    refused = [(event.island, round(event.virtual_time_s, 9)) for event in sink.events if isinstance(event, Refused)]
    assert [event for event in refused if event[0] == 1] == [(1, 10.0), (1, 20.0), (1, 30.0)]
    assert engine.params.is_finite()
    assert {event.shard for event in sink.events if isinstance(event, Arrived)} == {0}


@dataclass(frozen=True)
class Faulty(AsyncLocalSGD):
    """Pushes the given deltas in the given rounds, counted over all workers; in all others it is a correct algorithm."""

    wrong: dict = field(default_factory=dict)
    rounds: list = field(default_factory=list)

    async def round(self, replica, hub):
        number = len(self.rounds)
        self.rounds.append(number)
        task = await hub.pull()
        replica.load(task.params)
        await replica.train(task.steps, task.work)
        delta = task.params - replica.params()
        await hub.push(self.wrong.get(number, lambda delta: delta)(delta))


def wrong(what):
    return {
        "nan": lambda delta: delta * math.nan,
        "inf": lambda delta: delta + math.inf,
        "shape": lambda delta: Tree.of({"other": torch.zeros(6)}),
    }[what]


@pytest.mark.parametrize("what", ["nan", "inf", "shape"])
def test_one_bad_update_is_refused_and_leaves_no_trace_in_the_weights(what):
    """One worker alone, whose second round goes wrong: the weights are those of a run without that round."""
    alone = Cluster(islands=1, link=SLOW)
    honest, faulty = (
        run(Faulty(inner_steps=3, outer=SGD(lr=0.3), wrong=bad), steps=12, cluster=alone, shards=1)
        for bad in ({}, {1: wrong(what)})
    )
    assert when(faulty, Refused, "round", "virtual_time_s") == [(0, 1, 14.0)]
    assert when(faulty, Returned, "round", "steps") == [(0, 1, 3)]
    assert faulty.params.equal(honest.params)
    assert faulty.finished.tokens == honest.finished.tokens
    assert faulty.finished.virtual_time_s == pytest.approx(honest.finished.virtual_time_s + 7.0)
    assert faulty.finished.utilisation == pytest.approx(3 / 7)  # the refused round was computed too


def test_a_worker_whose_update_was_unusable_begins_again_with_fresh_moments():
    alone = Cluster(islands=1, link=FREE)
    done = run(
        Faulty(inner_steps=3, outer=SGD(lr=0.3), wrong={1: wrong("nan")}), steps=9, cluster=alone, shards=1, inner=AdamW(lr=0.01)
    )
    assert float(done.engine.workers[0].replica.state()["optimizer"][0]["step"]) == 6.0


def test_refused_updates_with_good_ones_between_do_not_end_the_run():
    bad = {number: wrong("nan") for number in (0, 1, 3, 4, 6, 7)}
    done = run(Faulty(inner_steps=3, outer=SGD(lr=0.3), wrong=bad), steps=12, cluster=Cluster(islands=1, link=FREE), shards=1)
    assert len(done.of(Refused)) == 6
    assert done.finished.local_updates == 12


@dataclass(frozen=True)
class Twice(AsyncLocalSGD):
    """Delivers everything twice."""

    async def round(self, replica, hub):
        task = await hub.pull()
        replica.load(task.params)
        await replica.train(task.steps, task.work)
        delta = task.params - replica.params()
        await hub.push(delta.copy())
        await hub.push(delta)


def test_an_update_that_is_delivered_twice_counts_once():
    alone = Cluster(islands=1, link=FREE)
    once, twice = (run(kind(inner_steps=3, outer=SGD(lr=0.3)), steps=12, cluster=alone) for kind in (AsyncLocalSGD, Twice))
    assert twice.params.equal(once.params)
    assert all("delivered twice" in event.reason for event in twice.of(Refused))
    assert len(twice.of(Refused)) == 3  # of the last, the run did not wait for the second delivery
    assert twice.finished.local_updates == once.finished.local_updates


def test_a_lost_second_delivery_does_not_end_its_workers_next_round():
    """Losses go by rounds, so both deliveries of a round are lost or neither. After the first, the worker is in its next round."""
    cluster = two(drop_probability=0.5, link=FREE, step_time_s=(1.0, 1.0))
    once, twice = (run(kind(inner_steps=3, outer=SGD(lr=0.3)), steps=30, cluster=cluster) for kind in (AsyncLocalSGD, Twice))
    assert twice.params.equal(once.params)
    assert when(twice, Returned, "round", "virtual_time_s") == when(once, Returned, "round", "virtual_time_s")


@dataclass(frozen=True)
class Silent(AsyncLocalSGD):
    """A faulty algorithm: it never pushes."""

    async def round(self, replica, hub):
        task = await hub.pull()
        await replica.train(task.steps, task.work)


def test_a_round_that_never_pushes_is_an_error_and_not_a_hang():
    with pytest.raises(ExchangeFailed, match=r"worker 0 ended without a push.*Every round of Silent must end with"):
        run(Silent(inner_steps=3))


def test_hub_weights_that_become_infinite_end_the_run():
    with pytest.raises(TrainingDiverged, match=r"hub's weights are no longer finite.*outer learning rate"):
        run(AsyncLocalSGD(inner_steps=1, outer=SGD(lr=1e19)), steps=100, inner=SGD(lr=1e19), clip_norm=100.0)


# ------------------------------------------------------------------------------------------------------------- bad clusters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"away": (Away(island=0, start=1, stop=2),)}, r"cluster.away and cluster.pool.*Use cluster.outages"),
        ({"pool": "doubling"}, r"cluster.away and cluster.pool"),
        ({"drop_probability": 1.0}, r"drop_probability=1.0: .* with 0.999 one update in 1,000"),
        ({"drop_probability": 0.999999999}, r"drop_probability=0.999999999: .* Use at most 0.999\."),
    ],
)
def test_settings_of_synchronous_rounds_are_refused_for_an_asynchronous_algorithm(settings, message):
    with pytest.raises(ConfigError, match=message):
        simulator(PLAIN, steps=3, cluster=two(**settings))


def test_outages_are_refused_for_a_synchronous_algorithm():
    with pytest.raises(ConfigError, match=r"cluster.outages strike in mid-round.*Use cluster.away"):
        simulator(DiLoCo(inner_steps=1), steps=3, cluster=two(outages=(Outage(island=0, start_s=1.0),)))


# ---------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_resumed_run_ends_with_the_same_accounting(after):
    """Five rounds. Also one that was saved at its last step: what the other was computing then is accounted."""
    saved = []
    cluster = two(lost=(Lost(island=1, round=1),), outages=(Outage(island=0, start_s=15.0, stop_s=16.0),))
    whole, sink = engine_of(cluster, steps=7, save_every=1)
    run_engine(whole, lambda engine: saved.append(copy.deepcopy(detached(engine.parts()))))
    again, later = engine_of(cluster, steps=7)
    again.restore(lambda part, like: saved[after - 1][part])
    run_engine(again)
    assert isinstance(later.events[-1], RunFinished)
    assert later.events[-1] == sink.events[-1]
    rounds = [event for event in later.events if isinstance(event, RoundFinished)]
    assert len(rounds) == 5 - after


@dataclass(frozen=True)
class TrainsTwice:
    """A worker that trains in two spans, so that it arrives later or earlier than predicted."""

    inner: AsyncLocalSGD

    @property
    def plan(self):
        return self.inner.plan

    def init(self, params):
        return self.inner.init(params)

    async def round(self, replica, hub):
        task = await hub.pull()
        replica.load(task.params)
        await replica.train(task.steps, task.work)
        await replica.train(task.steps, task.work)
        await hub.push(task.params - replica.params())

    def step(self, state, arrival):
        return self.inner.step(state, arrival)


def test_a_window_ends_at_its_deadline_though_an_arrival_was_predicted_in_it():
    algorithm = TrainsTwice(AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3), grace_s=2.0))
    cluster = Cluster(islands=4, step_time_s="very", step_time_jitter=0.3)
    done = simulate(algorithm, steps=30, cluster=cluster, evaluate_every=10**6)
    late = [window.virtual_time_s - window.opened_s for window in done.of(WindowClosed)]
    assert max(late) <= 2.0
    assert 2.0 in [round(seconds, 9) for seconds in late]  # some did run out


def test_outer_steps_are_those_that_moved_the_weights():
    done = simulate(AsyncLocalSGD(inner_steps=3, outer=Buffered(rule=SGD(lr=0.3), size=4)), steps=12, evaluate_every=10**6)
    assert (done.finished.rounds, done.finished.outer_steps) == (16, 4)
