"""Islands that share one device: stacked or apart, the numbers are the same within rounding."""

import gc
import json
import shutil
import weakref

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Arranged, Computed, Evaluated, MemoryCounted
from atoll.core.protocols import Work
from atoll.engines import run_lifecycle
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import GradientJob, LocalReplica, RoundStart, TrainJob
from atoll.replica.vmap_stack import VmapStack
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import read_events
from benchmarks.decoder_workload import DecoderWorkload, RepeatedBatch
from tests.samples import SMALL

torch.set_num_threads(1)

SHORT = [*SMALL, "train.steps=12", "train.warm_start_steps=0", "keep.evaluate_every=6", "keep.save_every=6"]
SHORT += ["optimizer.lr.lr=0.003"]  # at the demo's rate a difference of 1e-7 is one of 1e-2 after ten steps
DILOCO = [*SHORT, "algorithm.inner_steps=3"]
ASYNC = [*SHORT, "algorithm.inner_steps=3", "algorithm.grace_s=100", "cluster.step_time_s=[1,1,2,3]"]
RECIPES = {
    "diloco": (recipes.demo_diloco, DILOCO),
    "diloco with half its messages lost": (recipes.demo_diloco, [*DILOCO, "cluster.drop_probability=0.5"]),
    "diloco with a pool that grows": (recipes.demo_diloco, [*DILOCO, "cluster.pool=ramp_up"]),
    "ddp": (recipes.demo_ddp, SHORT),
    "acco": (recipes.demo_acco, SHORT),
    "async": (recipes.demo_async, ASYNC),
}


def the_run(name, together, folder, **options):
    recipe, settings = RECIPES[name]
    run = override(recipe(), [*settings, f"train.together={together}"], candidates)
    return run_lifecycle.run(run, out=folder, **options)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_whose_islands_are_stacked_has_the_numbers_of_one_whose_islands_are_apart(name, tmp_path):
    apart, stacked = (the_run(name, how, tmp_path / how) for how in ("apart", "stacked"))
    losses = [
        [event.metrics["loss"] for event in read_events(run.folder / "events.jsonl", [Evaluated])] for run in (apart, stacked)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    computed = [list(read_events(run.folder / "events.jsonl", [Computed])) for run in (apart, stacked)]
    assert [(e.island, e.start_s, e.end_s, e.steps) for e in computed[0]] == [
        (e.island, e.start_s, e.end_s, e.steps) for e in computed[1]
    ]
    held = [
        [event.gradients_bytes for event in read_events(run.folder / "events.jsonl", [MemoryCounted])] for run in (apart, stacked)
    ]
    assert bool(held[0]) == (name != "async"), "of a hub's workers it is not counted"
    assert held[0] == held[1], "what an island holds does not depend on how it is computed"
    assert [e.how for e in read_events(stacked.folder / "events.jsonl", [Arranged])] == ["stacked"]
    assert not list(read_events(apart.folder / "events.jsonl", [Arranged]))


@pytest.mark.parametrize("name", ["diloco", "async"])
def test_a_resumed_stacked_run_has_the_bits_of_one_that_was_not_stopped(name, tmp_path):
    straight = the_run(name, "stacked", tmp_path / "straight")
    again = the_run(name, "stacked", tmp_path / "again")
    assert (straight.folder / "final.safetensors").read_bytes() == (again.folder / "final.safetensors").read_bytes()
    checkpoints = sorted((again.folder / "checkpoints").iterdir())
    for late in (*checkpoints[1:], again.folder / "final.safetensors", again.folder / "result.json"):
        remove(late)
    resumed = run_lifecycle.resume(again.folder)
    assert (straight.folder / "final.safetensors").read_bytes() == (resumed.folder / "final.safetensors").read_bytes()


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.slow), ["cluster.drop_probability=0.2", "cluster.step_time_jitter=0.3"]]
)
def test_a_stacked_run_without_windows_has_the_same_bits_wherever_it_was_cut(more, tmp_path):
    """Which islands compute together depends on where the run was cut."""
    settings = [
        *SHORT,
        "algorithm.inner_steps=3",
        "algorithm.grace_s=0",
        "cluster.step_time_s=[1,1,2,3]",
        "keep.save_every=1",
        *more,
    ]
    settings += ["keep.checkpoints=50", "train.together=stacked"]
    straight = run_lifecycle.run(override(recipes.demo_async(), settings, candidates), out=tmp_path / "straight")
    final = (straight.folder / "final.safetensors").read_bytes()
    names = sorted(path.name for path in (straight.folder / "checkpoints").iterdir())
    assert len(names) > 5
    for cut in (1, len(names) // 2, len(names) - 2):
        again = tmp_path / f"cut{cut}"
        shutil.copytree(straight.folder, again)
        for late in (
            *(again / "checkpoints" / name for name in names[cut + 1 :]),
            again / "final.safetensors",
            again / "result.json",
        ):
            remove(late)
        assert (run_lifecycle.resume(again).folder / "final.safetensors").read_bytes() == final


def remove(path):
    if path.is_dir():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()


def replicas(count, **options):
    workload = DecoderWorkload.of(GPT(layers=1, width=8, heads=1, head_size=8), vocab_size=13)
    return workload, [LocalReplica(workload, optimizer=AdamW(lr=0.01), **options) for _ in range(count)]


def trainings(made):
    return [TrainJob(replica, 2, Work(shard=0, start=0, schedule=0, examples=1)) for replica in made]


def test_measuring_leaves_no_trace():
    workload, made = replicas(3)
    before = made[0].params()
    together = BatchedCompute("auto", 3, workload.loss, compiled=False, on_decision=print)
    together._decide(trainings(made))
    assert made[0].params().equal(before)
    assert not made[0].optimizer.state
    assert made[0].steps_taken == 0


@pytest.mark.parametrize(
    ("one_s", "all_s", "how", "min_jobs"),
    [(0.01, 0.015, "stacked", 2), (0.01, 0.025, "stacked", 3), (0.01, 0.04, "apart", 3), (1.0, 0.1, "apart", 2)],
)
def test_auto_chooses_the_faster_way(one_s, all_s, how, min_jobs, monkeypatch):
    workload, made = replicas(3)
    times = iter([one_s, all_s])
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    decisions = []
    together = BatchedCompute("auto", 3, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news))
    answers = together(trainings(made))
    together.report()
    together.report()
    assert together.how == how
    assert together._min_jobs == min_jobs
    assert [news[0] for news in decisions] == [how]
    assert [len(trained.losses) for _, trained in answers] == [2, 2, 2]


@pytest.mark.parametrize("round_start", [RoundStart(), RoundStart(fresh_optimizer=True, peak_first=True)], ids=["kept", "fresh"])
@pytest.mark.parametrize(("all_s", "stacked"), [(0.015, 3), (0.025, 2)])
def test_steps_that_too_few_islands_have_left_are_not_stacked(all_s, stacked, round_start, monkeypatch):
    """Rounds of 5, 3 and 2 steps. All rows of a stack are computed, so with fewer islands than pay the rest is computed apart."""
    (workload, alone), (_, together) = replicas(3, round_start=round_start), replicas(3, round_start=round_start)
    times, passes = iter([0.01, all_s]), []
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    batched = BatchedCompute("auto", 3, workload.loss, compiled=False, on_decision=print)
    backward = VmapStack._backward
    monkeypatch.setattr(VmapStack, "_backward", lambda stack, batches: passes.append(len(batches)) or backward(stack, batches))
    for start in (0, 7):  # twice: moments are carried over, or reset
        works = [Work(shard=0, start=start + number, schedule=start, examples=1) for number in range(3)]
        expected = [replica.train(steps, work) for replica, steps, work in zip(alone, (5, 3, 2), works, strict=True)]
        jobs = [TrainJob(replica, steps, work) for replica, steps, work in zip(together, (5, 3, 2), works, strict=True)]
        for one, (_, two) in zip(expected, batched(jobs), strict=True):
            assert two.losses == pytest.approx(one.losses, rel=1e-4)
            assert two.tokens == one.tokens
    assert len(passes) == 2 * stacked
    assert [replica.steps_taken for replica in together] == [10, 6, 4]
    for one, two in zip(alone, together, strict=True):
        assert torch.allclose(one.params().flat, two.params().flat, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "pass_s", "why"),
    [
        (1, 0.01, "one island computes at a time"),
        (2, 0.2, "one island's batch fills the device"),
        (2, 0.01, "it was measured to be faster"),
    ],
)
def test_the_reason_to_compute_apart_is_reported(rows, pass_s, why, monkeypatch):
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    workload, made = replicas(rows)
    times, decisions = iter([pass_s, 3 * pass_s]), []
    together = BatchedCompute("auto", rows, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news))
    together(trainings(made))
    together.report()
    assert decisions == [("apart", why)]


@pytest.mark.parametrize(("one_s", "all_s"), [(0.01, 0.025), (0.01, 0.04)])
def test_a_resumed_run_keeps_its_decision_and_measures_nothing(one_s, all_s, monkeypatch):
    workload, made = replicas(3)
    times, decisions = iter([one_s, all_s]), []
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    first, second = (
        BatchedCompute("auto", 3, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news)) for _ in range(2)
    )
    unsettled = first.to_part()
    first(trainings(made))
    second.from_part(unsettled)
    assert second.how == "auto", "nothing was settled yet"
    second.from_part(json.loads(json.dumps(first.to_part())))
    assert second.to_part() == first.to_part(), "also if it is saved again before anything was computed"
    second(trainings(made))
    second.report()
    assert second.to_part() == first.to_part()
    assert second.to_part()["all"] == (first.how == "stacked")
    assert decisions == [], "the log says so already"


def test_replicas_that_cannot_be_stacked_compute_apart_with_a_reported_reason():
    workload, made = replicas(2, micro_batches=2)
    decisions = []
    together = BatchedCompute("auto", 2, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news))
    together(trainings(made))
    together.report()
    assert decisions == [("apart", "each batch is cut into micro-batches, because one fills the device")]
    with pytest.raises(ConfigError, match=r"train\.together=stacked: each batch is cut"):
        BatchedCompute("stacked", 2, workload.loss, compiled=False, on_decision=print)(trainings(made))


class Shorter(RepeatedBatch):
    """Fewer tokens in shard 1 from the second batch on."""

    def batch(self, shard, position):
        generator = torch.Generator().manual_seed(position)
        return torch.randint(13, (2, 5 if shard and position else 9), generator=generator)


def test_after_batches_of_different_shapes_auto_computes_apart(monkeypatch):
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    workload = DecoderWorkload(GPT(layers=1, width=8, heads=1, head_size=8), Shorter(torch.zeros(2, 9, dtype=torch.int64)), 13)
    alone, stacked = ([LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(2)] for _ in range(2))
    jobs = [TrainJob(replica, 3, Work(shard=number, start=0, schedule=0, examples=1)) for number, replica in enumerate(stacked)]
    times, decisions = iter([0.01, 0.012]), []
    together = BatchedCompute("auto", 2, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news))
    answers = together(jobs)
    together.report()
    for number, replica in enumerate(alone):
        whole = replica.train(3, jobs[number].work)
        assert answers[number][1].losses == pytest.approx(whole.losses, rel=1e-5)
        assert answers[number][1].tokens == whole.tokens
        assert torch.allclose(replica.params().flat, stacked[number].params().flat, atol=1e-6)
    ((how, why),) = decisions
    assert how == "apart"
    assert "(2, 5)" in why
    asks = [
        GradientJob(replica, Work(shard=number, start=1, schedule=0, examples=1), None, None, "batches", False)
        for number, replica in enumerate(stacked)
    ]
    assert [gradient.tokens for gradient, _ in together(asks)] == [16, 8]
    times = iter([0.01, 0.012])
    fresh = BatchedCompute("auto", 2, workload.loss, compiled=False, on_decision=print)
    assert [gradient.tokens for gradient, _ in fresh(asks)] == [16, 8]
    assert fresh.how == "apart"
    with pytest.raises(ConfigError, match=r"train\.together=stacked: batches have the shapes .* Use train\.together=auto"):
        BatchedCompute("stacked", 2, workload.loss, compiled=False, on_decision=print)(jobs)


def test_a_stack_is_freed_by_close_and_made_again_by_the_next_job():
    workload, made = replicas(2)
    together = BatchedCompute("stacked", 2, workload.loss, compiled=False, on_decision=print)
    together(trainings(made))
    gone = weakref.ref(together._all)
    gc.disable()
    try:
        settled = together.to_part()
        together.close()
        assert gone() is None, "without waiting for a collector, which knows nothing of a device's memory"
    finally:
        gc.enable()
    assert together.to_part() == settled
    together(trainings(made))
    assert together._all is not None


def test_a_stack_with_ragged_batches_is_freed_at_once(monkeypatch):
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._seconds", lambda compute, device: next(times))
    workload = DecoderWorkload(GPT(layers=1, width=8, heads=1, head_size=8), Shorter(torch.zeros(2, 9, dtype=torch.int64)), 13)
    made, times = [LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(2)], iter([0.01, 0.012])
    together = BatchedCompute("auto", 2, workload.loss, compiled=False, on_decision=print)
    first, second = (
        [TrainJob(replica, 1, Work(shard=shard, start=start, schedule=0, examples=1)) for shard, replica in enumerate(made)]
        for start in (0, 1)
    )
    together(first)
    gone = weakref.ref(together._all)
    gc.disable()
    try:
        together(second)
        assert gone() is None
    finally:
        gc.enable()


def test_a_stack_without_memory_for_moments_is_freed_at_once(monkeypatch):
    made = []

    class TooLarge(VmapStack):
        def reserve_moments(self):
            made.append(weakref.ref(self))
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("atoll.engines.simulator.batched_compute.VmapStack", TooLarge)
    monkeypatch.setattr("atoll.engines.simulator.batched_compute._FILLED_S", 60.0)  # on a machine that is busy, too
    workload = DecoderWorkload.of(GPT(layers=1, width=8, heads=1, head_size=8), vocab_size=13)
    replicas = [LocalReplica(workload, optimizer=AdamW(lr=0.01)) for _ in range(2)]
    together, decisions = (
        BatchedCompute("auto", 2, workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news)),
        [],
    )
    gc.disable()
    try:
        together([TrainJob(one, 1, Work(shard=at, start=0, schedule=0, examples=1)) for at, one in enumerate(replicas)])
        assert [one() for one in made] == [None]
    finally:
        gc.enable()
    together.report()
    assert decisions == [("apart", "stacked it fails: OutOfMemoryError no memory")]


def test_a_module_that_fails_stacked_computes_apart():
    class Asks(DecoderWorkload):
        def loss(self, module, batch):
            loss = super().loss(module, batch)
            return loss * float(loss.detach() > 0)  # a number of one island cannot be asked for

    workload = Asks.of(GPT(layers=1, width=8, heads=1, head_size=8), vocab_size=13)
    made = [LocalReplica(Asks(workload.model, workload.batches, 13), optimizer=AdamW(lr=0.01)) for _ in range(2)]
    decisions = []
    together = BatchedCompute(
        "auto", 2, made[0].forward_backward.workload.loss, compiled=False, on_decision=lambda *news: decisions.append(news)
    )
    assert [len(trained.losses) for _, trained in together(trainings(made))] == [2, 2]
    together.report()
    assert decisions[0][0] == "apart"
    assert "stacked it fails" in decisions[0][1]
