"""A finished run goes on in a new folder as if it had been as long from the beginning, where its schedule allows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import atoll
from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Saved
from atoll.engines.extend_run import extend
from atoll.optim.schedules import WSD, Cosine
from atoll.optim.sgd import Nesterov
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import read_kind
from tests.samples import SMALL

SETTINGS = (*SMALL[:-1], "train.warm_start_steps=3", "train.warm_start_lr=0.01", "algorithm.inner_steps=5", "cluster.islands=2")
KEPT = ("keep.evaluate_every=10", "keep.save_every=10", "keep.checkpoints=9")


def run_of(steps, lr, *settings):
    run = override(recipes.demo_diloco(), [*SETTINGS, *KEPT, f"train.steps={steps}", *settings], candidates)
    return replace(run, optimizer=replace(run.optimizer, lr=lr))


def carried_out(run, out):
    return atoll.run(run, out=out, command=["test"])


@pytest.mark.parametrize(
    ("lr", "start"),
    [
        (0.01, "00000004"),
        (WSD(lr=0.01, warmup=2, decay=8), "00000002"),  # of the steps 10 and 20 only the first lies before the decay
        (Cosine(lr=0.01, warmup=2, steps=30), "00000004"),
    ],
)
def test_extended_a_run_leaves_the_bits_and_the_log_of_one_that_was_as_long_from_the_beginning(lr, start, tmp_path):
    short = carried_out(run_of(20, lr), tmp_path / "short")
    before = {path: path.read_bytes() for path in short.folder.rglob("*") if path.is_file()}
    folder = extend(short.folder, 10, tmp_path / "longer")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [start]
    longer, straight = atoll.resume(folder), carried_out(run_of(30, lr), tmp_path / "straight")
    assert longer.params.equal(straight.params)
    assert (folder / "events.jsonl").read_bytes() == (straight.folder / "events.jsonl").read_bytes()
    assert (folder / "run.json").read_bytes() == (straight.folder / "run.json").read_bytes()
    assert {path: path.read_bytes() for path in before} == before, "the finished run stays as it is"


def test_rounds_that_exchange_in_the_background_go_on_too(tmp_path):
    def run(steps):
        made = run_of(steps, 0.01)
        return replace(made, algorithm=ACCO(warmup=2))

    short = carried_out(run(10), tmp_path / "short")
    longer = atoll.resume(extend(short.folder, 10, tmp_path / "longer"))
    assert longer.params.equal(carried_out(run(20), tmp_path / "straight").params)


def test_a_run_is_extended_again_and_resumed_in_between(tmp_path):
    folder = carried_out(run_of(10, 0.01), tmp_path / "0").folder
    for number in (1, 2):
        folder = extend(folder, 10, tmp_path / str(number))
        atoll.resume(folder)
    assert atoll.resume(folder).params.equal(carried_out(run_of(30, 0.01), tmp_path / "straight").params)
    assert [event.round for event in read_kind(folder, Saved)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("lr", "settings", "message"),
    [
        (
            Cosine(lr=0.01, warmup=2),
            (),
            r"optimizer\.lr is a Cosine as long as the run.*step 10.*Start a new run with train.steps=30",
        ),
        (Cosine(lr=0.01, steps=20), (), r"optimizer\.lr is a Cosine of 20 steps, and the extended run would have 30"),
        (WSD(lr=0.01, decay=15), (), r"optimizer\.lr is a WSD as long as the run.*oldest checkpoint, at step 10"),
        (0.01, ("cluster.pool=[1,2]",), r"cluster\.pool=\(1, 2\), which is spread over the whole run"),
    ],
)
def test_a_schedule_that_has_depended_on_the_end_is_refused(lr, settings, message, tmp_path):
    short = carried_out(run_of(20, lr, *settings), tmp_path / "short")
    with pytest.raises(ConfigError, match=message):
        extend(short.folder, 10, tmp_path / "longer")
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_an_outer_schedule_counts_rounds(tmp_path):
    outer = Nesterov(lr=Cosine(lr=0.7), momentum=0.5)
    run = run_of(20, 0.01)
    short = carried_out(replace(run, algorithm=replace(run.algorithm, outer=outer)), tmp_path / "short")
    with pytest.raises(ConfigError, match=r"algorithm\.outer\.lr is a Cosine as long as the run"):
        extend(short.folder, 10, tmp_path / "longer")


def test_what_is_no_finished_synchronous_run_is_refused(tmp_path):
    asynchronous = override(recipes.demo_async(), [*SMALL, "train.steps=10", "train.warm_start_steps=0"], candidates)
    folder = carried_out(asynchronous, tmp_path / "asynchronous").folder
    with pytest.raises(ConfigError, match=r"is a run of AsyncLocalSGD, which winds down before its end"):
        extend(folder, 10)
    folder = carried_out(run_of(10, 0.01), tmp_path / "short").folder
    for steps, message in (
        (0, r"^--extend 0: .* 1 or more"),
        (7, r"^--extend 7 is no multiple of the 5 inner steps of a round.* Use --extend 5\."),
    ):
        with pytest.raises(ConfigError, match=message):
            extend(folder, steps)
    with pytest.raises(ConfigError, match=r"short is there already.*Use another --out"):
        extend(folder, 10, folder)
    (folder / "final.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"is not finished.*atoll run --resume"):
        extend(folder, 10, tmp_path / "longer")
