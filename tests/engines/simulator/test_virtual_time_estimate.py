"""The virtual time of a run on other links, without its training, is the time that the run has there."""

from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.engines import run_lifecycle
from atoll.engines.run_lifecycle import Cache
from atoll.engines.simulator import virtual_time_estimate
from atoll.engines.simulator.virtual_time_estimate import time_on_slower_links, virtual_time
from atoll.runs.cluster import Link
from atoll.runs.run_settings import candidates
from tests.samples import SMALL

SHORT = [*SMALL, "train.steps=8", "train.warm_start_steps=0", "cluster.link.bandwidth_mbit_per_s=2.5"]
ROUNDS = "algorithm.inner_steps=4"


@pytest.fixture(scope="module")
def cache():
    return Cache()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("demo-ddp", ["cluster.step_time_jitter=0.3"]),
        ("demo-diloco", [ROUNDS, "cluster.drop_probability=0.3"]),
        ("demo-acco", []),
        ("demo-acco-free", []),
        ("demo-async", [ROUNDS]),
        ("demo-async", [ROUNDS, "algorithm.codec=int4"]),
        ("demo-streaming", [ROUNDS, "algorithm.overlap=0", "algorithm.codec=int8"]),
        ("demo-two-level", [ROUNDS]),
        ("demo-diloco", [ROUNDS, "train.precision=all-bf16"]),
    ],
)
def test_it_is_the_time_that_the_run_has_on_those_links(name, more, cache, tmp_path):
    run = override(recipes.recipe(name), [*SHORT, *more], candidates)
    slower = replace(run, cluster=replace(run.cluster, link=replace(run.cluster.link, bandwidth_mbit_per_s=0.25)))
    summary = run_lifecycle.run(slower, out=tmp_path / "slower", cache=cache).summary
    assert time_on_slower_links(run, summary.params, 10) == pytest.approx(summary.virtual_time_s, rel=1e-9)
    assert virtual_time(run, summary.params) < summary.virtual_time_s


@pytest.mark.parametrize(("name", "more"), [("demo-ddp", []), ("demo-diloco", [ROUNDS]), ("demo-acco", [])])
def test_a_long_run_of_equal_rounds_is_extrapolated_exactly(name, more, monkeypatch):
    run = override(recipes.recipe(name), ["train.steps=160", *more], candidates)
    whole = virtual_time(run, 1_000)
    monkeypatch.setattr(virtual_time_estimate, "_MAX_LOCAL_STEPS", 64)
    assert virtual_time(run, 1_000) == pytest.approx(whole, rel=1e-9)


def test_a_long_asynchronous_run_is_extrapolated_to_within_two_percent(monkeypatch):
    run = recipes.demo_async()
    monkeypatch.setattr(virtual_time_estimate, "_MAX_LOCAL_STEPS", 4_000)
    whole = virtual_time(run, 1_000)
    monkeypatch.setattr(virtual_time_estimate, "_MAX_LOCAL_STEPS", 1_000)
    assert virtual_time(run, 1_000) == pytest.approx(whole, rel=0.02)


def test_a_large_model_is_replaced_by_a_small_one_on_links_slower_in_proportion():
    run = override(recipes.demo_acco(), ["train.steps=8", "optimizer.lr=0.01"], candidates)
    fast = replace(
        run,
        cluster=replace(run.cluster, link=Link(latency_s=0.03, bandwidth_mbit_per_s=1000 * run.cluster.link.bandwidth_mbit_per_s)),
    )
    assert virtual_time(fast, 100_000_000) == pytest.approx(virtual_time(run, 100_000), rel=1e-3)
