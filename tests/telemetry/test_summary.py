"""Summaries are read from the folder alone and agree with the log."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from atoll.core.errors import AtollError, CheckpointError, ConfigError
from atoll.core.events import Attended, Leased, MemoryCounted, Refused, RunFinished, RunStarted, SaveFailed
from atoll.telemetry.async_summary import read_asynchrony
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.plots import plot_run, run_figure
from atoll.telemetry.run_progress import read_progress
from atoll.telemetry.summary import read_memory, read_participation, read_summary

KEYS = [
    "recipe",
    "algorithm",
    "islands",
    "params",
    "tokens",
    "warm_start_tokens",
    "local_updates",
    "outer_steps",
    "val_loss",
    "val_perplexity",
    "virtual_time_s",
    "wall_time_s",
    "sent_bytes_per_island",
    "control_bytes_per_island",
    "utilisation",
    "resumed_from_round",
    "run_dir",
    "seed",
    "rounds",
    "steps",
    "digest",
    "engine",
]


def test_a_summary_is_one_line_with_these_keys_in_this_order(tmp_path, script) -> None:
    line = read_summary(script(accuracy=False).write(tmp_path / "run")).to_json()
    assert "\n" not in line
    assert list(json.loads(line)) == KEYS


def test_accuracy_and_asynchrony_come_after_the_other_keys_where_there_are_any(tmp_path, script, async_script) -> None:
    toy = read_summary(async_script(accuracy=True).write(tmp_path / "toy"))
    assert list(json.loads(toy.to_json())) == [*KEYS, "val_accuracy", "asynchrony"]
    assert toy.to_dict()["asynchrony"] == read_asynchrony(tmp_path / "toy").to_dict()
    assert toy.val_accuracy == 1.0
    assert list(read_summary(script().write(tmp_path / "sync")).to_dict()) == [*KEYS, "val_accuracy"]


def test_the_accuracy_of_earlier_weights_is_not_given_for_that_of_the_last(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if "Evaluated" in line)
    log.write_text("".join(lines[:last] + lines[last + 1 :]))
    assert read_summary(folder).val_accuracy is None


def test_a_summary_has_the_figures_of_the_last_event(tmp_path, script) -> None:
    run = script(islands=3, seed=7)
    folder = run.write(tmp_path / "run")
    finished = next(event for event in run.events() if isinstance(event, RunFinished))
    summary = read_summary(folder)
    for key in set(KEYS) & set(vars(finished)) - {"wall_time_s"}:
        assert getattr(summary, key) == getattr(finished, key), key
    assert (summary.recipe, summary.algorithm, summary.islands, summary.params, summary.seed) == ("demo-ddp", "DDP", 3, 12_345, 7)
    assert summary.val_perplexity == math.exp(finished.val_loss)
    assert (summary.wall_time_s, summary.resumed_from_round, summary.run_dir) == (12.5, 0, str(folder))


def test_the_error_of_an_unfinished_run_has_its_progress_and_the_command_to_resume(tmp_path, script) -> None:
    folder = script(finished=False).write(tmp_path / "run")
    with pytest.raises(AtollError, match=rf"last finished round is 4 \(step 20 of 20\).*`atoll run --resume {folder}`"):
        read_summary(folder)


def test_a_run_killed_before_its_first_round_has_no_finished_round(tmp_path) -> None:
    (tmp_path / "run.json").write_text('{"format": 2, "recipe": "demo-ddp", "seed": 3}')
    with pytest.raises(AtollError, match=r"demo-ddp\) is not finished: no round is finished.*--resume"):
        read_summary(tmp_path)
    progress = read_progress(tmp_path)
    assert (progress.round, progress.position, progress.finished) == (None, "step 0", None)


def test_a_log_cut_in_its_last_line_is_an_unfinished_run(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    log = folder / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-10])
    with pytest.raises(AtollError, match="not finished"):
        read_summary(folder)


def test_progress_agrees_with_the_summary_of_a_finished_run(tmp_path, script) -> None:
    folder = script(islands=3).write(tmp_path / "run")
    progress, summary = read_progress(folder), read_summary(folder)
    assert progress.started.recipe == summary.recipe
    for key in ("tokens", "steps", "virtual_time_s"):
        assert getattr(progress.round, key) == getattr(progress.finished, key) == getattr(summary, key), key
    assert progress.round.round == summary.rounds
    assert progress.position == f"step {summary.steps} of {summary.steps}"
    assert progress.evaluation.loss == pytest.approx(summary.val_loss)
    assert progress.utilisation() == pytest.approx(summary.utilisation)


def test_the_error_names_a_folder_that_is_no_run(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: run\.json cannot be read"):
        read_summary(tmp_path)


def test_the_folder_of_an_older_version_is_refused(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    (folder / "run.json").write_text('{"recipe": "demo-ddp"}')
    with pytest.raises(ConfigError, match=r"run\.json has format 1, and this version of atoll reads format 2"):
        read_summary(folder)


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_broken_run_json_is_named(tmp_path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json.*Restore it"):
        read_progress(tmp_path)


def test_a_log_without_its_beginning_is_refused(tmp_path, script) -> None:
    finished = next(event for event in script().events() if isinstance(event, RunFinished))
    (tmp_path / "run.json").write_text('{"format": 2}')
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        sink.emit(finished)
    with pytest.raises(CheckpointError, match="no RunStarted"):
        read_summary(tmp_path)


def test_the_summary_has_the_round_that_the_last_process_began_at(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    lines = [
        '{"what": "started", "round": 0, "wall_time_s": 0.0}',
        '{"what": "resu{"what": "resumed", "round": 2, "wall_time_s": 0.0}',
        "null",
        '{"what": "finished", "wall_time_s": 3.5, "resumed_from_round": 2}',
    ]
    (folder / "timing.jsonl").write_text("\n".join(lines) + "\n")
    summary = read_summary(folder)
    assert (summary.wall_time_s, summary.resumed_from_round) == (3.5, 2)


def test_wall_time_is_none_without_a_timing_record(tmp_path, script) -> None:
    folder = script().write(tmp_path / "run")
    (folder / "timing.jsonl").unlink()
    assert read_summary(folder).wall_time_s is None


def test_a_loss_beyond_all_bounds_still_gives_valid_json(tmp_path, script) -> None:
    summary = read_summary(script().write(tmp_path / "run"))
    diverged = json.loads(replace(summary, val_loss=math.nan, val_perplexity=math.inf).to_json())
    assert math.isnan(float(diverged["val_loss"]))
    assert float(diverged["val_perplexity"]) == math.inf


def test_a_loss_too_large_for_its_exponential_has_infinite_perplexity(tmp_path, script) -> None:
    assert read_summary(script(final_loss=1e4).write(tmp_path / "run")).val_perplexity == math.inf


# ------------------------------------------------------------------------------------------------------------------------ memory


def counted(island, round, gradients, **more):
    return MemoryCounted(
        **{
            "island": island,
            "round": round,
            "params": 1000,
            "parameters_bytes": 2000,
            "gradients_bytes": gradients,
            "communication_bytes": 0,
            "optimizer_bytes": 6000,
            "copies_bytes": 0,
            "peak_bytes": 8000 + gradients,
            "formula": "2+2+12/2",
            "formula_bytes": 10000,
            **more,
        }
    )


def test_each_island_counts_with_its_largest_round(tmp_path):
    assert read_memory(tmp_path) is None
    counts = [counted(1, 0, 10), counted(0, 0, 1000), counted(0, 1, 2000), counted(0, 2, 500)]
    (tmp_path / "events.jsonl").write_text("".join(count.to_json() + "\n" for count in counts))
    summary = read_memory(tmp_path)
    assert [(island["island"], island["peak_bytes"]) for island in summary.islands] == [(0, 10000), (1, 8010)]
    assert summary.largest["island"] == 0
    assert summary.to_dict()["islands"][0]["gradients_bytes"] == 2000


# ----------------------------------------------------------------------------------------------------------------- elastic runs


def attended(round, participating, alive=3, attempts=1):
    return Attended(
        round=round,
        known=4,
        alive=alive,
        participating=participating,
        attempts=attempts,
        epoch=round,
        digest="0",
        virtual_time_s=None,
        wall_time_s=float(round),
    )


def leased(round, delivered, returned=()):
    units = ([[i, i, round, 1] for i in islands] for islands in (delivered, returned))
    return Leased(round=round, delivered=next(units), returned=next(units), virtual_time_s=None, wall_time_s=float(round))


EVENTS = [
    leased(1, [0, 1, 2]),
    attended(1, 3),
    leased(2, [0, 2], [1]),
    attended(2, 2, attempts=3),
    Refused(island=1, round=2, virtual_time_s=None, wall_time_s=2.0, reason="its delta is not finite"),
    SaveFailed(round=2, reason="the disk is full"),
]


def test_participation_has_means_and_sums_over_commits_and_is_drawn_from_the_log(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in EVENTS))
    found = read_participation(tmp_path)
    assert (found.commits, found.attempts, found.known, found.alive, found.participating) == (2, 4, 4, 3.0, 2.5)
    assert (found.delivered, found.returned, found.refused, found.not_saved) == (5, 1, 1, 1)
    assert plot_run(tmp_path, tmp_path / "participation.png", "participation").stat().st_size > 1000


def test_the_plot_of_participation_names_the_run_and_shows_that_nothing_was_assigned_again(tmp_path):
    started = RunStarted(recipe="demo", algorithm="DiLoCo", islands=4, params=1, steps=2, seed=7, engine="elastic")
    never = [started, leased(1, [0, 1, 2]), attended(1, 3)]
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in never))
    figure = run_figure(tmp_path, "participation")
    assert figure.get_supxlabel() == f"demo, seed 7: {tmp_path.name}"
    again = next(line for line in figure.axes[1].lines if line.get_label() == "assigned again")
    assert min(again.get_ydata()) == 0 > figure.axes[1].get_ylim()[0]


def test_axes_that_count_islands_and_leases_have_whole_numbers(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in EVENTS))
    for panel in run_figure(tmp_path, "participation").axes:
        assert all(tick == round(tick) for tick in panel.get_yticks())
        assert panel.get_title(loc="left")


def test_a_run_without_commits_has_no_participation(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    assert read_participation(tmp_path) is None
    with pytest.raises(AtollError, match="has no commits"):
        plot_run(tmp_path, tmp_path / "participation.png", "participation")
