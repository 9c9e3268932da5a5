"""A perceptron on Gaussians trains, evaluates and resumes as a decoder on text does."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import atoll
from atoll import recipes
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Computed, Evaluated, Saved
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.core.verified_files import read_record
from atoll.data.gaussians import Gaussians
from atoll.engines.training_setup import replica_of
from atoll.models.mlp import MLP
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster, Link
from atoll.runs.folder import RunFolder
from atoll.runs.generate import generate
from atoll.runs.run_settings import Keep, Run, Train, candidates, choose_computing, here
from atoll.runs.workloads import ToyWorkload, data_fingerprint, sharded_workload, single_shard_workload
from atoll.telemetry.event_log import read_events
from atoll.testing.simulated_runs import Regression
from tests.samples import SMALL

TOY = Run(
    recipe="toy",
    model=MLP.small(),
    data=Gaussians.small(),
    algorithm=DiLoCo(inner_steps=5, outer=SGD(lr=0.5)),
    optimizer=AdamW(lr=Cosine(lr=2e-3, floor=1e-6), betas=(0.9, 0.999), weight_decay=1e-3, decay="all"),
    train=Train(steps=10, batch_size=32, clip_norm=None),
    cluster=Cluster(step_time_s=(0.58, 0.75, 1.51, 3.33), link=Link(latency_s=0.0, bandwidth_mbit_per_s=math.inf)),
    keep=Keep(evaluate_every=5, save_every=5, checkpoints=9),
)


def toy(*settings):
    return override(TOY, settings, candidates)


def left_by(folder):
    """What a run leaves, to the byte."""
    return (folder / "events.jsonl").read_bytes(), (folder / "final.safetensors").read_bytes()


@pytest.fixture(scope="module")
def points():
    return TOY.data.load()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that was never stopped."""
    return atoll.run(TOY, out=tmp_path_factory.mktemp("straight") / "run")


# ------------------------------------------------------------------------------------------------------------- the workload


def test_the_loss_is_the_cross_entropy(points):
    workload = single_shard_workload(TOY, points)
    module, (inputs, labels) = workload.module(), workload.batches.batch(0, 0)
    scores = module(inputs)
    assert torch.equal(workload.loss(module, (inputs, labels)), F.cross_entropy(scores, labels))


def test_a_model_is_judged_by_the_mean_over_points_and_by_the_share_that_it_classifies_correctly(points):
    """Also where the last batch is a smaller one: 1,000 points are three batches of 256 and one of 232."""
    loaded = replace(points, settings=replace(points.settings, eval_examples=1000))
    workload = single_shard_workload(TOY, loaded)
    module, (inputs, labels) = workload.module(), workload.validation
    with torch.no_grad():
        measures, scores = workload.evaluate(module), module(inputs)
    assert measures["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-6)
    assert measures["accuracy"] == (scores.argmax(1) == labels).sum().item() / 1000


def test_weights_and_order_have_the_runs_seed_and_points_their_own(points):
    one, two = (single_shard_workload(replace(TOY, seed=seed), points) for seed in (0, 1))
    assert not Tree.of(one.module()).equal(Tree.of(two.module()))
    assert not torch.equal(one.batches.batch(0, 0)[1], two.batches.batch(0, 0)[1])
    assert torch.equal(one.validation[0], two.validation[0])


@pytest.mark.parametrize(("shards", "expected"), [(None, 4), (2, 2), (9, 9)])
def test_points_are_partitioned_into_as_many_shards_as_asked(shards, expected, points):
    run = replace(TOY, data=replace(TOY.data, shards=shards))
    assert sharded_workload(run, points, Tree.of({})).batches.num_shards == expected
    assert single_shard_workload(run, points).batches.num_shards == 1


@pytest.mark.parametrize(("shards", "expected"), [("none", 3), ("2", 2), ("5", 5)])
def test_text_is_partitioned_into_as_many_shards_as_asked(shards, expected):
    settings = [*SMALL, "train.steps=20", "cluster.islands=3", f"data.shards={shards}"]
    run = override(recipes.demo_diloco(), settings, candidates).resolved
    assert sharded_workload(run, run.data.load(), Tree.of({})).batches.num_shards == expected


def test_the_fingerprint_is_of_what_is_read_and_a_users_own_workload_has_none(points):
    mine = data_fingerprint(sharded_workload(TOY, points, Tree.of({})))
    assert mine == data_fingerprint(sharded_workload(TOY, TOY.data.load(), Tree.of({})))
    assert mine != data_fingerprint(single_shard_workload(TOY, points))
    assert data_fingerprint(Regression()) is None


def test_replicas_follow_fresh_optimizer_and_peak_first(points):
    """Two rounds of five steps: with both settings the second begins like one of a new replica, at the schedule's peak."""
    run = toy("train.fresh_optimizer=true", "train.peak_first=true").resolved
    workload = single_shard_workload(run, points)
    assert isinstance(workload, ToyWorkload)
    old, new = (replica_of(run, workload, workload.loss, island=0) for _ in range(2))
    old.train(5, Work(shard=0, start=0, schedule=0, examples=1))
    new.load(old.params())
    for replica in (old, new):
        replica.train(5, Work(shard=0, start=5, schedule=5, examples=1))
    assert old.params().equal(new.params())
    plain = replica_of(TOY.resolved, workload, workload.loss, island=0)
    plain.load(Tree.of(workload.module()))
    plain.train(5, Work(shard=0, start=0, schedule=0, examples=1))
    plain.train(5, Work(shard=0, start=5, schedule=5, examples=1))
    assert not plain.params().equal(old.params())


# ---------------------------------------------------------------------------------------------------------------- whole runs


def test_a_toy_run_learns_and_reports_accuracy(straight):
    events = list(read_events(straight.folder / "events.jsonl", [Evaluated]))
    assert [event.round for event in events] == [0, 1, 2]
    assert all(set(event.metrics) == {"loss", "accuracy"} for event in events)
    assert events[0].metrics["loss"] == pytest.approx(math.log(4), abs=0.02), "untrained, it knows nothing"
    assert events[-1].metrics["loss"] < events[1].metrics["loss"] < events[0].metrics["loss"]
    assert events[-1].metrics["accuracy"] > events[0].metrics["accuracy"] + 0.1
    assert straight.summary.params == MLP.small().num_params(512, 4)
    assert straight.summary.tokens == 10 * 4 * 32, "a toy counts its points as tokens"


def test_on_links_that_take_no_time_a_round_takes_as_long_as_the_slowest_island_computes(straight):
    times = [event.virtual_time_s for event in read_events(straight.folder / "events.jsonl", [Evaluated])]
    assert times == [0.0, 5 * 3.33, pytest.approx(10 * 3.33, rel=1e-12)]


def test_the_settings_in_the_folder_are_the_runs(straight):
    chosen, _ = choose_computing(TOY, here(TOY))
    assert RunFolder.open(straight.folder).run == replace(TOY, train=chosen)


class Fuse:
    """Stops a run before its second checkpoint."""

    def emit(self, event):
        if isinstance(event, Saved) and event.round == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("fresh", ["false", "true"])
def test_stopped_after_a_round_and_resumed_a_toy_run_leaves_the_same_bytes(fresh, tmp_path):
    run = toy(f"train.fresh_optimizer={fresh}", f"train.peak_first={fresh}")
    whole = atoll.run(run, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        atoll.run(run, out=tmp_path / "stopped", sinks=[Fuse()])
    assert atoll.resume(tmp_path / "stopped").summary.resumed_from_round == 1
    assert left_by(tmp_path / "stopped") == left_by(whole.folder)


def test_a_fresh_optimizer_changes_the_second_round_and_not_the_first(straight, tmp_path):
    fresh = atoll.run(toy("train.fresh_optimizer=true"), out=tmp_path / "run")
    one, two = (
        [(event.round, event.loss) for event in read_events(done.folder / "events.jsonl", [Computed])] for done in (straight, fresh)
    )
    first = [item for item in one if item[0] == 0]
    assert first == [item for item in two if item[0] == 0]
    assert one != two
    assert fresh.val_loss != straight.val_loss


def test_a_finished_toy_run_is_reopened_with_its_weights(straight):
    again = atoll.resume(straight.folder)
    assert again.summary == straight.summary
    assert Tree.of(again.module).equal(straight.params)


def test_a_toy_run_can_have_a_warm_start_and_fewer_shards_than_islands(tmp_path):
    done = atoll.run(toy("train.warm_start_steps=3", "data.shards=2"), out=tmp_path / "run")
    assert done.summary.warm_start_tokens == 3 * 32
    assert done.summary.local_updates == 40


def test_a_checkpoint_of_other_points_is_refused(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder)
    (folder / "final.safetensors").unlink()
    settings = read_record(folder / "run.json")
    settings["data"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"was saved by another run"):
        atoll.resume(folder)


# ------------------------------------------------------------------------------------------------------------------ refusals


def test_a_toy_run_writes_no_text(straight):
    with pytest.raises(ConfigError, match=r"trained an MLP on Gaussians: there is no text to write"):
        generate(straight.folder, "Island", tokens=5, temperature=1.0, top_k=None, seed=0)


def test_more_islands_than_points_leave_no_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"5000 shards of 4096 examples"):
        atoll.run(toy("cluster.islands=5000"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_its_own_workload_and_a_toy_run_are_not_taken_for_each_other(straight):
    with pytest.raises(ConfigError, match=r"trained its Run's own model and data, not a Regression"):
        atoll.resume(straight.folder, workload=Regression())


def test_a_perceptron_trains_all_in_bfloat16(straight, tmp_path):
    half = atoll.run(toy("train.precision=all-bf16"), out=tmp_path / "half")
    assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
    assert half.val_loss == pytest.approx(straight.val_loss, rel=0.1)


@pytest.mark.parametrize("kind", ["text", "points"])
def test_a_single_shard_is_read_on_where_the_warm_start_stopped(kind):
    base = (
        replace(TOY, cluster=replace(TOY.cluster, islands=1))
        if kind == "points"
        else override(recipes.recipe("demo-ddp"), [*SMALL, "cluster.islands=1"], candidates)
    )
    run = replace(base, train=replace(base.train, warm_start_steps=3)).resolved
    loaded = run.data.load()
    plain, mine = single_shard_workload(run, loaded), sharded_workload(run, loaded, Tree.of({}))
    for position in range(4):
        ours, theirs = mine.batches.batch(0, position), plain.batches.batch(0, 3 + position)
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    assert data_fingerprint(mine) != data_fingerprint(plain), "a checkpoint of one is not one of the other"
    cold = replace(run, train=replace(run.train, warm_start_steps=0))
    assert data_fingerprint(sharded_workload(cold, loaded, Tree.of({}))) == data_fingerprint(plain)


def test_several_shards_are_read_from_their_beginning():
    run = override(recipes.recipe("demo-ddp"), [*SMALL, "cluster.islands=2"], candidates).resolved
    loaded = run.data.load()
    warm = replace(run, train=replace(run.train, warm_start_steps=3))
    one, two = (sharded_workload(which, loaded, Tree.of({})).batches for which in (run, warm))
    assert all(torch.equal(one.batch(shard, 0), two.batch(shard, 0)) for shard in range(2))
