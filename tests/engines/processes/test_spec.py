"""The spec of runs on real processes, and how it fits a Run to them."""

from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.processes.spec import Processes, gpu_of_rank
from atoll.runs.cluster import Away


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "processes=0: at least 1"),
        ({"step_delay": -1.0}, "step_delay=-1.0: it is 0 or more"),
        ({"step_delay": float("nan")}, "step_delay=nan"),
        ({"exchange_timeout_s": 0.0}, "exchange_timeout_s=0.0: it is more than 0"),
        ({"start_timeout_s": 0.0}, "start_timeout_s=0.0: it is more than 0"),
        ({"backend": "mpi"}, "backend.*gloo"),
        ({"nodes": 0}, "nodes=0: at least 1"),
        ({"nodes": 2, "processes": 3, "address": "a:1"}, "processes=3: .*engine.nodes=2.* a multiple of it"),
        ({"nodes": 2, "address": "a:1"}, "processes=none: .*Give --processes"),
        ({"nodes": 2, "processes": 2}, "address=none: .*HOST:PORT of the first machine"),
        ({"nodes": 2, "processes": 2, "address": "a"}, "address=a: .*HOST:PORT"),
        ({"nodes": 2, "node": 2, "processes": 2, "address": "a:1"}, "node=2: it is 0 on the first machine, and less than"),
        ({"network": "internet"}, "network.*loopback.*trusted"),
    ],
)
def test_invalid_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Processes(**settings)


def fitted(run, processes):
    return Processes(processes=processes).fitted(run)


def test_processes_make_up_islands_and_nothing_else_of_the_run_changes():
    run = recipes.demo_diloco()
    there = fitted(run, 3)
    assert (there.cluster.islands, there.shards) == (3, 3)
    assert replace(there, cluster=run.cluster, data=run.data) == run


def test_a_run_resumed_by_another_number_keeps_its_shards():
    begun = fitted(recipes.demo_diloco(), 4)
    assert fitted(begun, 2).data == begun.data
    assert fitted(begun, 2).shards == 4


def test_processes_are_devices_where_islands_have_several():
    run = recipes.demo_two_level()
    assert fitted(run, 6).cluster.islands == 3
    assert fitted(run, 6).shards == 6
    with pytest.raises(ConfigError, match=r"processes=3 .*devices_per_island=2.*multiple"):
        fitted(run, 3)


def test_a_rank_sleeps_for_a_multiple_of_its_islands_step_time():
    two = replace(recipes.demo_two_level().cluster, islands=2, devices_per_island=2, step_time_s=(1.0, 10.0), step_time_spread=0.0)
    equals = replace(recipes.demo_diloco(), cluster=two)
    half = Processes(step_delay=0.5)
    assert [half.delay_s(equals, rank) for rank in range(4)] == [0.5, 0.5, 5.0, 5.0], "each device is an island"
    levels = replace(recipes.demo_two_level(), cluster=two)
    assert [half.delay_s(levels, island) for island in range(2)] == [0.5, 5.0]
    assert Processes().delay_s(levels, 1) == 0.0


def test_each_rank_has_a_gpu_of_its_own_while_there_are_enough():
    assert [gpu_of_rank(rank, 4, 4, "nccl") for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of_rank(rank, 3, 2, "gloo") for rank in range(3)] == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"3 processes .* 2 GPU.*NCCL needs one GPU per process.*backend=gloo"):
        gpu_of_rank(0, 3, 2, "nccl")


def test_nccl_is_refused_where_a_run_computes_on_the_cpu():
    run = recipes.toy_sync()
    on_cpu = replace(run, train=replace(run.train, device="cpu"))
    with pytest.raises(ConfigError, match=r"backend=nccl.*train.device=cpu.*backend=gloo"):
        Processes(processes=2, backend="nccl").fitted(on_cpu)


def test_an_algorithm_with_a_hub_is_refused():
    with pytest.raises(ConfigError, match=r"AsyncLocalSGD has a hub.*--engine ray or simulator"):
        fitted(recipes.toy_async(), 2)


def test_ignored_cluster_settings_are_named_in_one_line():
    run = recipes.demo_diloco()
    assert Processes().ignored_settings(run).startswith("cluster.link, cluster.step_time_s: ignored")
    assert Processes(step_delay=1.0).ignored_settings(run).startswith("cluster.link: ignored")
    losing = replace(run, cluster=replace(run.cluster, drop_probability=0.1, away=(Away(island=1, start=1, stop=2),)))
    line = Processes().ignored_settings(losing)
    assert "lost messages" in line
    assert "absences of islands" in line
    assert "\n" not in line
