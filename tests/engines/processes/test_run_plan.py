"""What processes are told to do, and what is refused before any of them is started."""

import json
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from atoll import recipes
from atoll.core.config.json_records import from_json
from atoll.core.errors import AtollError, ConfigError, ExchangeFailed
from atoll.engines.processes.python_api import resume_on, run_on, start_here
from atoll.engines.processes.run_plan import Order, create_folder, give_order, resume_order, start_order, take_order, wait_for_all
from atoll.engines.processes.spec import Dist, placed, read_place
from atoll.engines.warm_start import Cache
from atoll.runs.folder import RunFolder
from atoll.testing.simulated_runs import Recorder, Regression


def small():
    """A run whose data are made in a moment."""
    run = recipes.toy_sync()
    data = replace(run.data, examples=512, dimensions=16, clusters_per_class=1, eval_examples=128)
    return replace(run, model=replace(run.model, hidden=8), data=data, train=replace(run.train, steps=40))


def order_of(prepare, size):
    """What the first of so many processes would tell the others."""
    with prepare(size, Cache()) as order:
        return order


@pytest.mark.parametrize("run", [small(), recipes.demo_two_level(), recipes.demo_acco_free()], ids=lambda run: run.recipe)
def test_an_order_reads_back_as_it_was_given(tmp_path, run):
    order = Order(placed(run, 4), Dist(processes=4, pace=0.5, limit_s=9.0), tmp_path)
    for same in (order, replace(order, finished=True)):
        assert Order.from_text(same.to_text()) == same


def test_a_new_run_has_a_folder_that_knows_run_and_place(tmp_path):
    order = order_of(start_order(small(), Dist(limit_s=9.0), tmp_path / "run", ["atoll", "run"]), 3)
    assert order.run == placed(small(), 3)
    assert from_json(RunFolder.open(tmp_path / "run").run_json) == order.run
    assert read_place(tmp_path / "run") == order.place == Dist(processes=3, limit_s=9.0)


def test_a_run_that_goes_on_by_another_number_keeps_its_run_and_notes_its_place(tmp_path):
    begun = order_of(start_order(small(), Dist(), tmp_path / "run", ["atoll"]), 4)
    order = order_of(resume_order(tmp_path / "run", Dist(limit_s=5.0), ["atoll", "again"]), 2)
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
            lambda run=run, place=place: order_of(start_order(run, place, tmp_path / "run", ["atoll"]), place.processes),
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


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    folder = create_folder(small(), Dist(processes=2), tmp_path / "run", ["atoll"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with RunFolder(folder).lock():
        for go_on in (
            lambda: order_of(resume_order(folder, Dist(), ["atoll", "again"]), 3),
            lambda: start_here(folder, Dist(processes=3)),
        ):
            with pytest.raises(ConfigError, match="in use by process"):
                go_on()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == before


def test_a_folder_is_held_for_as_long_as_the_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    for prepare in (start_order(small(), Dist(), folder, ["atoll"]), resume_order(folder, None, ["atoll"])):
        with prepare(2, Cache()), pytest.raises(ConfigError, match="in use"):
            order_of(resume_order(folder, None, ["atoll"]), 2)
        order_of(resume_order(folder, None, ["atoll"]), 2)


def test_a_run_of_a_workload_of_ones_own_goes_on_with_it_alone(tmp_path):
    folder = create_folder(small(), Dist(processes=2), tmp_path / "run", ["atoll"])
    with pytest.raises(ConfigError, match="Leave out workload"):
        order_of(resume_order(folder, None, ["atoll"], Regression()), 2)
    (folder / "workload.txt").write_text("mine.Own\n")
    order_of(resume_order(folder, None, ["atoll"], Regression()), 2)
    for go_on in (lambda: order_of(resume_order(folder, None, ["atoll"]), 2), lambda: start_here(folder, Dist(processes=2))):
        with pytest.raises(ConfigError, match=r"mine\.Own.*atoll\.resume_on"):
            go_on()


@pytest.mark.parametrize("given", [{"workload": Regression()}, {"sinks": [Recorder()]}], ids=["workload", "sinks"])
def test_what_lives_in_this_process_cannot_be_given_to_others(tmp_path, monkeypatch, given):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        run_on(Dist(processes=2), small(), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    create_folder(small(), Dist(processes=2), tmp_path / "run", ["atoll"])
    with pytest.raises(ConfigError, match="torchrun"):
        resume_on(tmp_path / "run", **given)


def test_a_simulated_run_does_not_go_on_by_processes(tmp_path):
    RunFolder.create(tmp_path / "run", {}, ["atoll"])
    with pytest.raises(ConfigError, match="no run of real processes"):
        resume_on(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {}


# -------------------------------------------------------------------------------------------------------- told to the others


def test_the_others_hear_what_is_to_be_done_and_wait_as_long_as_the_first_rank_does(tmp_path):
    store, place = HashStore(), Dist(start_limit_s=77.0)
    store.set_timeout(timedelta(seconds=5))
    with ExitStack() as held:
        given = give_order(store, start_order(small(), place, tmp_path / "run", ["atoll"]), 2, Cache(), held)
        assert store.timeout == timedelta(seconds=77)
        store.set_timeout(timedelta(seconds=5))
        assert take_order(store, 1) == given
        assert store.timeout == timedelta(seconds=77)
        with pytest.raises(ConfigError, match="in use"):
            order_of(resume_order(tmp_path / "run", None, ["atoll"]), 2)


def test_what_the_first_rank_refuses_is_everybodys_error(tmp_path):
    store = HashStore()
    with ExitStack() as held, pytest.raises(ConfigError, match="has a hub"):
        give_order(store, start_order(recipes.toy_async(), Dist(), tmp_path / "run", ["atoll"]), 2, Cache(), held)
    with pytest.raises(ConfigError, match=r"rank 0 has refused the run: .*has a hub"):
        take_order(store, 1)


def test_who_is_told_nothing_says_so():
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(ExchangeFailed, match=r"rank 1 was not told what to do: rank 0 has ended.*--start-limit"):
        take_order(store, 1)


def test_who_has_not_come_is_named_and_who_has():
    store = HashStore()
    for rank in (0, 3):
        with pytest.raises(ExchangeFailed, match="which have not come"):
            wait_for_all(store, rank, 4, 0.02)
    with pytest.raises(ExchangeFailed, match=r"rank 1 waited 0.02 s for ranks \[2\] of 4.*ranks \[0, 1, 3\] are here"):
        wait_for_all(store, 1, 4, 0.02)
    wait_for_all(store, 2, 4, 0.02)
