"""Gradients in buckets: the same bits and bytes, and an exchange that hides behind the backward pass."""

import math
from itertools import pairwise

import pytest

import atoll
from atoll import recipes
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Exchanged, RoundFinished
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link
from atoll.testing.simulated_runs import Regression, simulate

WORKLOAD = Regression(hidden=9)  # 64 weights: 4 buckets of 2 slices divide them


def update_s(algorithm, link, step_time_s=(1.0,), islands=2):
    cluster = Cluster(islands=islands, step_time_s=step_time_s, link=link)
    done = simulate(algorithm, steps=4, cluster=cluster, workload=WORKLOAD)
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    return (ends[-1] - ends[0]) / 3, done


def link_of(exchange_s):
    """A link on which two islands all-reduce 64 weights in this time, without latency."""
    return Link(latency_s=0.0, bandwidth_mbit_per_s=64 * 4 * 8 / 1e6 / exchange_s)


def test_the_workload_has_64_weights():
    assert sum(p.numel() for p in WORKLOAD.module().parameters()) == 64


@pytest.mark.parametrize("exchange_s", [0.1, 0.5, 2 / 3, 1.0, 3.0])
@pytest.mark.parametrize("buckets", [2, 4])
def test_an_update_takes_the_batch_and_what_the_backward_pass_does_not_hide(exchange_s, buckets):
    """The backward pass takes 2/3 of 1 s. Bucket j of n is ready after 1/3 + 2/3 j/n; each takes a share of the exchange."""
    expected = 0.0
    for number in range(1, buckets + 1):
        expected = max(expected, 1 / 3 + 2 / 3 * number / buckets) + exchange_s / buckets
    measured, _ = update_s(DDP(optimizer=SGD(lr=0.02), buckets=buckets), link_of(exchange_s))
    assert measured == pytest.approx(expected)
    whole, _ = update_s(DDP(optimizer=SGD(lr=0.02)), link_of(exchange_s))
    assert whole == pytest.approx(1 + exchange_s)


def test_every_bucket_pays_the_latency():
    link = Link(latency_s=0.25, bandwidth_mbit_per_s=math.inf)
    one, four = (update_s(DDP(optimizer=SGD(lr=0.02), buckets=buckets), link)[0] for buckets in (1, 4))
    assert one == pytest.approx(1.5)  # a reduce-scatter and an all-gather
    assert four == pytest.approx(1 / 3 + 2 / 3 / 4 + 4 * 0.5)


def test_a_bucket_waits_for_the_slowest_island():
    measured, _ = update_s(DDP(optimizer=SGD(lr=0.02), buckets=4), link_of(0.4), step_time_s=(0.5, 1.0))
    assert measured == pytest.approx(1.1)  # the last bucket alone is not hidden


def test_a_bucket_waits_for_an_island_whose_message_is_lost():
    cluster = Cluster(islands=4, step_time_s=(0.5, 0.5, 0.5, 10.0), drop_probability=0.5, link=link_of(0.4))
    done = simulate(DDP(optimizer=SGD(lr=0.02), buckets=8), steps=8, cluster=cluster, workload=WORKLOAD)
    exchanges = done.of(Exchanged)
    assert {event.heard[3] for event in exchanges} == {True, False}
    assert all(0 <= event.end_s - event.start_s < 0.1 for event in exchanges)  # the last bucket alone is not hidden
    assert all(later.start_s >= event.end_s + 9.9 for event, later in pairwise(exchanges))


def test_zero1_hides_its_reduce_scatter_and_not_its_all_gather():
    whole, hidden = (update_s(ZeRO1(optimizer=SGD(lr=0.02), buckets=buckets), link_of(0.4))[0] for buckets in (1, 4))
    assert whole == pytest.approx(1.4)
    assert hidden == pytest.approx(1 + 0.2 / 4 + 0.2)


@pytest.mark.parametrize("kind", [DDP, ZeRO1])
def test_buckets_change_neither_bits_nor_bytes(kind):
    (_, one), (_, four) = (update_s(kind(optimizer=SGD(lr=0.02), accumulation=2, buckets=b), link_of(0.4)) for b in (1, 4))
    assert four.params.equal(one.params)
    assert [e.sent_bytes for e in four.of(Exchanged)] == [e.sent_bytes for e in one.of(Exchanged)]
    assert four.finished.virtual_time_s < one.finished.virtual_time_s


def test_the_devices_of_an_island_exchange_in_buckets_too():
    cluster = Cluster(islands=2, devices_per_island=2, inside=link_of(0.4), link=Link(latency_s=0.0))
    times = [
        simulate(DiLoCo(inner_steps=2), inside=DDP(optimizer=SGD(lr=0.02), buckets=b), steps=4, cluster=cluster, workload=WORKLOAD)
        for b in (1, 4)
    ]
    assert times[0].finished.virtual_time_s - times[1].finished.virtual_time_s == pytest.approx(4 * (0.4 - 0.1))


def test_real_processes_refuse_buckets(tmp_path):
    run = override(recipes.demo_ddp(), ["algorithm.buckets=4"])
    with pytest.raises(ConfigError, match=r"buckets with --engine processes.*Use buckets=1"):
        atoll.run(run, engine=atoll.Processes(processes=2), out=tmp_path / "run")


@pytest.mark.parametrize("kind", [DDP, ZeRO1])
def test_less_than_one_bucket_is_refused(kind):
    with pytest.raises(ConfigError, match="buckets=0: a gradient has at least 1 bucket"):
        kind(buckets=0)
