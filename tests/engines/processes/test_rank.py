"""One process's share of a run: what it refuses, what it is handed, and how it goes on after it was killed."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll import recipes
from atoll.algorithms.zero import FSDP
from atoll.core.config.json_records import from_json
from atoll.core.errors import AtollError, CheckpointError, ConfigError
from atoll.core.events import Saved
from atoll.core.serialization import load_tree
from atoll.engines.processes.python_api import resume_on, run_on
from atoll.engines.processes.rank import Share, _sharded_of
from atoll.engines.processes.rank_log import RankLog, log_of
from atoll.engines.processes.run_plan import Order, create_folder
from atoll.engines.processes.spec import Dist, placed
from atoll.engines.wall_clock import ExchangeTimeout
from atoll.engines.warm_start import Cache
from atoll.runs.folder import RunFolder
from atoll.telemetry import read_events
from atoll.testing.processes import context_of
from atoll.testing.simulated_runs import Regression


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
    """Somebody has pulled the plug."""


class UntilSaved:
    """A sink that ends its process when so many checkpoints were begun."""

    def __init__(self, number):
        self.left = number

    def emit(self, event):
        self.left -= isinstance(event, Saved)
        if self.left < 0:
            raise Killed


def shared(group, folder, changed=None, changed_rank=None, checkpoints=None, workload=None):
    """This rank's share of the run in a folder, with settings that are changed here; stopped after so many checkpoints. What it
    says in its log, or the error that it ends with."""
    world = context_of(group)
    run = placed(from_json(RunFolder.open(folder).run_json), world.size)
    if changed is not None and changed_rank in (None, world.rank):
        run = changed
    sinks = [UntilSaved(checkpoints)] if checkpoints is not None else []
    path = log_of(Path(folder), world.rank)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        order = Order(run, Dist(processes=world.size), Path(folder))
        share = Share(order, world, "cpu", sinks, workload, RankLog(file), limit=ExchangeTimeout(20.0), cache=Cache())
        try:
            share.carry_out()
        except (AtollError, Killed) as error:
            return error
        finally:
            world.heartbeat.close()
    return path.read_text()


@pytest.fixture
def folder(tmp_path):
    return create_folder(small(), Dist(processes=1), tmp_path / "run", ["atoll"])


def test_who_has_other_data_is_named_before_anything_is_trained(four, tmp_path):
    folder = create_folder(small(), Dist(processes=2), tmp_path / "run", ["atoll"])
    run = placed(small(), 2)
    for error in four.run(shared, folder, replace(run, data=replace(run.data, noise=0.25)), 1, size=2):
        assert isinstance(error, ConfigError)
        assert "ranks [1] have data that differ from rank 0's" in str(error)
    assert not any(isinstance(event, Saved) for event in read_events(folder / "events.jsonl"))


def test_a_checkpoint_of_other_settings_or_other_data_is_refused(four, folder):
    (error,) = four.run(shared, folder, None, None, 2, size=1)
    assert isinstance(error, Killed)
    (error,) = four.run(shared, folder, placed(small(clip_norm=0.5), 1), size=1)
    assert isinstance(error, CheckpointError)
    assert "its settings differ from what rank 0 has now" in str(error)
    (error,) = four.run(shared, folder, None, None, None, Regression(), size=1)
    assert isinstance(error, CheckpointError)
    assert "its data or how they are dealt out differ" in str(error)


def test_a_warm_start_is_handed_out_once_and_not_to_a_run_that_goes_on_from_a_checkpoint(four, tmp_path):
    folder = create_folder(small(), Dist(processes=2), tmp_path / "run", ["atoll"])
    four.run(shared, folder, None, None, 1, size=2)
    begun = log_of(folder, 1).read_text()
    (log, also) = four.run(shared, folder, size=2)
    assert "handed out" in begun
    assert "saved round" in log
    assert "handed out" not in log + also


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
    run_on(Dist(start_limit_s=44.0), small(), out=folder, workload=Regression(), sinks=sinks)


def go_on(folder, own):
    result = resume_on(folder, **({"workload": Regression()} if own else {}))
    assert result is not None
    assert result.params.equal(load_tree(folder / "final.safetensors"))


@pytest.mark.usefixtures("_importable")
def test_a_run_of_a_workload_of_ones_own_goes_on_to_the_bit_after_it_was_killed(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert alone(begin, whole, []) == 0
    assert alone(begin, cut, [UntilSaved(2)]) == 1, "an error that is not ours"
    assert not (cut / "final.safetensors").exists()
    assert "waited for 44 s outside of rounds" in log_of(cut, 0).read_text()
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
    model = _sharded_of(run, workload, workload.loss, world.device_mesh("cpu", 30.0), "cpu", world.rank)
    generator = torch.Generator()
    generator.set_state(model._random)
    return torch.rand(4, generator=generator).tolist()


def test_devices_of_fsdp2_draw_other_random_numbers_than_each_other_and_with_another_seed(fresh_four):
    drawn = [numbers for seed in (0, 1) for numbers in fresh_four.run(drawn_first, seed)]
    assert len(set(map(tuple, drawn))) == 8
