"""One rank of a run: the plan that rank 0 publishes, what ranks refuse, and how a killed run resumes."""

import multiprocessing
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from atoll import recipes
from atoll.algorithms.zero import FSDP
from atoll.core.errors import AtollError, CheckpointError, ConfigError, ExchangeFailed
from atoll.core.events import Saved
from atoll.core.serialization import load_tree
from atoll.engines import liveness
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.processes.rank import (
    RankDriver,
    RunPlan,
    _publish_plan,
    _read_plan,
    _sharded_model,
    open_rank_log,
    rank_log_path,
)
from atoll.engines.processes.spec import Processes
from atoll.engines.run_lifecycle import RunRequest, RunTask, resume, run as run_in_folder
from atoll.engines.spec import read_spec
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import choose_computing, here
from atoll.telemetry.event_log import read_events
from atoll.testing.simulated_runs import Regression
from tests.process_pool import context_of, outcomes


def small(**train):
    """A run that takes a moment: five rounds of two steps."""
    run = recipes.toy_sync()
    data = replace(run.data, examples=512, dimensions=16, clusters_per_class=1, eval_examples=128)
    settings = {"steps": 10, "batch_size": 8, "warm_start_steps": 3, "device": "cpu", **train}
    return replace(
        run,
        model=replace(run.model, hidden=8),
        data=data,
        algorithm=replace(run.algorithm, inner_steps=2),
        train=replace(run.train, **settings),
        keep=replace(run.keep, save_every=2, evaluate_every=4),
    )


class Killed(Exception):
    """The rank was killed."""


class UntilSaved:
    """A sink that ends its process when so many checkpoints were begun."""

    def __init__(self, number):
        self.left = number

    def emit(self, event):
        self.left -= isinstance(event, Saved)
        if self.left < 0:
            raise Killed


def fitted(run, processes):
    return Processes(processes=processes).fitted(run)


def create(run, processes, path):
    """A new folder of this run, without starting it."""
    with request(run, path, Processes(processes=processes)).open():
        return path


def request(run, path, spec=None, **more):
    return RunRequest(run=run, spec=spec, out=path, command=["atoll"], **more)


def carried_out(group, folder, changed=None, changed_rank=None, checkpoints=None, workload=None):
    """This rank's part of the run in a folder, with settings that are changed here; stopped after this number of checkpoints. Its
    log, or the error that it ends with."""
    world = context_of(group)
    run = fitted(RunFolder.open(folder).run, world.size)
    if changed is not None and changed_rank in (None, world.rank):
        run = changed
    sinks = [UntilSaved(checkpoints)] if checkpoints is not None and world.is_rank_zero else []
    path = rank_log_path(Path(folder), world.rank)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        spec = Processes(processes=world.size)
        task = RunTask(run=run, spec=spec, folder=RunFolder(Path(folder)), workload=workload, sinks=sinks)
        try:
            RankDriver(task, spec, world, "cpu", file.write, ExchangeTimeout(20.0)).carry_out()
        except (AtollError, Killed) as error:
            return error
        finally:
            world.heartbeat.close()
    return path.read_text()


@pytest.fixture
def folder(tmp_path):
    return create(small(), 1, tmp_path / "run")


def test_ranks_with_other_data_are_named_before_training(four, tmp_path):
    folder = create(small(), 2, tmp_path / "run")
    run = fitted(small(), 2)
    for error in four.run(carried_out, folder, replace(run, data=replace(run.data, noise=0.25)), 1, size=2):
        assert isinstance(error, ConfigError)
        assert "ranks [1] have data that differ from rank 0's" in str(error)
    assert not any(isinstance(event, Saved) for event in read_events(folder / "events.jsonl"))


def test_a_checkpoint_of_other_settings_or_other_data_is_refused(four, folder):
    (error,) = four.run(carried_out, folder, None, None, 2, size=1)
    assert isinstance(error, Killed)
    (error,) = four.run(carried_out, folder, fitted(small(clip_norm=0.5), 1), size=1)
    assert isinstance(error, CheckpointError)
    assert "its settings differ" in str(error)
    (error,) = four.run(carried_out, folder, None, None, None, Regression(), size=1)
    assert isinstance(error, CheckpointError)
    assert "its data or their partition differ" in str(error)


def test_rank_0_broadcasts_a_warm_start_once_and_not_to_a_run_that_resumes_from_a_checkpoint(four, tmp_path):
    folder = create(small(), 2, tmp_path / "run")
    outcomes(2, carried_out, folder, None, None, 1)
    begun = rank_log_path(folder, 1).read_text()
    (log, also) = four.run(carried_out, folder, size=2)
    assert "rank 0 broadcast its weights" in begun
    assert "saved round" in log
    assert "broadcast" not in log + also


class Talkative:
    """A sink that prints at each checkpoint, as a library does that knows no log."""

    def emit(self, event):
        if isinstance(event, Saved):
            os.write(1, b"%d" % event.round + b"." * 200 + b"\n")


def talking(group, folder):
    """This rank's part of the run, with its log open and rotated as soon as it has a line."""
    world = context_of(group)
    task = RunTask(run=fitted(small(), world.size), spec=Processes(), folder=RunFolder(folder), sinks=[Talkative()])
    with pytest.MonkeyPatch.context() as patched, open_rank_log(folder, world.rank) as log:
        patched.setattr(liveness, "LOG_LIMIT_BYTES", 100)
        RankDriver(task, task.spec, world, "cpu", log, ExchangeTimeout(20.0)).carry_out()
        log("finished")
    world.heartbeat.close()


def test_a_rank_rotates_its_log_and_what_it_prints_after_each_checkpoint(four, tmp_path):
    folder = create(small(), 2, tmp_path / "run")
    four.run(talking, folder, size=2)
    log = rank_log_path(folder, 1)
    newest_first = [log.with_name(f"{log.name}.{number}").read_text() for number in (1, 2, 3)]
    assert [re.findall(r"^(\d+)\.{200}$", text, flags=re.MULTILINE) for text in newest_first] == [["5"], ["4"], ["3"]]
    assert [re.findall(r"saved round (\d+)", text) for text in newest_first] == [["5"], ["4"], ["3"]]
    assert log.read_text().endswith(" finished\n")
    assert len(log.read_text().splitlines()) == 1
    assert rank_log_path(folder, 0).with_name("rank-0.log.3").exists()


# ----------------------------------------------------------------------------------------------- in a process of its own


def alone(call, *arguments):
    """Calls a function in a process that torchrun might have started, alone; its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=_started, args=(call, *arguments))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


def _started(call, *arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    call(*arguments)


def begin(folder, sinks):
    run_in_folder(small(), engine=Processes(start_timeout_s=44.0), out=folder, workload=Regression(), sinks=sinks)


def go_on(folder, own):
    result = resume(folder, **({"workload": Regression()} if own else {}))
    assert result is not None
    assert result.params.equal(load_tree(folder / "final.safetensors"))


def test_a_killed_run_of_a_users_workload_resumes_bit_for_bit(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert alone(begin, whole, []) == 0
    assert alone(begin, cut, [UntilSaved(2)]) == 1, "an error that is not ours"
    assert not (cut / "final.safetensors").exists()
    assert "44 s outside of rounds" in rank_log_path(cut, 0).read_text()
    before = (cut / "source.txt").read_text()
    assert alone(go_on, cut, False) == 2, "its workload is not given"
    with RunFolder(cut).lock():
        assert alone(go_on, cut, True) == 2, "it is in use"
    assert (cut / "source.txt").read_text() == before
    assert alone(go_on, cut, True) == 0
    assert load_tree(cut / "final.safetensors").equal(load_tree(whole / "final.safetensors"))
    assert alone(go_on, cut, True) == 0, "a run that is finished is opened again"


def drawn_first(group, seed):
    """What a device of an FSDP2 island draws first, for dropout."""
    run, world, workload = small(fresh_optimizer=False, peak_first=False), context_of(group, 2, inside=True), Regression()
    run = replace(run, inside=FSDP(), cluster=replace(run.cluster, devices_per_island=2), seed=seed)
    model = _sharded_model(run, workload, workload.loss, world.device_mesh("cpu", 30.0), "cpu", world.rank)
    generator = torch.Generator()
    generator.set_state(model._random)
    return torch.rand(4, generator=generator).tolist()


def test_devices_of_fsdp2_draw_other_random_numbers_than_each_other_and_with_another_seed(fresh_four):
    drawn = [numbers for seed in (0, 1) for numbers in fresh_four.run(drawn_first, seed)]
    assert len(set(map(tuple, drawn))) == 8


# ------------------------------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("run", [small(), recipes.demo_two_level(), recipes.demo_acco_free()], ids=lambda run: run.recipe)
def test_a_plan_reads_back_as_it_was_written(tmp_path, run):
    plan = RunPlan(fitted(run, 4), Processes(processes=4, step_delay=0.5, exchange_timeout_s=9.0), tmp_path)
    for same in (plan, replace(plan, finished=True)):
        assert RunPlan.from_text(same.to_text()) == same


def published(store, request, size):
    with ExitStack() as held:
        plan, _ = _publish_plan(store, request, size, held)
        return plan


def test_rank_0_creates_the_folder_and_the_others_read_its_plan_and_its_timeout(tmp_path):
    store, folder = HashStore(), tmp_path / "run"
    store.set_timeout(timedelta(seconds=5))
    with ExitStack() as held:
        plan, _ = _publish_plan(store, request(small(), folder, Processes(start_timeout_s=77.0)), 2, held)
        assert store.timeout == timedelta(seconds=77)
        store.set_timeout(timedelta(seconds=5))
        assert _read_plan(store, 1, 0.02) == plan
        assert store.timeout == timedelta(seconds=77)
        with pytest.raises(ConfigError, match="in use"):
            published(HashStore(), request(None, folder), 2)
    run = fitted(small(), 2)
    assert RunFolder.open(folder).run == plan.run == replace(run, train=choose_computing(run, here(run))[0])
    assert read_spec(folder) == Processes(processes=2, start_timeout_s=77.0)


def test_a_run_resumed_by_another_number_keeps_its_run_and_saves_its_spec(tmp_path):
    begun = published(HashStore(), request(small(), tmp_path / "run", Processes()), 4)
    again = Processes(exchange_timeout_s=5.0)
    plan = published(HashStore(), replace(request(None, tmp_path / "run", again), command=["atoll", "again"]), 2)
    assert plan.run == fitted(begun.run, 2)
    assert RunFolder.open(tmp_path / "run").run == begun.run
    assert plan.run.shards == 4, "it reads the shards that it began with"
    assert read_spec(tmp_path / "run") == Processes(processes=2, exchange_timeout_s=5.0)
    assert "atoll again" in (tmp_path / "run" / "source.txt").read_text()


def test_an_impossible_run_leaves_no_folder_and_is_every_ranks_error(tmp_path):
    nowhere = replace(recipes.demo_diloco(), data=replace(recipes.demo_diloco().data, corpus=f"files:{tmp_path / 'nowhere'}"))
    for run, size, says in (
        (recipes.toy_async(), 2, "has a hub"),
        (recipes.demo_two_level(), 3, "multiple"),
        (nowhere, 2, "nowhere"),
    ):
        store = HashStore()
        with pytest.raises(AtollError, match=says):
            published(store, request(run, tmp_path / "run", Processes()), size)
        with pytest.raises(ConfigError, match=f"rank 0 has refused the run: .*{says}"):
            _read_plan(store, 1, 0.02)
        assert not (tmp_path / "run").exists()


def test_a_rank_that_receives_no_plan_names_rank_0_and_the_timeout():
    store = HashStore()
    with pytest.raises(ExchangeFailed, match=r"rank 1 received no plan: rank 0 has ended.*engine.start_timeout_s"):
        _read_plan(store, 1, 0.02)
