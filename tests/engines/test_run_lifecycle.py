"""A run leaves the same folder however often it was interrupted."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from atoll import recipes
from atoll.algorithms.diloco import DiLoCo
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError, CheckpointError, ConfigError
from atoll.core.events import Arrived, Evaluated, Exchanged, RoundFinished, Saved, WarmStartFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import sharded, shared
from atoll.core.serialization import load_tree, read_tensors
from atoll.engines import run_lifecycle
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.warm_start_training import Cache
from atoll.runs.folder import RunFolder
from atoll.runs.generate import generate
from atoll.runs.run_settings import as_recorded, candidates
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sinks import MemorySink
from atoll.testing.simulated_runs import Regression
from tests.samples import SMALL as TINY

SMALL = [*TINY, "train.steps=12", "train.warm_start_steps=4", "keep.evaluate_every=3", "keep.save_every=3"]
DILOCO = [*SMALL, "algorithm.inner_steps=3"]


def small(*more):
    return override(recipes.demo_diloco(), [*DILOCO, *more], candidates)


def left_by(folder):
    """What a run leaves, to the byte."""
    return (folder / "events.jsonl").read_bytes(), (folder / "final.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that was never stopped."""
    return run_lifecycle.run(small(), out=tmp_path_factory.mktemp("straight") / "run")


def test_the_summary_has_every_figure_and_they_agree(straight):
    summary = straight.summary.to_dict()
    asked = (
        "recipe algorithm islands params tokens warm_start_tokens local_updates outer_steps val_loss val_perplexity virtual_time_s "
        "wall_time_s sent_bytes_per_island control_bytes_per_island utilisation resumed_from_round run_dir"
    )
    assert set(asked.split()) <= set(summary)
    assert summary["recipe"] == "demo-diloco"
    assert summary["tokens"] == 12 * 4 * 4 * 16
    assert summary["warm_start_tokens"] == 4 * 4 * 16
    assert summary["local_updates"] == 12 * 4
    assert summary["outer_steps"] == 4
    assert summary["val_perplexity"] == pytest.approx(torch.tensor(summary["val_loss"]).exp().item())
    assert summary["sent_bytes_per_island"] == 4 * 2 * 3 / 4 * summary["params"] * 4
    assert summary["resumed_from_round"] == 0
    assert summary["run_dir"] == str(straight.folder)


def test_the_folder_holds_what_it_should(straight):
    names = {path.name for path in straight.folder.iterdir()}
    assert {"run.json", "source.txt", "events.jsonl", "checkpoints", "final.safetensors", "summary.json"} <= names
    assert [p.name for p in sorted((straight.folder / "checkpoints").iterdir())] == ["00000003", "00000004"]
    assert json.loads((straight.folder / "summary.json").read_text())["val_loss"] == straight.val_loss


def test_a_folder_records_the_precision_that_was_chosen_and_a_resumed_run_keeps_it(straight, tmp_path):
    assert small().train.precision == small().train.compile == "auto"
    recorded = json.loads((straight.folder / "run.json").read_text())
    assert (recorded["train"]["precision"], recorded["train"]["compile"]) == ("fp32", False)
    RunFolder.open(straight.folder).same_run(as_recorded(small(), RunFolder.open(straight.folder).run))
    shutil.copytree(straight.folder, tmp_path / "cuda")
    (tmp_path / "cuda" / "summary.json").unlink()
    (tmp_path / "cuda" / "final.safetensors").unlink()
    recorded["train"].update(device="auto", precision="bf16")
    del recorded["blake2b"]  # or the change would be found before the precision is compared
    (tmp_path / "cuda" / "run.json").write_text(json.dumps(recorded))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="computes in bf16"):
            run_lifecycle.resume(tmp_path / "cuda")


def saved_types(node):
    """The names of all types in saved JSON."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = {node["type"]} if isinstance(node, dict) and "type" in node else set()
    return found.union(*map(saved_types, inner))


def test_saved_type_names_are_part_of_the_format(straight):
    """A renamed class is a new format: raise RUN_FORMAT of telemetry/run_progress.py or FORMAT of engines/checkpoints.py, then
    change the names here."""
    run, engine, meta = (
        json.loads((straight.folder / name).read_text()) for name in ("run.json", "engine.json", "checkpoints/00000004/meta.json")
    )
    parts = (straight.folder / "checkpoints").rglob("*.safetensors")
    part_types = set().union(*(saved_types(json.loads(read_tensors(part)[1]["structure"])) for part in parts))
    assert (run["format"], engine["format"], meta["content"]["format"]) == (2, 1, 3)
    expected = ["AdamW", "Cluster", "Cosine", "DiLoCo", "GPT", "IID", "Keep", "Link", "Nesterov", "Run", "Text", "Train"]
    assert sorted(saved_types(run)) == expected
    assert part_types == {"MomentumState"}
    assert engine["engine"] == "simulator"


def test_no_saved_file_names_a_module(straight):
    for path in straight.folder.rglob("*"):
        if path.is_file() and path.name != "source.txt":  # which has the user's command
            modules = re.findall(rb"\batoll\.\w+", path.read_bytes())
            assert set(modules) <= {b"atoll.layout", b"atoll.blake2b"}, f"{path.name}: two metadata keys alone have a dot"


def test_the_trained_module_has_the_final_weights(straight):
    final = load_tree(straight.folder / "final.safetensors")
    assert Tree.of(straight.module).equal(final)
    assert straight.params.equal(final)


def test_the_validation_loss_is_the_mean_of_the_batch_losses_of_the_global_weights(straight):
    data = small().data.load().open(num_shards=4, batch_size=4, seed=0)
    with torch.no_grad():
        losses = [straight.module.loss(batch).item() for batch in data.validation]
    assert straight.val_loss == sum(losses) / len(losses)


def test_the_same_seed_leaves_the_same_bytes_and_another_seed_does_not(straight, tmp_path):
    again = run_lifecycle.run(small(), out=tmp_path / "again")
    other = run_lifecycle.run(replace(small(), seed=1), out=tmp_path / "other")
    assert left_by(again.folder) == left_by(straight.folder)
    assert left_by(other.folder) != left_by(straight.folder)


def test_runs_that_share_text_and_warm_start_leave_the_same_bytes(straight, tmp_path):
    cache = Cache()
    ddp = override(recipes.demo_ddp(), SMALL, candidates)
    run_lifecycle.run(ddp, out=tmp_path / "ddp", cache=cache)
    shared = run_lifecycle.run(small(), out=tmp_path / "shared", cache=cache)
    assert left_by(shared.folder) == left_by(straight.folder)


def test_a_warm_start_is_reported_apart_and_is_the_same_for_every_algorithm(straight, tmp_path):
    ddp = run_lifecycle.run(override(recipes.demo_ddp(), SMALL, candidates), out=tmp_path / "ddp")
    starts = []
    for folder in (ddp.folder, straight.folder):
        warm = next(read_events(folder / "events.jsonl", [WarmStartFinished]))
        first = next(read_events(folder / "events.jsonl", [Evaluated]))
        assert first.tokens == first.virtual_time_s == first.sent_bytes_per_island == 0
        starts.append((warm, first.metrics))
    assert starts[0] == starts[1]


def test_from_scratch_there_is_no_warm_start(tmp_path):
    done = run_lifecycle.run(small("train.warm_start_steps=0"), out=tmp_path / "run")
    assert done.summary.warm_start_tokens == 0
    assert not list(read_events(done.folder / "events.jsonl", [WarmStartFinished]))


# ------------------------------------------------------------------------------------------------------------- kill and go on


KILLED = """
import os, signal, sys
import atoll
from atoll.runs.run_settings import as_recorded, candidates
from atoll.core.config.overrides import override

class Bomb:
    def __init__(self, kind, count):
        self.kind, self.count = kind, int(count)

    def emit(self, event):
        self.count -= type(event).__name__ == self.kind
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

recipe, folder, kind, count, *settings = sys.argv[1:]
atoll.run(override(atoll.recipes.recipe(recipe), settings, candidates), out=folder, sinks=[Bomb(kind, count)])
"""


def killed(recipe, folder, event, count, settings):
    """A run in a process of its own, which is killed without warning at this event."""
    command = [sys.executable, "-c", KILLED, recipe, str(folder), event, str(count), *settings]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("event", "count", "resumes_from"),
    [("Progress", 1, 0), ("Computed", 3, 0), ("Exchanged", 2, 1), ("Saved", 3, 2), ("RunFinished", 1, 4)],
)
def test_killed_at_any_moment_and_resumed_a_run_leaves_the_bytes_of_one_that_was_never_stopped(
    event, count, resumes_from, straight, tmp_path
):
    """A process of its own, which is killed without warning in the warm start, in a round, before a save, or at the very end."""
    folder = tmp_path / "run"
    killed("demo-diloco", folder, event, count, DILOCO)
    resumed = run_lifecycle.resume(folder)
    assert left_by(folder) == left_by(straight.folder)
    assert resumed.summary.resumed_from_round == resumes_from
    assert Tree.of(resumed.module).equal(straight.params)


ASYNC = [
    *SMALL,
    "algorithm.inner_steps=4",
    "algorithm.pace=measured",
    "algorithm.grace_s=1.0",
    "cluster.step_time_jitter=0.1",
    "cluster.outages=[Outage(island=1,start_s=2.5,stop_s=7.0)]",
]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    return run_lifecycle.run(override(recipes.demo_async(), ASYNC, candidates), out=tmp_path_factory.mktemp("async") / "run")


@pytest.mark.parametrize(("event", "count"), [("Computed", 1), ("Arrived", 7), ("Saved", 3)])
def test_killed_with_workers_out_and_resumed_an_asynchronous_run_leaves_the_same_bytes(event, count, never_stopped, tmp_path):
    """Open rounds begin again from the weights that they were dispatched with, at their old time."""
    killed("demo-async", tmp_path / "run", event, count, ASYNC)
    resumed = run_lifecycle.resume(tmp_path / "run")
    assert left_by(tmp_path / "run") == left_by(never_stopped.folder)
    assert (resumed.summary.resumed_from_round > 0) == (event != "Computed")
    assert Tree.of(resumed.module).equal(never_stopped.params)


def test_an_asynchronous_run_is_summarised_like_any_other(never_stopped):
    summary = never_stopped.summary
    assert summary.algorithm == "AsyncLocalSGD"
    assert 12 * 4 <= summary.local_updates < 12 * 4 + 4
    assert summary.outer_steps == summary.rounds
    assert summary.tokens == summary.local_updates * 4 * 16
    pushes = [event.sent_bytes for event in read_events(never_stopped.folder / "events.jsonl", [Arrived])]
    assert pushes == [summary.params * 4] * summary.rounds
    assert summary.sent_bytes_per_island == sum(pushes) / 4


def test_every_checkpoint_leads_to_the_same_end(straight, tmp_path):
    """Not only the newest: each of them, with the log that was there at the time or any longer one."""
    run = small("keep.checkpoints=10")
    whole = run_lifecycle.run(run, out=tmp_path / "whole")
    for round in (3, 2, 1):
        later = Checkpoints(whole.folder / "checkpoints", keep=10)
        for name in later.rounds():
            if name > round:
                for path in (whole.folder / "checkpoints" / f"{name:08}").iterdir():
                    path.unlink()
                (whole.folder / "checkpoints" / f"{name:08}").rmdir()
        (whole.folder / "final.safetensors").unlink()
        again = run_lifecycle.resume(whole.folder)
        assert again.summary.resumed_from_round == round
        assert left_by(whole.folder) == left_by(straight.folder)


def test_resuming_a_finished_run_gives_its_summary_and_computes_nothing(straight):
    before, sink = left_by(straight.folder), MemorySink()
    again = run_lifecycle.resume(straight.folder, sinks=[sink])
    assert again.summary == straight.summary
    assert sink.events == []
    assert left_by(straight.folder) == before
    assert Tree.of(again.module).equal(straight.params)


def test_a_new_run_does_not_overwrite_an_old_one(straight):
    with pytest.raises(ConfigError, match=r"already.*--resume"):
        run_lifecycle.run(small(), out=straight.folder)


def test_a_truncated_checkpoint_is_refused_by_name(tmp_path):
    done = run_lifecycle.run(small(), out=tmp_path / "run")
    (done.folder / "final.safetensors").unlink()
    victim = done.folder / "checkpoints" / "00000004" / "shared.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"shared.safetensors"):
        run_lifecycle.resume(done.folder)


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(tmp_path):
    """The rate is sound for two rounds and explodes in the third: what was saved before stands, and is finite."""
    explosive = "optimizer=SGD(lr=WSD(lr=1e18,steps=12,warmup=12,decay=0))"
    sound = small("train.clip_norm=none", "train.warm_start_steps=0", "optimizer=SGD(lr=0.01)", "keep.checkpoints=9")
    poisoned = override(sound, [explosive], candidates)

    class Fuse:
        def emit(self, event):
            if isinstance(event, Saved) and event.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_lifecycle.run(sound, out=tmp_path / "run", sinks=[Fuse()])
    assert Checkpoints(tmp_path / "run" / "checkpoints", keep=9).rounds() == [1]
    with pytest.raises(AtollError, match=r"the loss is (nan|inf) on island \d in round \d"):
        run_lifecycle.run(poisoned, out=tmp_path / "bad")
    assert not (tmp_path / "bad" / "final.safetensors").exists()
    for path in tmp_path.rglob("shared.safetensors"):
        tensors, _ = read_tensors(path)
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    done = run_lifecycle.resume(tmp_path / "run")
    assert done.summary.resumed_from_round == 1


def test_a_warm_start_that_is_not_finite_is_named_and_not_kept(tmp_path):
    with pytest.raises(AtollError, match=r"at step \d of the warm start"):
        run_lifecycle.run(small("train.warm_start_lr=1e18", "train.clip_norm=none", "optimizer=SGD(lr=0.1)"), out=tmp_path / "run")
    assert not (tmp_path / "run" / "warm_start.safetensors").exists()


def test_a_checkpoint_of_another_run_is_refused_even_if_its_shapes_fit(straight, tmp_path):
    other = run_lifecycle.run(replace(small(), seed=5), out=tmp_path / "run")
    (other.folder / "final.safetensors").unlink()
    shutil.rmtree(other.folder / "checkpoints")
    shutil.copytree(straight.folder / "checkpoints", other.folder / "checkpoints")
    with pytest.raises(CheckpointError, match=r"was saved by another run"):
        run_lifecycle.resume(other.folder)


def test_text_that_changed_since_the_checkpoint_is_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Island {number} lies in the sea. " * 30)
    settings = [f"data.corpus=files:{text}", "data.limit_bytes=none", "keep.checkpoints=9"]
    done = run_lifecycle.run(small(*settings), out=tmp_path / "run")
    (done.folder / "final.safetensors").unlink()
    (text / "7.txt").write_text("Something else entirely. " * 40)
    with pytest.raises(CheckpointError, match=r"its data"):
        run_lifecycle.resume(done.folder)


def test_what_cannot_be_run_leaves_no_folder(tmp_path):
    with pytest.raises(AtollError):
        run_lifecycle.run(small("data.corpus=files:/nowhere"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------- extensions


def test_any_module_with_a_loss_can_be_trained(tmp_path):
    run = small("optimizer=AdamW(lr=0.05)", "algorithm.outer=SGD(lr=1.0)", "train.steps=60", "keep.evaluate_every=60")
    done = run_lifecycle.run(run, out=tmp_path / "run", workload=Regression(hidden=4))
    assert done.val_loss < 0.5
    assert done.summary.params == sum(p.numel() for p in Regression(hidden=4).module().parameters())


def test_a_run_of_its_own_workload_is_not_taken_for_a_decoders(tmp_path):
    run = small("optimizer=AdamW(lr=0.05)", "train.warm_start_steps=0")
    done = run_lifecycle.run(run, out=tmp_path / "run", workload=Regression(hidden=4))
    with pytest.raises(ConfigError, match=r"trained a user's workload, Regression.*workload="):
        run_lifecycle.resume(done.folder)
    assert run_lifecycle.resume(done.folder, workload=Regression(hidden=4)).summary == done.summary


@dataclass(frozen=True)
class ShardedState:
    params: Tree = shared()
    slice: Tree = sharded()


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """Each rank keeps a slice, as a sharded optimizer does: a window on the first weights, then of its own."""

    steps_per_round = 3

    def init(self, params, peers):
        return ShardedState(params, params.shard(peers.rank, peers.size))

    async def round(self, state, replica, peers):
        replica.load(state.params)
        await replica.train(3, peers.work(3))
        summed = await peers.reduce_scatter(state.params - replica.params())
        mean = await peers.all_gather(summed.value / summed.weight)
        params = state.params.add(mean, -1.0)
        return ShardedState(params, params.shard(peers.rank, peers.size) * 1.0)


@pytest.mark.parametrize("islands", [1, 3])
def test_sharded_state_is_resumed_shard_by_shard(islands, tmp_path):
    run = replace(small("keep.checkpoints=9", f"cluster.islands={islands}"), algorithm=Sharded())
    whole = run_lifecycle.run(run, out=tmp_path / "run")
    before = left_by(whole.folder)
    for round in (4, 3):
        shutil.rmtree(whole.folder / "checkpoints" / f"{round:08}")
    (whole.folder / "final.safetensors").unlink()
    assert run_lifecycle.resume(whole.folder).summary.resumed_from_round == 2
    assert left_by(whole.folder) == before


def test_evaluations_and_checkpoints_are_as_frequent_as_set(tmp_path):
    done = run_lifecycle.run(small("keep.evaluate_every=6", "keep.save_every=9", "keep.checkpoints=9"), out=tmp_path / "run")
    assert [event.round for event in read_events(done.folder / "events.jsonl", [Evaluated])] == [0, 2, 4]
    assert [event.round for event in read_events(done.folder / "events.jsonl", [Saved])] == [3, 4]


def test_a_finished_run_can_be_reported_and_generates_text_without_its_corpus(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Island {number} lies in the sea. " * 30)
    done = run_lifecycle.run(
        small(f"data.corpus=files:{text}", "data.limit_bytes=none", "data.tokenizer=bpe:280"), out=tmp_path / "run"
    )
    shutil.rmtree(text)
    assert RunFolder.open(done.folder).finished
    written = generate(done.folder, "Island", tokens=5, temperature=1.0, top_k=None, seed=0)
    assert written.startswith("Island")


def test_a_warm_start_on_other_text_is_trained_again(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"Island {number} lies in the sea. " * 30)
    run = small(f"data.corpus=files:{text}", "data.limit_bytes=none")

    class Fuse:
        def emit(self, event):
            if isinstance(event, Evaluated):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_lifecycle.run(run, out=tmp_path / "run", sinks=[Fuse()])
    (text / "7.txt").write_text("Something else entirely. " * 40)
    resumed = run_lifecycle.resume(tmp_path / "run")
    assert left_by(resumed.folder) == left_by(run_lifecycle.run(run, out=tmp_path / "fresh").folder)


def test_buffers_are_read_back_with_a_finished_run(tmp_path):
    @dataclass(frozen=True)
    class Normed(Regression):
        def module(self):
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    run = small("optimizer=AdamW(lr=0.05)", "train.warm_start_steps=0")
    done = run_lifecycle.run(run, out=tmp_path / "run", workload=Normed())
    again = run_lifecycle.resume(done.folder, workload=Normed())
    for module in (done.module, again.module):
        module.eval()
        with torch.no_grad():
            assert Normed().evaluate(module)["loss"] == done.val_loss


@pytest.mark.parametrize(
    "setting", ["data.partition=ByDomain", "cluster.away=[Away(island=0,start=1,stop=2),Away(island=1,start=1,stop=2)]"]
)
def test_a_run_that_cannot_be_partitioned_or_has_no_islands_leaves_no_folder(setting, tmp_path):
    islands = 50 if "ByDomain" in setting else 2
    with pytest.raises(AtollError):
        run_lifecycle.run(small(setting, f"cluster.islands={islands}"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_without_a_loss_is_refused_before_anything_is_trained(tmp_path):
    @dataclass(frozen=True)
    class Lossless(Regression):
        def evaluate(self, module):
            return {"accuracy": 1.0}

    sink = MemorySink()
    with pytest.raises(ConfigError, match=r"evaluate returned \['accuracy'\].*loss"):
        run_lifecycle.run(
            small("optimizer=AdamW(lr=0.05)", "train.warm_start_steps=0"), out=tmp_path / "run", workload=Lossless(), sinks=[sink]
        )
    assert not sink.of(RoundFinished)


def test_an_outer_schedule_left_open_is_as_long_as_the_rounds(tmp_path):
    run = small("algorithm.outer=Nesterov(lr=Cosine(lr=0.7))")
    assert run.resolved.algorithm.outer.lr.steps == 4
    assert run_lifecycle.run(run, out=tmp_path / "run").summary.outer_steps == 4


def test_tensorboard_files_are_written_when_asked(tmp_path):
    done = run_lifecycle.run(small("keep.tensorboard=true"), out=tmp_path / "run")
    assert list((done.folder / "tensorboard").iterdir())


def test_a_missing_tensorboard_is_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"TensorBoard logs need torch\.utils\.tensorboard"):
        run_lifecycle.run(small("keep.tensorboard=true"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("partition", ["ByDomain", "Dirichlet(alpha=0.5)", "KMeans"])
def test_islands_with_different_data_run_and_weigh_by_examples(partition, tmp_path):
    settings = [f"data.partition={partition}", "cluster.islands=2"]
    done = run_lifecycle.run(small(*settings, "algorithm.weighting=examples"), out=tmp_path / "run")
    even = run_lifecycle.run(small(*settings), out=tmp_path / "even")
    assert done.summary.digest != even.summary.digest, "the shards differ in size, so the weights must matter"
    weights = {event.weight for event in read_events(done.folder / "events.jsonl", [Exchanged])}
    assert len(weights) == 1
    assert weights.pop() > 1000, "the weight of an exchange is the number of examples of all shards"


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.inner_steps=6",
        "cluster.islands=1",
        "cluster.islands=8",
        "cluster.drop_probability=0.5",
        "cluster.pool=ramp_up",
        "cluster.pool=[1,3,2]",
        "cluster.topology=star",
        "cluster.step_time_jitter=0.1",
        "algorithm.outer=SGD(lr=1.0)",
        "algorithm.outer=Momentum(lr=0.3)",
        "algorithm.outer=Adam(lr=0.3,eps=0.1)",
        "algorithm.pruned=0.5",
        "train.warm_start_steps=0",
        "train.micro_batches=2",
        "model.tied=false",
        "optimizer=SGD(lr=0.1)",
    ],
)
def test_every_ablation_is_a_setting(setting, straight, tmp_path):
    done = run_lifecycle.run(small(setting), out=tmp_path / "run")
    assert done.summary.steps == 12
    assert (done.folder / "events.jsonl").read_bytes() != (straight.folder / "events.jsonl").read_bytes(), "it changed nothing"


def test_diloco_is_the_algorithm(straight):
    assert isinstance(small().algorithm, DiLoCo)
    assert straight.summary.algorithm == "DiLoCo"


# --------------------------------------------------------------------------------------------------------------- two levels


class Stop:
    """A sink that interrupts the run at the end of a round."""

    def __init__(self, round):
        self._round = round

    def emit(self, event):
        if isinstance(event, RoundFinished) and event.round == self._round:
            raise KeyboardInterrupt


@pytest.mark.parametrize("inside", ["ACCO(wire=bf16)", "DDP"])
def test_interrupted_and_resumed_a_run_of_two_levels_leaves_the_same_bytes(inside, tmp_path):
    settings = [*DILOCO, "cluster.islands=2", "cluster.lost=[Lost(island=1,round=1)]", f"inside={inside}"]
    run = override(recipes.demo_two_level(), settings, candidates)
    straight = run_lifecycle.run(run, out=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run_lifecycle.run(run, out=tmp_path / "run", sinks=[Stop(3)])
    resumed = run_lifecycle.resume(tmp_path / "run")
    assert resumed.summary.resumed_from_round == 2
    assert left_by(tmp_path / "run") == left_by(tmp_path / "straight")
    assert straight.summary.algorithm == f"DiLoCo over {inside.split('(')[0]}"
    assert straight.summary.to_dict()["inside_bytes_per_device"] > straight.summary.sent_bytes_per_island


@pytest.mark.parametrize(("recipe", "more"), [("demo-diloco", ["algorithm.inner_steps=3"]), ("demo-ddp", [])])
def test_a_run_all_in_bfloat16_resumes_to_the_byte_and_keeps_its_masters_digits(recipe, more, tmp_path):
    settings = [*SMALL, "train.precision=all-bf16", *more]
    whole = run_lifecycle.run(override(recipes.recipe(recipe), settings, candidates), out=tmp_path / "whole")
    killed(recipe, tmp_path / "run", "Saved", 2, settings)
    resumed = run_lifecycle.resume(tmp_path / "run")
    assert left_by(tmp_path / "run") == left_by(whole.folder)
    assert {p.dtype for p in resumed.module.parameters()} == {torch.bfloat16}
    assert whole.params.flat.dtype == torch.float32
    assert not whole.params.equal(whole.params.cast(torch.bfloat16).wide())
