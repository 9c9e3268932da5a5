"""How a Run is carried out on Ray."""

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.engines.processes.spec import read_place
from atoll.engines.ray.spec import (
    Ray,
    gpus_each,
    on_workers,
    plan_of,
    read_ray,
    told,
    with_said,
    write_ray,
)
from atoll.runs.run import candidates


def demo(*settings):
    return override(recipes.demo_async(), list(settings), candidates)


def test_a_place_is_read_as_it_was_written(tmp_path):
    place = Ray(processes=3, devices=2, most=5, pace=0.5, address="10.0.0.1:6379", save_every_s=2.0, limit_s=9.0)
    write_ray(tmp_path, place)
    assert read_ray(tmp_path) == place
    assert read_place(tmp_path) is None, "it is none of torch.distributed's"
    assert read_ray(tmp_path / "elsewhere") is None


def test_what_is_said_later_changes_that_and_nothing_else():
    before = Ray(processes=3, pace=0.5)
    assert with_said(before, {"pace": 0.0, "processes": None}) == Ray(processes=3, pace=0.0)
    assert with_said(None, {"limit_s": 3.0}) == Ray(limit_s=3.0)
    assert with_said(Ray(address="10.0.0.1:6379"), {"address": "local"}) == Ray(), "from a cluster to this machine"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "processes=0: at least 1"),
        ({"devices": 0}, "devices=0: a worker has at least 1"),
        ({"processes": 3, "most": 2}, r"most=2: at least as many as there are workers \(3\)"),
        ({"pace": -1.0}, "pace=-1.0: it is 0 or more"),
        ({"save_every_s": 0.0}, "save_every_s=0.0: it is more than 0"),
        ({"limit_s": 0.0}, "limit_s=0.0: it is more than 0"),
    ],
)
def test_nonsense_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Ray(**settings)


def test_a_number_of_workers_is_a_number_of_islands_and_the_data_are_cut_for_them():
    run = on_workers(demo(), 3)
    assert (run.cluster.islands, run.world.islands, run.data.shards) == (3, 3, 3)
    assert on_workers(demo("data.shards=2"), 3).data.shards == 2
    pairs = on_workers(demo("cluster.devices_per_island=2"), 6)
    assert (pairs.cluster.islands, pairs.world.islands) == (3, 6), "devices are workers of their own"
    with pytest.raises(ConfigError, match=r"processes=3 cannot be islands of cluster.devices_per_island=2"):
        on_workers(demo("cluster.devices_per_island=2"), 3)


@pytest.mark.parametrize(("workers", "gpus"), [(1, 1), (2, 4), (3, 2), (4, 4), (5, 4), (8, 3), (7, 1)])
def test_all_workers_find_room_on_the_gpus_there_are_each_on_one_alone(workers, gpus):
    share = gpus_each(workers, 1, gpus)
    assert gpus * int(1 / share) >= workers
    assert share == 1.0 or workers > gpus


def test_workers_of_several_devices_have_gpus_of_their_own_or_are_refused():
    assert gpus_each(2, 3, gpus=6) == 3.0
    with pytest.raises(ConfigError, match=r"2 workers of 3 devices each need 6 GPUs, and this machine has 5"):
        gpus_each(2, 3, gpus=5)


def test_a_synchronous_algorithm_is_sent_to_another_engine():
    with pytest.raises(ConfigError, match=r"DiLoCo has rounds that all islands take part in.*Use --engine dist"):
        on_workers(recipes.demo_diloco(), 4)


def test_with_a_pace_the_clusters_speeds_hold_and_the_window_is_as_much_shorter():
    plan, speeds = plan_of(demo(), Ray(pace=0.1))
    assert (plan.pace, plan.grace_s) == ("given", pytest.approx(0.2))
    assert speeds == pytest.approx([1 / (0.1 * step_time_s) for step_time_s in (0.58, 0.75, 1.51, 3.33)])
    assert "The grace window is 0.2 s" in told(demo(), Ray(pace=0.1))


def test_without_a_pace_nobody_knows_how_fast_machines_are():
    plan, speeds = plan_of(demo(), Ray())
    assert (plan.pace, plan.grace_s, speeds) == ("measured", 2.0, ())
    assert "Speeds are measured." in told(demo(), Ray())
    plan, speeds = plan_of(demo("algorithm.speeds=[4,3,2,1]"), Ray())
    assert (plan.pace, plan.speeds, speeds) == ("given", (4, 3, 2, 1), ())
