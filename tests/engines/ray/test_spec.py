"""The spec of runs on Ray, and how it fits a Run to workers."""

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.engines.ray.spec import Ray, gpus_per_worker
from atoll.runs.run_settings import candidates


def demo(*settings):
    return override(recipes.demo_async(), list(settings), candidates)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "processes=0: at least 1"),
        ({"devices": 0}, "devices=0: a worker has at least 1"),
        ({"processes": 3, "max_workers": 2}, "max_workers=2: at least engine.processes=3"),
        ({"step_delay": -1.0}, "step_delay=-1.0: it is 0 or more"),
        ({"save_every_s": 0.0}, "save_every_s=0.0: it is more than 0"),
        ({"hub_timeout_s": 0.0}, "hub_timeout_s=0.0: it is more than 0"),
    ],
)
def test_invalid_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Ray(**settings)


def test_workers_are_islands_and_the_data_are_sharded_for_them():
    run = Ray(processes=3).fitted(demo())
    assert (run.cluster.islands, run.effective_cluster.islands, run.data.shards) == (3, 3, 3)
    assert Ray(processes=3).fitted(demo("data.shards=2")).data.shards == 2
    pairs = Ray(processes=6).fitted(demo("cluster.devices_per_island=2"))
    assert (pairs.cluster.islands, pairs.effective_cluster.islands) == (3, 6), "each device is a worker"
    with pytest.raises(ConfigError, match=r"processes=3 cannot be islands of cluster.devices_per_island=2"):
        Ray(processes=3).fitted(demo("cluster.devices_per_island=2"))


def test_batches_without_an_example_for_each_device_are_refused():
    run = demo("train.batch_size=6", "train.micro_batches=2")
    Ray(processes=4, devices=3).fitted(run)
    with pytest.raises(ConfigError, match=r"batch_size=6: 4 devices share each batch, in 2 micro-batches each, .* at least 8"):
        Ray(processes=4, devices=4).fitted(run)


@pytest.mark.parametrize(("workers", "gpus"), [(1, 1), (2, 4), (3, 2), (4, 4), (5, 4), (8, 3), (7, 1)])
def test_all_workers_fit_on_the_gpus_each_on_a_single_one(workers, gpus):
    share = gpus_per_worker(workers, 1, gpus)
    assert gpus * int(1 / share) >= workers
    assert share == 1.0 or workers > gpus


def test_workers_of_several_devices_have_gpus_of_their_own_or_are_refused():
    assert gpus_per_worker(2, 3, gpus=6) == 3.0
    with pytest.raises(ConfigError, match=r"2 workers of 3 devices each need 6 GPUs, and this machine has 5"):
        gpus_per_worker(2, 3, gpus=5)


def test_a_synchronous_algorithm_is_refused_with_another_engine():
    with pytest.raises(ConfigError, match=r"DiLoCo has rounds that all islands take part in.*Use --engine processes"):
        Ray(processes=4).fitted(recipes.demo_diloco())


def test_with_a_step_delay_the_clusters_speeds_hold_and_the_window_scales():
    spec = Ray(step_delay=0.1)
    plan, speeds = spec.plan(demo())
    assert (plan.pace, plan.grace_s) == ("given", pytest.approx(0.2))
    assert speeds == pytest.approx([1 / (0.1 * step_time_s) for step_time_s in (0.58, 0.75, 1.51, 3.33)])
    assert "The grace window is 0.2 s" in spec.ignored_settings(demo())


def test_without_a_step_delay_speeds_are_measured():
    plan, speeds = Ray().plan(demo())
    assert (plan.pace, plan.grace_s, speeds) == ("measured", 2.0, ())
    assert "Speeds are measured." in Ray().ignored_settings(demo())
    plan, speeds = Ray().plan(demo("algorithm.speeds=[4,3,2,1]"))
    assert (plan.pace, plan.speeds, speeds) == ("given", (4, 3, 2, 1), ())
