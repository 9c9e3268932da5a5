"""Where a Run is carried out, and what is left of its cluster there."""

import json
from dataclasses import replace

import pytest

from atoll import recipes
from atoll.engines.sim.world import Away
from atoll.errors import ConfigError
from atoll.runs.place import PLACE, Dist, ignored, placed, read_place, write_place


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": 0}, "processes=0: at least 1"),
        ({"pace": -1.0}, "pace=-1.0: it is 0 or more"),
        ({"pace": float("nan")}, "pace=nan"),
        ({"limit_s": 0.0}, "limit_s=0.0: it is more than 0"),
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


def test_an_algorithm_with_a_hub_is_refused():
    with pytest.raises(ConfigError, match=r"AsyncLocalSGD has a hub.*--engine sim"):
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
