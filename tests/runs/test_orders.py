"""What processes are told to do, and what is refused before any of them is started."""

import json
from dataclasses import replace

import pytest

from atoll import recipes
from atoll.errors import AtollError, ConfigError
from atoll.runs.folder import RunFolder
from atoll.runs.orders import Order, create_folder, resume_order, start_order
from atoll.runs.place import Dist, placed, read_place
from atoll.runs.plain import from_json
from atoll.runs.real import resume_on, run_on, start_here
from atoll.testing.simulate import Recorder
from atoll.testing.workloads import Regression


def small():
    """A run whose data are made in a moment."""
    run = recipes.toy_sync()
    data = replace(run.data, examples=512, dimensions=16, clusters_per_class=1, eval_examples=128)
    return replace(run, model=replace(run.model, hidden=8), data=data, train=replace(run.train, steps=40))


@pytest.mark.parametrize("run", [small(), recipes.demo_two_level(), recipes.demo_acco_free()], ids=lambda run: run.recipe)
def test_an_order_reads_back_as_it_was_given(tmp_path, run):
    order = Order(placed(run, 4), Dist(processes=4, pace=0.5, limit_s=9.0), tmp_path)
    assert Order.from_text(order.to_text()) == order


def test_a_new_run_has_a_folder_that_knows_run_and_place(tmp_path):
    order = start_order(small(), Dist(limit_s=9.0), tmp_path / "run", ["atoll", "run"])(3)
    assert order.run == placed(small(), 3)
    assert from_json(RunFolder.open(tmp_path / "run").run_json) == order.run
    assert read_place(tmp_path / "run") == order.place == Dist(processes=3, limit_s=9.0)


def test_a_run_that_goes_on_by_another_number_keeps_its_run_and_notes_its_place(tmp_path):
    begun = start_order(small(), Dist(), tmp_path / "run", ["atoll"])(4)
    order = resume_order(tmp_path / "run", Dist(limit_s=5.0), ["atoll", "again"])(2)
    assert order.run == placed(begun.run, 2)
    assert from_json(RunFolder.open(tmp_path / "run").run_json) == begun.run
    assert order.run.shards == 4, "it reads the shards that it began with"
    assert read_place(tmp_path / "run") == Dist(processes=2, limit_s=5.0)
    assert "atoll again" in (tmp_path / "run" / "source.txt").read_text()


def test_what_is_impossible_leaves_no_folder(tmp_path):
    nowhere = replace(recipes.demo_diloco(), data=replace(recipes.demo_diloco().data, corpus=f"files:{tmp_path / 'nowhere'}"))
    for run, place, says in (
        (recipes.toy_async(), Dist(processes=2), "has a hub"),
        (recipes.demo_two_level(), Dist(processes=3), "multiple"),
        (nowhere, Dist(processes=2), "nowhere"),
    ):
        for make in (
            lambda run=run, place=place: create_folder(run, place, tmp_path / "run", ["atoll"]),
            lambda run=run, place=place: start_order(run, place, tmp_path / "run", ["atoll"])(place.processes),
        ):
            with pytest.raises(AtollError, match=says):
                make()
            assert not (tmp_path / "run").exists()


def test_processes_that_make_up_no_islands_do_not_go_on_with_a_run(tmp_path):
    run = replace(recipes.demo_two_level(), data=replace(recipes.demo_two_level().data, limit_bytes=60_000))
    create_folder(run, Dist(processes=4), tmp_path / "run", ["atoll"])
    with pytest.raises(ConfigError, match="multiple"):
        start_here(tmp_path / "run", Dist(processes=3))
    assert read_place(tmp_path / "run") == Dist(processes=4), "and it is not noted"


@pytest.mark.parametrize("given", [{"workload": Regression()}, {"sinks": [Recorder()]}], ids=["workload", "sinks"])
def test_what_lives_in_this_process_cannot_be_given_to_others(tmp_path, monkeypatch, given):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        run_on(Dist(processes=2), small(), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_simulated_run_does_not_go_on_by_processes(tmp_path):
    RunFolder.create(tmp_path / "run", {}, ["atoll"])
    with pytest.raises(ConfigError, match="no run of real processes"):
        resume_on(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {}
