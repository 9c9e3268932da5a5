"""Where a Run is carried out, and what is left of its cluster there."""

import json
from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.engines.processes.spec import (
    PLACE,
    Dist,
    check_backend,
    ignored,
    in_full,
    own_gpu,
    pause_s,
    placed,
    read_place,
    refuse_copies,
    refuse_too_many_devices,
    started_together,
    write_place,
)
from atoll.runs.cluster import Away


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "processes=0: at least 1"),
        ({"pace": -1.0}, "pace=-1.0: it is 0 or more"),
        ({"pace": float("nan")}, "pace=nan"),
        ({"limit_s": 0.0}, "limit_s=0.0: it is more than 0"),
        ({"start_limit_s": 0.0}, "start_limit_s=0.0: it is more than 0"),
        ({"backend": "mpi"}, "backend.*gloo"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(settings, says):
    with pytest.raises(ConfigError, match=says):
        Dist(**settings)


def test_a_folder_remembers_its_place(tmp_path):
    assert read_place(tmp_path) is None
    for place in (Dist(), Dist(processes=3, pace=0.5, limit_s=7.0, backend="nccl")):
        write_place(tmp_path, place)
        assert read_place(tmp_path) == place
    assert json.loads((tmp_path / PLACE).read_text())["engine"] == "dist"


def test_processes_make_up_islands_and_nothing_else_of_the_run_changes():
    run = recipes.demo_diloco()
    there = placed(run, 3)
    assert (there.cluster.islands, there.shards) == (3, 3)
    assert replace(there, cluster=run.cluster, data=run.data) == run


def test_a_run_that_goes_on_by_another_number_reads_the_shards_that_it_began_with():
    begun = placed(recipes.demo_diloco(), 4)
    assert placed(begun, 2).data == begun.data
    assert placed(begun, 2).shards == 4


def test_processes_are_devices_where_islands_have_several():
    run = recipes.demo_two_level()
    assert placed(run, 6).cluster.islands == 3
    assert placed(run, 6).shards == 6
    with pytest.raises(ConfigError, match=r"processes=3 .*devices_per_island=2.*multiple"):
        placed(run, 3)


def test_a_process_pauses_as_long_as_a_step_takes_on_its_island():
    two = replace(recipes.demo_two_level().cluster, islands=2, devices_per_island=2, step_time_s=(1.0, 10.0), step_time_spread=0.0)
    equals = replace(recipes.demo_diloco(), cluster=two)
    assert [pause_s(equals, Dist(pace=0.5), rank) for rank in range(4)] == [0.5, 0.5, 5.0, 5.0], "devices are islands of one"
    levels = replace(recipes.demo_two_level(), cluster=two)
    assert [pause_s(levels, Dist(pace=0.5), island) for island in range(2)] == [0.5, 5.0]
    assert pause_s(levels, Dist(), 1) == 0.0


def test_each_process_has_a_gpu_of_its_own_as_far_as_there_are_some():
    assert [own_gpu(rank, 4, 4, "nccl") for rank in range(4)] == [0, 1, 2, 3]
    assert [own_gpu(rank, 3, 2, "gloo") for rank in range(3)] == [0, 1, 0]
    with pytest.raises(ConfigError, match=r"3 processes .* 2 GPU.*NCCL wants one for each.*backend=gloo"):
        own_gpu(0, 3, 2, "nccl")


def test_nccl_is_refused_where_a_run_computes_on_the_cpu():
    run = recipes.toy_sync()
    on_cpu = replace(run, train=replace(run.train, device="cpu"))
    check_backend(on_cpu, Dist())
    with pytest.raises(ConfigError, match=r"backend=nccl.*train.device=cpu.*backend=gloo"):
        check_backend(on_cpu, Dist(backend="nccl"))


def test_an_algorithm_with_a_hub_is_refused():
    with pytest.raises(ConfigError, match=r"AsyncLocalSGD has a hub.*--engine ray or sim"):
        placed(recipes.toy_async(), 2)


def test_what_real_machines_do_not_take_from_the_cluster_is_said_in_one_line():
    run = recipes.demo_diloco()
    assert ignored(run, Dist()).startswith("cluster.link, cluster.step_time_s: ignored")
    assert ignored(run, Dist(pace=1.0)).startswith("cluster.link: ignored")
    losing = replace(run, cluster=replace(run.cluster, drop_probability=0.1, away=(Away(island=1, start=1, stop=2),)))
    line = ignored(losing, Dist())
    assert "lost messages" in line
    assert "islands that come and go" in line
    assert "\n" not in line


def test_batches_that_have_not_an_example_for_each_device_are_refused_before_anything_starts():
    run = override(recipes.demo_diloco(), ["train.batch_size=6", "train.micro_batches=2"])
    refuse_too_many_devices(run, 3)
    with pytest.raises(ConfigError, match=r"train.batch_size=6: 4 devices share out each batch, in 2 pieces each, .* at least 8"):
        refuse_too_many_devices(run, 4)


TORCHRUN = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("without", "processes"),
    [
        ((), 3),
        (("TORCHELASTIC_RUN_ID",), 3),
        (("MASTER_ADDR",), 3),
        (("TORCHELASTIC_RUN_ID", "MASTER_ADDR"), 1),
        (("RANK",), 1),
        (("WORLD_SIZE",), 1),
    ],
)
def test_what_torchrun_tells_its_processes_is_recognized(without, processes):
    assert started_together({name: value for name, value in TORCHRUN.items() if name not in without}) == processes


def test_a_simulation_by_each_of_several_processes_is_refused_and_one_process_is_none_of_several(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"3 processes \(WORLD_SIZE=3, RANK=2\).*all of it. Do this. Or start it once"):
        refuse_copies("Do this. ")
    with pytest.raises(ConfigError, match=r"all of it. Start it once, without torchrun"):
        refuse_copies("")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_copies("")


def test_bfloat16_that_no_device_here_computes_in_is_told(monkeypatch):
    auto = override(recipes.demo_diloco(), ["train.device=auto", "train.precision=bf16"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert in_full(auto) == "train.precision=bf16: ignored, since train.device=auto finds no CUDA device here. It computes in fp32."
    assert in_full(override(auto, ["train.precision=fp32"])) is None
    assert in_full(override(auto, ["train.precision=all-bf16"])) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert in_full(auto) is None
