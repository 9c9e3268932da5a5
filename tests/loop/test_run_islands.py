"""A user's loop on islands that join and leave."""

import json
import math
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import atoll
from atoll.core.errors import ConfigError
from atoll.core.events import Attended, Computed, Leased, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.serialization import load_tree
from atoll.engines.elastic.island import IslandOutput, IslandProcess
from atoll.engines.elastic.spec import Elastic
from atoll.engines.user_code import LoopMember
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.telemetry.event_log import read_events
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate
from tests.engines.elastic.conftest import _fast_heartbeats, _frozen_garbage, threaded, toy  # noqa: F401, fixtures

WORKLOAD = Regression(hidden=3)
SETTINGS = ("train.warm_start_steps=0", "algorithm=DiLoCo(inner_steps=2)")


def loop(
    member,
    *,
    logs=True,
    tokens_of=WORKLOAD.batches.tokens,
    breaks_after=None,
    on_batch=lambda islands: None,
    steps_of_a_batch=lambda position: 1,
):
    """A user's loop. Returns the module."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.run_islands(member, model, optimizer, evaluate=WORKLOAD.evaluate) as islands:
        for shard, position in islands.batches():
            on_batch(islands)
            batch = WORKLOAD.batches.batch(shard, position)
            loss = WORKLOAD.loss(model, batch)
            loss.backward()
            for _ in range(steps_of_a_batch(position)):
                optimizer.step()
                optimizer.zero_grad()
            if logs:
                islands.log(loss.item(), tokens_of(batch))
            if islands.steps == breaks_after:
                break
    return model, islands


class Loops:
    """Islands of a threaded run, each of which runs the loop."""

    def __init__(self, live):
        self.live, self.ended, self._threads = live, {}, []

    def start(self, *names, **arguments):
        for name in names:
            thread = threading.Thread(target=self._take_part, args=(name, {**arguments}), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _take_part(self, name, arguments):
        torch.set_num_threads(1)
        opened, live, on_end = [], self.live, arguments.pop("on_end", lambda: None)
        code = arguments.pop("code", "the run's")

        folder = live.folder if name.startswith("island") else None

        def open_island(workload):
            opened.append(IslandProcess(live.join_info, live.network(), name, folder, IslandOutput(live.log), workload=workload))
            opened[0].compare_code(code)
            return opened[0]

        try:
            self.ended[name] = arguments.pop("loop", loop)(LoopMember(live.run.resolved, open_island, name, "cpu"), **arguments)
        except Exception as error:
            self.ended[name] = error
        opened[0].close(wait=not isinstance(self.ended[name], Exception))
        on_end()

    def finish(self):
        self.live.finish(self._threads)
        return self.ended


def test_without_failures_all_islands_end_with_the_simulators_weights(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(2, *SETTINGS), Elastic(processes=2)))
    loops.start("island-0000", "island-0001")
    ended = loops.finish()
    cluster = Cluster(islands=2)
    expected = simulate(atoll.DiLoCo(inner_steps=2), steps=8, workload=WORKLOAD, inner=SGD(lr=0.05), cluster=cluster)
    for model, islands in ended.values():
        assert Tree.of(model).equal(expected.params)
        assert (islands.steps, islands.rounds) == (8, 4)
    assert load_tree(loops.live.folder / "final.safetensors").equal(expected.params)
    (finished,) = loops.live.events(RunFinished)
    assert finished.val_loss == expected.finished.val_loss
    assert finished.tokens == 2 * 8 * 8
    assert all(math.isfinite(event.loss) for event in loops.live.events(Computed))


def test_a_loop_without_losses_or_tokens_trains_the_same(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(1, *SETTINGS), Elastic(processes=1)))
    loops.start("island-0000", logs=False)
    ((model, _),) = loops.finish().values()
    expected = simulate(atoll.DiLoCo(inner_steps=2), steps=8, workload=WORKLOAD, inner=SGD(lr=0.05), cluster=Cluster(islands=1))
    assert Tree.of(model).equal(expected.params)
    assert all(math.isnan(event.loss) for event in loops.live.events(Computed))


class UnequalBatches(RegressionBatches):
    """Batches of one size with unequal numbers of tokens."""

    def tokens(self, batch):
        return 1 + int((batch[1] > 0.5).sum())


def test_the_tokens_that_loops_log_weigh_their_deltas(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(2, *SETTINGS, "algorithm.weighting=tokens"), Elastic(processes=2)))
    loops.start("island-0000", "island-0001", tokens_of=UnequalBatches().tokens)
    ended = loops.finish()
    algorithm, workload = atoll.DiLoCo(inner_steps=2, weighting="tokens"), replace(WORKLOAD, batches=UnequalBatches())
    expected = simulate(algorithm, steps=8, workload=workload, inner=SGD(lr=0.05), cluster=Cluster(islands=2))
    for model, _ in ended.values():
        assert Tree.of(model).equal(expected.params)


def test_weights_by_tokens_of_a_loop_that_logs_none_are_refused(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(1, *SETTINGS, "algorithm.weighting=tokens"), Elastic(processes=1)))
    loops.start("island-0000", logs=False)
    (error,) = loops.finish().values()
    assert isinstance(error, ConfigError)
    assert "logged 0 tokens for the 2 batches of shard 0 from 0 on. Call islands.log(loss, tokens=...)" in str(error)


def test_a_loop_that_joins_a_running_run_begins_with_its_weights(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(2, *SETTINGS), Elastic(processes=1)))

    def start_joiner(islands):
        if islands.rounds == 1 and islands.steps == 2:
            loops.start("island-0001")
            loops.live.wait_until("island-0001 begins with round 1, fetched from island-0000")

    loops.start("island-0000", on_batch=start_joiner)
    ended = loops.finish()
    (first, one), (second, two) = ended["island-0000"], ended["island-0001"]
    assert Tree.of(first).equal(Tree.of(second))
    assert one.rounds == two.rounds
    assert 0 < two.steps < one.steps


def test_a_loop_that_ends_before_the_run_is_refused(threaded, toy):  # noqa: F811
    loops = Loops(threaded(toy(1, *SETTINGS), Elastic(processes=1)))
    loops.start("island-0000", breaks_after=2)
    (error,) = loops.finish().values()
    assert isinstance(error, ConfigError)
    assert "the block ended before the run did" in str(error)


@pytest.mark.parametrize(("taken", "where"), [([0, 1], "0 steps of SGD on batch 0"), ([1, 2], "2 steps of SGD on batch 1")])
def test_another_number_of_steps_than_one_per_batch_is_refused(threaded, toy, taken, where):  # noqa: F811
    loops = Loops(threaded(toy(1, *SETTINGS), Elastic(processes=1)))
    loops.start("island-0000", steps_of_a_batch=lambda position: taken[position % 2])
    (error,) = loops.finish().values()
    assert isinstance(error, ConfigError)
    assert f"the loop took {where} of shard 0, and the run counts one." in str(error)


def test_a_joiner_with_another_file_is_refused(threaded, toy):  # noqa: F811
    published, refused = threading.Event(), threading.Event()

    def waits(position):
        if position == 4:
            published.set()
            assert refused.wait(60)
        return 1

    loops = Loops(threaded(toy(1, *SETTINGS), Elastic(processes=1)))
    loops.start("island-0000", steps_of_a_batch=waits)
    assert published.wait(60)
    loops.start("box", code="another", on_end=refused.set)
    ended = loops.finish()
    assert "the workload's file of this island (another) and of island-0000 (the run's) differ" in str(ended["box"])
    assert ended["island-0000"][1].steps == 8


class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * math.inf


def test_batches_that_the_loop_or_a_gradscaler_skips_are_no_accumulation(threaded, toy):  # noqa: F811
    def skips(member):
        model = WORKLOAD.module()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0)
        with atoll.run_islands(member, model, optimizer, evaluate=WORKLOAD.evaluate) as islands:
            for shard, position in islands.batches():
                if position == 5:
                    continue  # the gradients of the step before are still there
                optimizer.zero_grad()
                loss = WORKLOAD.loss(model, WORKLOAD.batches.batch(shard, position))
                if position == 2:
                    continue
                scaler.scale(Infinite.apply(loss) if position == 1 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return model, islands

    loops = Loops(threaded(toy(1, *SETTINGS), Elastic(processes=1)))
    loops.start("island-0000", loop=skips)
    ((_, islands),) = loops.finish().values()
    assert islands.steps == 5


def member_of(run, device="cpu"):
    return LoopMember(run.resolved, lambda workload: pytest.fail("it is refused before it takes part"), "island-0001", device)


def test_what_cannot_take_part_is_refused(toy):  # noqa: F811
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    run = toy(2, *SETTINGS)
    half = torch.nn.Linear(2, 1).bfloat16()
    with pytest.raises(ConfigError, match=r"the model is torch.bfloat16, .* agree on fp32 weights"):
        atoll.run_islands(member_of(run), half, torch.optim.SGD(half.parameters()))
    with pytest.raises(
        ConfigError, match=r"the model is on cpu, and island-0001 computes on cuda:1. Use model.to\(member.device\)"
    ):
        atoll.run_islands(member_of(run, "cuda:1"), model, optimizer)
    with pytest.raises(ConfigError, match="none of the model's 2 trainable parameters"):
        atoll.run_islands(member_of(run), torch.nn.Linear(2, 1), optimizer)
    train = replace(run.train, fresh_optimizer=False, peak_first=False)
    with pytest.raises(ConfigError, match="joiner_moments=donor: the engine cannot read"):
        atoll.run_islands(member_of(replace(run, train=replace(train, joiner_moments="donor"))), model, optimizer)
    with pytest.raises(ConfigError, match="DDP steps by itself"):
        atoll.run_islands(member_of(replace(run, algorithm=atoll.DDP(), train=train)), model, None)
    with pytest.raises(ConfigError, match="not entered"):
        atoll.run_islands(member_of(run), model, optimizer).rounds  # noqa: B018
    with pytest.raises(ConfigError, match="the loop ended without a block"):
        member_of(run).check_entered()


SCRIPT = """
import json, os, threading
from pathlib import Path
import torch
import atoll
from atoll.testing.simulated_runs import Regression

WORKLOAD, HERE = Regression(hidden=3), Path(__file__).parent

def train(member):
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    restarted = (HERE / "killed").exists()
    with atoll.run_islands(member, model, optimizer, evaluate=WORKLOAD.evaluate) as islands:
        for shard, position in islands.batches():
            if islands.name == "island-0001" and restarted:
                (HERE / "rejoined").touch()
            elif islands.name == "island-0001" and islands.rounds == 3:
                (HERE / "killed").touch()
                os.kill(os.getpid(), 9)
            elif not (HERE / "rejoined").exists():
                threading.Event().wait(0.1)  # so that the run is not over before the process has been restarted
            loss = WORKLOAD.loss(model, WORKLOAD.batches.batch(shard, position))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            islands.log(loss.item(), tokens=8)
    weights = atoll.Tree.of(model).digest()
    (HERE / f"{islands.name}.json").write_text(json.dumps([weights, islands.rounds, islands.steps]))
"""


@pytest.mark.slow
def test_a_loop_of_three_processes_outlives_a_kill_9_of_one_which_rejoins_and_all_end_with_equal_digests(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    settings = ("train.steps=600", "algorithm=DiLoCo(inner_steps=2)", "keep.evaluate_every=100", "cluster.islands=3")
    command = [sys.executable, "-m", "atoll", "run", "toy-sync", "--engine", "elastic", "--workload", "own.py:train", "--quiet"]
    command += ["--out", "run", *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    found = [json.loads((tmp_path / f"island-000{number}.json").read_text()) for number in range(3)]
    assert len({tuple(one[:2]) for one in found}) == 1
    assert all(one[2] for one in found)
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert found[0][0] == next(event.digest for event in events if isinstance(event, RunFinished))
    present = [event.participating for event in events if isinstance(event, Attended)]
    assert present[0] == 3
    assert max(present[present.index(2) :]) == 3
    units = [tuple(unit[1:]) for event in events if isinstance(event, Leased) for unit in event.delivered]
    assert len(units) == len(set(units)) == 900

    report = subprocess.run(
        [sys.executable, "-m", "atoll", "report", "run"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"islands +3 known", report.stdout)
    assert "900 leases delivered, each once" in report.stdout
    assert "trace: run/trace.json" in report.stdout


@pytest.mark.slow
def test_on_ray_loops_are_workers_of_a_hub(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "ray_loop.py").write_text(SCRIPT.split("    restarted =")[0] + RAY_LOOP)
    settings = ("train.steps=40", "algorithm=AsyncLocalSGD(inner_steps=4)", "train.fresh_optimizer=false", "train.peak_first=false")
    command = [sys.executable, "-m", "atoll", "run", "toy-async", "--engine", "ray", "--processes", "2", "--quiet"]
    command += ["--workload", "ray_loop.py:train", "--out", "run", *(part for one in settings for part in ("--set", one))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (finished,) = (event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, RunFinished))
    with torch.no_grad():
        assert finished.val_loss < WORKLOAD.evaluate(WORKLOAD.module())["loss"]
    assert finished.tokens == 2 * 40 * 8


RAY_LOOP = """
    with atoll.run_islands(member, model, optimizer, evaluate=WORKLOAD.evaluate) as islands:
        for shard, position in islands.batches():
            loss = WORKLOAD.loss(model, WORKLOAD.batches.batch(shard, position))
            islands.log(loss.item(), tokens=8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
