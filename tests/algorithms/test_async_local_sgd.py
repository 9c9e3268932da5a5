"""Asynchronous Local-SGD: special cases in which it equals something simpler, and the owners of moments, learning rate and
steps."""

import math
from dataclasses import replace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD, AsyncState
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Dispatched, WindowClosed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, Work
from atoll.optim.adam import AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster, Link
from atoll.testing.fakes import FakeReplica, ScriptedHub, drive
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate

FREE = Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)
VERY_S = (0.58, 0.75, 1.51, 3.33)


def ones(value=1.0):
    return Tree.of({"w": torch.full((3,), value)})


def close(one, two, tolerance=1e-6):
    return float((one.flat - two.flat).abs().max()) <= tolerance


def run(algorithm, islands=4, rounds=5, times_s=(1.0,), link=FREE, inner=None, **options):
    """With AdamW on a schedule inside, and as many equal shards as islands."""
    return simulate(
        algorithm,
        steps=rounds * 3,
        workload=Regression(RegressionBatches(num_shards=islands), hidden=4),
        inner=inner or AdamW(lr=Cosine(lr=0.02, steps=15, warmup=2)),
        cluster=Cluster(islands=islands, step_time_s=times_s, link=link),
        evaluate_every=10**6,
        **options,
    )


# ---------------------------------------------------------------------------------------------------------- one step by hand


def test_a_worker_trains_its_task_from_the_dispatched_weights_and_pushes_old_minus_new():
    replica, hub = FakeReplica(moves_by=-0.5), ScriptedHub(ones(2.0), steps=4)
    drive(AsyncLocalSGD(inner_steps=100).round(replica, hub))
    assert replica.trained == [(4, Work(shard=0, start=0, schedule=0, examples=1))]
    assert torch.equal(hub.pushed[0]["w"], torch.full((3,), 2.0))


def test_a_delta_is_corrected_then_weighed_then_given_to_the_rule():
    """Staleness 3 halves it, four workers weigh it by 1/4, and the rule takes 0.8 of the rest: 8 * 0.5 * 0.25 * 0.8 = 0.8."""
    algorithm = AsyncLocalSGD(inner_steps=1, outer=SGD(lr=0.8), weight="1/k", correction=Polynomial(power=0.5))
    arrival = Arrival(ones(8.0), ones(), staleness=3, workers=4)
    assert torch.allclose(algorithm.step(algorithm.init(ones()), arrival).params["w"], torch.full((3,), 0.2))


def test_an_update_that_is_left_out_leaves_the_very_same_state():
    algorithm = AsyncLocalSGD(inner_steps=1, correction=Polynomial(threshold=2))
    state = algorithm.init(ones())
    assert algorithm.step(state, Arrival(ones(), ones(), staleness=3, workers=4)) is state
    assert isinstance(algorithm.step(state, Arrival(ones(), ones(), staleness=2, workers=4)), AsyncState)


# ------------------------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize(("islands", "rounds"), [(1, 3), (2, 5), (4, 1), (4, 5), (7, 4)])
def test_delayed_nesterov_with_equal_workers_and_a_period_of_all_of_them_is_diloco(islands, rounds):
    sync = run(DiLoCo(inner_steps=3, outer=Nesterov(lr=0.7, momentum=0.9)), islands, rounds)
    rule = DelayedNesterov(lr=0.7, momentum=0.9, period=islands)
    delayed = run(AsyncLocalSGD(inner_steps=3, outer=rule), islands, rounds)
    assert close(delayed.params, sync.params)
    assert delayed.finished.virtual_time_s == pytest.approx(sync.finished.virtual_time_s)
    assert delayed.finished.local_updates == sync.finished.local_updates
    assert all(event.shard == event.island for event in delayed.of(Arrived))


def test_an_activated_momentum_is_not_diloco():
    """The paper's remark that any c gives the same among equal workers is not literally true."""
    rules = (DelayedNesterov(lr=0.7, period=4), DelayedNesterov(lr=0.7, period=4, activation=0.2))
    one, two = (run(AsyncLocalSGD(inner_steps=3, outer=rule)) for rule in rules)
    assert not close(one.params, two.params, 1e-4)


@pytest.mark.parametrize("times_s", [(1.0,), VERY_S, (3.0, 1.0, 2.0, 5.0)])
def test_an_infinite_window_with_a_buffer_of_all_is_diloco_whatever_the_speeds(times_s):
    sync = run(DiLoCo(inner_steps=3), times_s=times_s)
    buffered = AsyncLocalSGD(inner_steps=3, outer=Buffered(rule=Nesterov(lr=0.7), size=4), grace_s=math.inf)
    waiting = run(buffered, times_s=times_s)
    assert close(waiting.params, sync.params)
    if sorted(times_s) == list(times_s):  # then they arrive in the order of their ranks, and the sums have the same bits
        assert waiting.params.equal(sync.params)
    assert waiting.finished.virtual_time_s == pytest.approx(sync.finished.virtual_time_s)
    assert all(len(window.islands) == 4 for window in waiting.of(WindowClosed))


def test_an_infinite_window_over_a_slow_link_waits_for_all_workers_too():
    buffered = AsyncLocalSGD(inner_steps=3, outer=Buffered(rule=Nesterov(lr=0.7), size=4), grace_s=math.inf)
    assert run(buffered, times_s=VERY_S, link=Link()).params.equal(run(DiLoCo(inner_steps=3), times_s=VERY_S).params)


def test_a_period_of_one_is_naive_nesterov_also_among_unequal_workers():
    delayed, naive = (
        run(AsyncLocalSGD(inner_steps=3, outer=rule, weight="1/k"), times_s=VERY_S)
        for rule in (DelayedNesterov(lr=0.3, period=1), Nesterov(lr=0.3))
    )
    assert delayed.params.equal(naive.params)


def test_a_single_worker_is_never_stale_and_is_diloco_alone():
    alone = run(AsyncLocalSGD(inner_steps=3, outer=Nesterov(lr=0.7)), islands=1)
    assert [event.staleness for event in alone.of(Arrived)] == [0] * 5
    assert close(alone.params, run(DiLoCo(inner_steps=3), islands=1).params)


def test_a_polynomial_of_power_zero_and_a_compensation_of_nothing_change_nothing():
    plain = AsyncLocalSGD(inner_steps=3, outer=Nesterov(lr=0.1))
    expected = run(plain, times_s=VERY_S).params
    for correction in (Polynomial(power=0.0), DelayCompensation(strength=0.0)):
        assert run(replace(plain, correction=correction), times_s=VERY_S).params.equal(expected)


# ------------------------------------------------------------------------------------------------------- what belongs to whom


def test_the_learning_rate_follows_the_shard_and_the_moments_follow_the_worker():
    """Worker 0 is twice as fast and takes 4 steps, worker 1 takes 2; all wait for each other. In the second round they swap shards.
    The same by hand, with two replicas that keep their moments and read the shards' positions, gives the same weights."""
    workload, inner = Regression(RegressionBatches(num_shards=2), hidden=4), AdamW(lr=Cosine(lr=0.05, steps=12, warmup=3))
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=0.5), grace_s=math.inf, pace="given")
    cluster = Cluster(islands=2, step_time_s=(1.0, 2.0), link=FREE)
    done = simulate(algorithm, steps=9, workload=workload, inner=inner, cluster=cluster)
    sent = [(e.island, e.shard, e.start, e.schedule, e.steps) for e in done.of(Dispatched)]
    assert sent == [(0, 0, 0, 0, 4), (1, 1, 0, 0, 2), (0, 1, 2, 2, 4), (1, 0, 4, 4, 2), (0, 1, 6, 6, 4), (1, 0, 6, 6, 2)]

    replicas = [LocalReplica(workload, optimizer=inner) for _ in range(2)]
    params = Tree.of(workload.module())
    for number in range(0, 6, 2):
        deltas = []
        for island, shard, start, schedule, steps in sent[number : number + 2]:
            replicas[island].load(params)
            replicas[island].train(steps, Work(shard=shard, start=start, schedule=schedule, examples=1))
            deltas.append(params - replicas[island].params())
        params = params - 0.5 * deltas[0] - 0.5 * deltas[1]
    assert close(done.params, params)

    for island, steps in ((0, 12), (1, 6)):
        state = done.engine.workers[island].replica.state()
        assert {float(moments["step"]) for moments in state["optimizer"]} == {float(steps)}


def test_moments_of_a_worker_that_returns_to_an_old_shard_are_not_reset():
    done = run(AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3)), times_s=VERY_S, rounds=6, inner=AdamW(lr=0.01))
    assert len({event.shard for event in done.of(Dispatched) if event.island == 0}) > 1
    worker = done.engine.workers[0]
    arrived = sum(event.steps for event in done.of(Arrived) if event.island == 0)
    out = 0 if worker.round is None else worker.round.dispatch.steps  # has been trained already, though it has not arrived
    assert float(worker.replica.state()["optimizer"][0]["step"]) in (arrived, arrived + out)


def test_over_a_run_every_shard_has_had_its_share_of_steps():
    done = run(AsyncLocalSGD(inner_steps=3, outer=SGD(lr=0.3)), times_s=VERY_S, rounds=20)
    steps = done.engine.hub.scheduler.shards.steps.tolist()
    assert max(steps) - min(steps) <= 2 * 3


# ----------------------------------------------------------------------------------------------------- dynamic local updates


def steps_per_worker(done):
    return [[e.steps for e in done.of(Dispatched) if e.island == island] for island in range(4)]


def test_given_speeds_are_the_clusters_unless_they_are_listed():
    options = {"steps": 40, "cluster": Cluster(islands=4, step_time_s="very", link=FREE), "evaluate_every": 10**6}
    known = simulate(AsyncLocalSGD(inner_steps=20, pace="given"), **options)
    assert [set(steps) for steps in steps_per_worker(known)] == [{20}, {15}, {7}, {3}]
    listed = simulate(AsyncLocalSGD(inner_steps=20, pace="given", speeds=(1.0, 4.0, 2.0, 1.0)), **options)
    assert [set(steps) for steps in steps_per_worker(listed)] == [{5}, {20}, {10}, {5}]


def test_the_fastest_worker_need_not_be_the_first():
    """The scheduler knows all workers of the start before it dispatches the first."""
    cluster = Cluster(islands=4, step_time_s=(3.33, 1.51, 0.75, 0.58), link=FREE)
    done = simulate(AsyncLocalSGD(inner_steps=20, pace="given"), steps=40, cluster=cluster, evaluate_every=10**6)
    assert [set(steps) for steps in steps_per_worker(done)] == [{3}, {7}, {15}, {20}]


def test_measured_speeds_lead_to_the_steps_of_given_ones():
    cluster = Cluster(islands=4, step_time_s="very", link=Link(latency_s=2.0))
    done = simulate(AsyncLocalSGD(inner_steps=20, pace="measured"), steps=100, cluster=cluster, evaluate_every=10**6)
    steps = steps_per_worker(done)
    assert [taken[0] for taken in steps] == [20] * 4
    assert [taken[1:3] for taken in steps] == [[20, 20], [15, 15], [7, 7], [3, 3]]  # the two seconds of latency do not matter


def test_rounds_of_dynamic_steps_take_about_as_long():
    done = simulate(
        AsyncLocalSGD(inner_steps=50, pace="given"), steps=50, cluster=Cluster(step_time_s="very", link=FREE), evaluate_every=10**6
    )
    first = {event.island: event.virtual_time_s for event in reversed(done.of(Arrived))}
    assert first == pytest.approx({0: 29.0, 1: 28.5, 2: 28.69, 3: 26.64})


# ------------------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0}, r"inner_steps=0.*at least 1 inner step. Use 1"),
        ({"grace_s": -0.5}, r"grace_s=-0.5: a hub can wait for 0 seconds or more. Use 0"),
        ({"grace_s": math.nan}, r"grace_s=nan: it is at most .*, or inf"),
        ({"pace": "given", "speeds": (1.0, 0.0)}, r"speeds=\[1.0, 0.0\]: each is a positive number"),
        ({"pace": "given", "speeds": (-1.0,)}, r"speeds=\[-1.0\]"),
        ({"pace": "given", "speeds": (math.inf,)}, r"speeds=\[inf\]"),
        ({"pace": "given", "speeds": (math.nan,)}, r"speeds=\[nan\]"),
        ({"speeds": (1.0, 2.0)}, r"pace=even does not use them"),
        ({"pace": "fast"}, r"pace"),
        ({"shards": "random"}, r"shards"),
        ({"ties": "first"}, r"ties"),
        ({"weight": 0.0}, r"weight=0.0"),
        ({"weight": math.nan}, r"weight=nan"),
        ({"weight": "k"}, r"weight='k'"),
    ],
)
def test_nonsense_is_refused_with_advice(settings, message):
    with pytest.raises(ConfigError, match=message):
        AsyncLocalSGD(**{"inner_steps": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 4, "activation": 0.26}, r"activation=0.26 is outside \[0, 1/period\] = \[0, 0.25\]"),
        ({"period": 4, "activation": -0.01}, r"activation=-0.01 is outside"),
        ({"period": 4, "activation": math.nan}, r"activation=nan is outside"),
        ({"period": 0}, r"period=0: a period has at least 1 arrival"),
        ({"period": -4}, r"period=-4"),
    ],
)
def test_delayed_nesterov_refuses_a_share_beyond_the_whole_and_a_period_of_nothing(settings, message):
    with pytest.raises(ConfigError, match=message):
        AsyncLocalSGD(inner_steps=1, outer=DelayedNesterov(**settings))
    assert DelayedNesterov(period=4, activation=0.25).activation == 0.25


def test_a_cluster_with_more_workers_than_listed_speeds_is_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match=r"worker 2: no speed is given"):
        simulate(AsyncLocalSGD(inner_steps=1, pace="given", speeds=(1.0, 2.0)), steps=4)
