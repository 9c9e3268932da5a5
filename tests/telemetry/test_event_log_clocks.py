"""A run on real machines is reported like a simulated one, on its own clock, and the two clocks are never mixed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atoll.cli.inspect_commands import report_run
from atoll.core.events import (
    Computed,
    Evaluated,
    Event,
    Exchanged,
    LimitSet,
    RoundFinished,
    RunFinished,
    RunStarted,
    Timed,
    WarmStartFinished,
)
from atoll.telemetry.async_summary import read_asynchrony
from atoll.telemetry.compare import comparison, markdown, sentence, table
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.event_log import JsonlSink, read_clock
from atoll.telemetry.plots import comparison_figure, plot_run, run_figure
from atoll.telemetry.run_progress import read_progress
from atoll.telemetry.sinks import TensorBoardSink
from atoll.telemetry.summary import read_summary
from atoll.telemetry.sync_summary import read_overlap
from atoll.telemetry.trace import write_trace

ROUNDS = 3


def exchange(number: int, what: str, arrived_s: list[float], end_s: float, *, background: bool) -> Exchanged:
    begin_s = float(number)
    return Exchanged(
        round=number,
        what=what,
        islands=[0, 1],
        heard=[True, True],
        arrived_s=[begin_s + moment_s for moment_s in arrived_s],
        start_s=begin_s + max(arrived_s),
        end_s=begin_s + end_s,
        sent_bytes=[1000, 1000],
        control_bytes=[8, 8],
        weight=2.0,
        background=background,
    )


def measured_round(number: int) -> Iterator[Event]:
    """Island 0 computes for half a second and island 1 for 0.7 s. Two exchanges run in the background, of which the second
    begins before all islands have ended the first, as measured clocks allow; a third follows."""
    for island, (start_s, end_s) in enumerate([(0.01, 0.51), (0.02, 0.72)]):
        loss, work = 3.0 - 0.1 * number, {"steps": 0, "batches": 1, "tokens": 100}
        yield Computed(island=island, round=number, start_s=number + start_s, end_s=number + end_s, loss=loss, **work)
    yield exchange(number, "reduce_scatter", [0.02, 0.05], 0.30, background=True)
    yield exchange(number, "all_gather", [0.28, 0.29], 0.55, background=True)
    yield exchange(number, "total", [0.56, 0.75], 0.95, background=False)
    done = number + 1
    totals = {"tokens": 200 * done, "local_updates": 2 * done, "sent_bytes_per_island": 3000.0 * done}
    moment = {"virtual_time_s": None, "wall_time_s": number + 0.96}
    yield RoundFinished(round=done, islands=2, steps=done, loss=3.0 - 0.1 * number, **moment, **totals)
    yield Evaluated(round=done, steps=done, metrics={"loss": 2.5 - 0.1 * done}, **moment, **totals)


def measured(rounds: int = ROUNDS, *, finished: bool = True) -> Iterator[Event]:
    """Two islands on real machines."""
    yield RunStarted(recipe="demo-acco", algorithm="ACCO", islands=2, params=12_345, steps=ROUNDS, seed=0, engine="processes")
    yield LimitSet(limit_s=60.0, why="as given")
    yield WarmStartFinished(steps=1, tokens=0, loss=4.0)
    for number in range(rounds):
        yield from measured_round(number)
    if finished:
        yield RunFinished(
            rounds=rounds,
            outer_steps=rounds,
            steps=rounds,
            tokens=200 * rounds,
            warm_start_tokens=0,
            local_updates=2 * rounds,
            virtual_time_s=None,
            wall_time_s=rounds - 0.03,
            utilisation=0.6,
            sent_bytes_per_island=3000.0 * rounds,
            control_bytes_per_island=24.0 * rounds,
            val_loss=2.5 - 0.1 * rounds,
            digest="00ff",
        )


def write(folder: Path, events: Iterable[Event]) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": 2, "recipe": "demo", "seed": 0}))
    with JsonlSink(folder / "events.jsonl") as sink:
        for event in events:
            sink.emit(event)
    (folder / "timing.jsonl").write_text('{"what": "finished", "wall_time_s": 99.0, "resumed_from_round": 2}\n')
    return folder


def on_real_machines(events: Iterable[Event]) -> Iterator[Event]:
    """The same events at the same times, as if these had been measured."""
    for event in events:
        if isinstance(event, RunStarted):
            yield replace(event, engine="processes")
        elif isinstance(event, Timed):
            yield replace(event, virtual_time_s=None, wall_time_s=event.time_s)
        else:
            yield event


@pytest.fixture
def real(tmp_path) -> Path:
    return write(tmp_path / "real", measured())


@pytest.fixture
def simulated(tmp_path, script) -> Path:
    """The same work: 600 tokens."""
    size = {"rounds": 3, "steps_per_round": 1, "accuracy": False, "final_loss": 2.1, "payload_bytes": 6000}
    events = list(script(recipe="demo-ddp", **size).events())
    return write(tmp_path / "simulated", [replace(e, warm_start_tokens=0) if isinstance(e, RunFinished) else e for e in events])


# ------------------------------------------------------------------------------------------------------------------ summaries


def test_the_time_of_a_real_run_is_the_whole_runs_and_not_its_last_process(real) -> None:
    summary = read_summary(real)
    assert (summary.engine, summary.clock, summary.virtual_time_s) == ("processes", "wall", None)
    assert summary.wall_time_s == summary.time_s == 2.97
    assert summary.resumed_from_round == 2
    record = json.loads(summary.to_json())
    assert (record["engine"], record["virtual_time_s"], record["wall_time_s"]) == ("processes", None, 2.97)


def test_a_simulated_run_keeps_its_virtual_time_whatever_its_process_took(simulated) -> None:
    summary = read_summary(simulated)
    assert (summary.engine, summary.clock, summary.wall_time_s) == ("simulator", "virtual", 99.0)
    assert summary.time_s == summary.virtual_time_s


def test_the_progress_of_an_unfinished_real_run_has_its_wall_time(tmp_path) -> None:
    progress = read_progress(write(tmp_path / "run", measured(2, finished=False)))
    assert (progress.round.virtual_time_s, progress.round.wall_time_s) == (None, 1.96)
    assert progress.utilisation() == pytest.approx((0.5 + 0.7) / 1.96)


def test_the_parts_of_measured_time_add_up_and_no_second_counts_twice(real) -> None:
    first, second = read_overlap(real).islands
    for island, computed_s, hidden_s in ((first, 0.5, 0.46), (second, 0.7, 0.5)):
        assert island.computed_s == pytest.approx(ROUNDS * computed_s)
        assert island.exchanged_s == pytest.approx(ROUNDS * 0.7)  # from 0.05 to 0.55, and from 0.75 to 0.95
        assert island.hidden_s == pytest.approx(ROUNDS * hidden_s)
        assert island.present_s == pytest.approx(2.95)
        assert island.waited_s == pytest.approx(2.95 - ROUNDS * (computed_s + 0.7 - hidden_s))


def test_every_real_run_reports_its_overlap(tmp_path, script) -> None:
    events = list(script().events())
    assert read_summary(write(tmp_path / "simulator", events)).overlap is None
    found = read_summary(write(tmp_path / "processes", on_real_machines(events))).overlap
    assert found == read_overlap(tmp_path / "simulator")


def test_a_log_reads_the_same_on_either_clock(tmp_path, script, async_script) -> None:
    for name, made in (("sync", script()), ("hub", async_script())):
        virtual = write(tmp_path / name / "simulator", made.events())
        wall = write(tmp_path / name / "processes", on_real_machines(made.events()))
        assert read_overlap(virtual) == read_overlap(wall)
        assert read_asynchrony(virtual) == read_asynchrony(wall)
        assert read_progress(virtual).utilisation() == read_progress(wall).utilisation()
        assert [spans(folder) for folder in (virtual, wall)] == [spans(virtual)] * 2
        assert (read_clock(virtual), read_clock(wall)) == ("virtual", "wall")


# ---------------------------------------------------------------------------------------------------------------- comparisons


def test_a_table_names_the_clock_that_all_its_runs_have(real, simulated) -> None:
    assert " | wall time | busy |" in markdown(comparison([real]))
    assert " | virtual time | busy |" in markdown(comparison([simulated]))


def test_where_clocks_differ_every_time_names_its_own(real, simulated) -> None:
    heading, _, *rows = markdown(comparison([simulated, real])).splitlines()
    assert " | time | busy |" in heading
    assert [row.split(" | ")[6] for row in rows[:2]] == ["0:00:09.750 (virtual)", "0:00:02.970 (wall)"]


def test_a_table_of_runs_on_two_clocks_fits_a_narrow_terminal(real, tmp_path, script) -> None:
    names = {"demo-ddp": "DDP", "demo-diloco": "DiLoCo", "demo-two-level": "DiLoCo over ACCO"}
    made = [script(recipe=name, algorithm=names[name], payload_bytes=4_000_000).write(tmp_path / name) for name in names]
    file = io.StringIO()
    Console(file=file, width=80).print(table(comparison([*made, real])))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert {*names, "demo-acco", "DiLoCo", "ACCO", "0:00:33.0", "0:00:02.970", "(virtual)", "(wall)"} <= set(
        " ".join(lines).split()
    )


def test_times_on_different_clocks_are_not_compared(real, simulated) -> None:
    assert sentence(comparison([simulated, real])) == (
        "demo-acco ends 0.1 worse than demo-ddp (2.20 against 2.10), with 1/2 of the bytes; "
        "virtual times (demo-ddp) and wall times (demo-acco) are not compared."
    )


def test_times_on_the_same_clock_are_compared_beside_one_on_another(real, simulated, tmp_path) -> None:
    started, *middle, finished = measured()
    slow = [replace(started, recipe="demo-slow"), *middle, replace(finished, wall_time_s=5.94, sent_bytes_per_island=36_000.0)]
    folders = [real, simulated, write(tmp_path / "slow", slow)]
    assert sentence(comparison(folders)) == (
        "demo-acco matches demo-slow's 2.20 with 1/4 of the bytes in 1/2 of the time; demo-ddp reaches 2.10 with 1/2 of the bytes; "
        "virtual times (demo-ddp) and wall times (demo-acco and demo-slow) are not compared."
    )


def test_of_many_runs_on_two_clocks_none_is_called_the_fastest(real, simulated) -> None:
    many = sentence(comparison([real, simulated, real, simulated, simulated]))
    assert "fastest" not in many
    assert many.endswith("; virtual times (3) and wall times (2) are not compared.")
    assert "is fastest (0:00:02.970)" in sentence(comparison([real] * 5))


def test_a_real_run_and_its_simulation_are_labelled_by_their_engines(tmp_path, script) -> None:
    events = list(script().events())
    both = [write(tmp_path / "a", events), write(tmp_path / "b", on_real_machines(events))]
    assert [row.label for row in comparison(both).rows] == ["demo-ddp (simulator)", "demo-ddp (processes)"]
    assert comparison(both[::-1]).most.label == "demo-ddp (processes)"  # as many bytes: the first, not the slowest
    assert sentence(comparison(both)).startswith(
        "demo-ddp (processes) matches demo-ddp (simulator)'s 2.35 with the same bytes; virtual"
    )


def test_one_real_run_alone_names_the_wall_clock(real) -> None:
    assert sentence(comparison([real])).endswith("in 0:00:02.970 of wall time.")


# -------------------------------------------------------------------------------------------------------------------- figures


def test_the_axis_of_times_names_its_clock(real, simulated) -> None:
    assert comparison_figure([real]).axes[1].get_xlabel() == "wall time (s)"
    assert comparison_figure([simulated]).axes[1].get_xlabel() == "virtual time (s)"
    assert run_figure(real, "overlap").axes[0].get_xlabel() == "wall time of the last rounds (s)"
    assert list(comparison_figure([real]).axes[1].get_lines()[0].get_xdata()) == pytest.approx([0.96, 1.96, 2.96])


def test_a_plot_of_runs_on_two_clocks_names_the_clock_of_each(real, simulated) -> None:
    tokens, times, _ = comparison_figure([simulated, real]).axes
    assert times.get_xlabel() == "virtual or wall time (s)"
    labels = [line.get_label() for line in tokens.get_lines()]
    assert labels == ["demo-ddp, virtual time (2.10)", "demo-acco, wall time (2.20)"]


def test_the_figure_of_a_real_run_with_a_hub_names_its_clock(tmp_path, async_script) -> None:
    folder = write(tmp_path / "hub", on_real_machines(async_script().events()))
    assert run_figure(folder, "asynchrony").axes[0].get_xlabel() == "wall time (s)"
    assert plot_run(write(tmp_path / "run", measured()), tmp_path / "overlap.png", "overlap").exists()


# --------------------------------------------------------------------------------------------------------------------- traces


def spans(folder: Path) -> list[dict[str, Any]]:
    """What the trace has but the names of its processes."""
    records = json.loads(write_trace(folder, folder / "trace.json").read_text())["traceEvents"]
    return [record for record in records if record["ph"] != "M"]


def test_a_trace_of_measured_times_has_no_overlap_on_a_row_and_all_that_was_computed(real) -> None:
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in spans(real):
        if record["ph"] == "X":
            rows.setdefault((record["pid"], record["tid"]), []).append(record)
    for row in rows.values():
        ordered = sorted(row, key=lambda record: record["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-6 for one, two in pairwise(ordered))
    computed_us = sum(record["dur"] for row in rows.values() for record in row if record["cat"] == "computing")
    assert computed_us == pytest.approx(ROUNDS * 1.2e6)
    records = json.loads((real / "trace.json").read_text())["traceEvents"]
    assert "demo-acco (ACCO), wall time" in [record["args"].get("name") for record in records]


# ---------------------------------------------------------------------------------------------------------- those who watch


def test_the_console_shows_the_exchange_limit_and_wall_time() -> None:
    file, ticks = io.StringIO(), count()
    console = Console(file=file, width=160, force_terminal=False, color_system=None)
    with ConsoleSink("demo", console=console, clock=lambda: float(next(ticks))) as sink:
        for event in measured():
            sink.emit(event)
    shown = file.getvalue()
    assert "demo-acco: ACCO on 2 islands (engine processes), 12.3 k parameters" in shown
    assert "an exchange may take 0:01:00 (as given)" in shown
    assert "wall time 0:00:02.960" in shown
    assert "0:00:02.970 of wall time, 60 % of it computing" in shown
    assert "virtual" not in shown


def test_tensorboard_has_curves_against_wall_time_and_none_against_virtual_time(tmp_path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for event in measured():
            sink.emit(event)
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    reader.Reload()
    assert [point.step for point in reader.Scalars("val_loss/by_wall_ms")] == [960, 1960, 2960]
    assert not [tag for tag in reader.Tags()["scalars"] if "virtual" in tag]


def test_a_report_of_a_real_run_has_its_table_its_figures_and_its_trace(real, capsys) -> None:
    report_run(real, as_json=False)
    found = capsys.readouterr().out
    assert "wall" in found
    assert "virtual" not in found
    assert "…" not in found, "a column is cut"
    assert "6 of them in the background of computing" in found
    assert {"plot.png", "overlap.png", "trace.json"} <= {path.name for path in real.iterdir()}
