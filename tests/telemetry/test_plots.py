"""Figures are written to the given paths, do not change pyplot's state, and have the right curves on the right axes."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Arrived, Evaluated, RoundFinished
from atoll.runs.cluster import Cluster, Link
from atoll.telemetry.async_summary import read_asynchrony
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.plot_style import add_legend, new_figure
from atoll.telemetry.plots import binned, comparison_figure, last_rounds, plot_comparison, plot_run, run_figure
from atoll.telemetry.sync_summary import read_overlap
from atoll.testing.simulated_runs import simulate


@pytest.fixture
def folders(tmp_path, script):
    ddp = script(rounds=20, steps_per_round=1, payload_bytes=4_000_000)
    diloco = script(recipe="demo-diloco", algorithm="DiLoCo", rounds=2, steps_per_round=10, payload_bytes=4_000_000)
    return [ddp.write(tmp_path / "a"), diloco.write(tmp_path / "b")]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_a_comparison_is_one_wide_picture(folders, tmp_path) -> None:
    path = plot_comparison(folders, tmp_path / "new" / "figure.png")
    assert path == tmp_path / "new" / "figure.png"
    assert png_size(path) == (1800, 637)


def test_each_panel_shows_every_runs_evaluations_against_its_own_quantity(folders, script) -> None:
    tokens, time, sent = comparison_figure(folders).axes
    ddp = [
        event for event in script(rounds=20, steps_per_round=1, payload_bytes=4_000_000).events() if isinstance(event, Evaluated)
    ]
    line = tokens.get_lines()[0]
    assert list(line.get_xdata()) == [event.tokens for event in ddp]
    assert list(line.get_ydata()) == [event.metrics["loss"] for event in ddp]
    assert list(time.get_lines()[0].get_xdata()) == [event.virtual_time_s for event in ddp]
    assert list(sent.get_lines()[0].get_xdata()) == [event.sent_bytes_per_island for event in ddp if event.sent_bytes_per_island]
    assert [len(panel.get_lines()) for panel in (tokens, time, sent)] == [2, 2, 2]


def test_an_axis_is_logarithmic_where_runs_lie_a_decade_apart(folders) -> None:
    assert [panel.get_xscale() for panel in comparison_figure(folders).axes] == ["linear", "linear", "log"]
    assert [panel.get_xscale() for panel in comparison_figure(folders[:1]).axes] == ["linear"] * 3


def test_there_is_one_legend_for_all_panels(folders) -> None:
    figure = comparison_figure(folders)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["demo-ddp (2.35)", "demo-diloco (2.35)"]
    assert all(panel.get_legend() is None for panel in figure.axes)


def test_a_run_that_sends_nothing_can_be_drawn(tmp_path, script) -> None:
    silent = script(payload_bytes=0).write(tmp_path / "a")
    assert comparison_figure([silent]).axes[2].get_xscale() == "linear"
    plot_comparison([silent], tmp_path / "figure.svg")


def test_more_runs_than_colours_still_look_different(tmp_path, script) -> None:
    runs = [script(seed=seed, rounds=2).write(tmp_path / str(seed)) for seed in range(9)]
    lines = comparison_figure(runs).axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 9


def test_one_run_shows_losses_cosines_and_norms(folders, tmp_path) -> None:
    assert png_size(plot_run(folders[0], tmp_path / "run.png")) == (1800, 637)
    assert [panel.get_ylabel() for panel in run_figure(folders[0]).axes] == ["loss", "cosine of deltas (± std)", "norm"]


def test_the_panels_of_one_run_span_the_same_steps(folders) -> None:
    assert len({panel.get_xlim() for panel in run_figure(folders[1]).axes}) == 1


def test_a_comparison_of_deltas_stands_at_the_step_where_its_round_ended(folders) -> None:
    _, cosine, norm = run_figure(folders[1]).axes
    assert list(cosine.get_lines()[0].get_xdata()) == list(norm.get_lines()[0].get_xdata()) == [10, 20]


def test_a_run_whose_islands_were_not_compared_shows_losses_alone(folders) -> None:
    log = folders[0] / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "Compared" not in line))
    assert [panel.get_ylabel() for panel in run_figure(folders[0]).axes] == ["loss"]


def test_an_unfinished_run_can_be_drawn(tmp_path, script) -> None:
    folder = script(finished=False).write(tmp_path / "run")
    assert plot_run(folder, tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")


def test_the_error_names_a_run_without_evaluations(tmp_path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(AtollError, match="has not been evaluated yet"):
        plot_comparison([tmp_path], tmp_path / "figure.png")
    with pytest.raises(AtollError, match="has not finished a round yet"):
        plot_run(tmp_path, tmp_path / "figure.png")


@pytest.mark.parametrize("name", ["figure", "figure.bmp"])
def test_a_format_that_cannot_be_written_is_refused(folders, tmp_path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not end in \.png, \.svg, \.pdf"):
        plot_comparison(folders, tmp_path / name)


def test_nothing_to_draw_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_comparison([], tmp_path / "figure.png")


def test_pyplot_and_its_backend_are_never_touched(folders, tmp_path) -> None:
    # Reading the setting `backend` would itself load pyplot, so it is left out; a backend is chosen in pyplot only.
    code = (
        "import sys, matplotlib; from atoll.telemetry.plots import plot_run\n"
        "settings = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = settings()\n"
        f"plot_run({str(folders[0])!r}, {str(tmp_path / 'figure.png')!r})\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_without_matplotlib_name_their_extra(tmp_path, script, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # Python raises ImportError for a module that is None here
    with pytest.raises(ConfigError, match=r'pip install -e ".*\[plot\]"'):
        plot_run(script().write(tmp_path / "run"), tmp_path / "figure.png")


def test_the_legend_lies_inside_the_figure_and_above_its_panels() -> None:
    figure, panels = new_figure(3, ("a", "b", "c"))
    labels = ("computing", "exchange in the background", "hidden share of exchanges", "communicating", "waiting")
    for panel, label in zip([*panels, *panels], labels, strict=False):
        panel.plot([0, 1], [0, 1], label=label)
    add_legend(figure)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= max(panel.get_tightbbox().y1 for panel in panels)


# ------------------------------------------------------------------------------------------------------ asynchronous runs


def test_the_panels_show_every_arrival_every_window_and_every_shard(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    folder = run.write(tmp_path / "run")
    staleness, windows, shards, workers = run_figure(folder, "asynchrony").axes
    arrivals = [event for event in run.events() if isinstance(event, Arrived)]
    dots = staleness.get_lines()[0]
    assert list(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == [(e.virtual_time_s, e.staleness) for e in arrivals]
    summary = read_asynchrony(folder)
    assert [bar.get_height() for bar in windows.patches] == list(summary.arrivals_per_window.counts.values())
    assert [bar.get_height() for bar in shards.patches] == list(summary.steps_per_shard.values())
    assert [text.get_text() for text in staleness.texts] == [f"mean {summary.staleness.mean:.3g}"]
    stacked = {}
    for bar in workers.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        stacked[at] = stacked.get(at, 0.0) + bar.get_height()
    assert stacked == pytest.approx({worker.island: 100.0 for worker in summary.workers})


def test_many_arrivals_are_drawn_as_a_band_around_their_mean(tmp_path, async_script) -> None:
    staleness = run_figure(async_script(rounds=600).write(tmp_path / "run"), "asynchrony").axes[0]
    assert len(staleness.get_lines()[0].get_xdata()) <= 100
    assert len(staleness.collections) == 1


def test_every_arrival_is_in_one_bin() -> None:
    points = [(0.1 * number, number % 7) for number in range(1, 500)]
    (one,) = binned(points, bins=1)
    assert [one] == [(pytest.approx(24.95), pytest.approx(sum(value for _, value in points) / 499), 0, 6)]
    assert binned([(0.0, 3), (0.0, 1)], bins=10) == [(0.0, 2.0, 1, 3)]


def test_the_figure_is_written_also_while_the_run_continues(tmp_path, async_script) -> None:
    folder = async_script(finished=False).write(tmp_path / "run")
    assert plot_run(folder, tmp_path / "new" / "figure.png", "asynchrony").read_bytes().startswith(b"\x89PNG")


def test_asynchrony_of_a_run_without_arrivals_cannot_be_drawn(tmp_path, script, async_script) -> None:
    with pytest.raises(AtollError, match="has no arrivals"):
        plot_run(script().write(tmp_path / "sync"), tmp_path / "figure.png", "asynchrony")
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        for event in list(async_script().events())[:5]:
            sink.emit(event)
    with pytest.raises(AtollError, match="has no arrivals"):
        plot_run(tmp_path, tmp_path / "figure.png", "asynchrony")
    with pytest.raises(ConfigError, match="Rename it"):
        plot_run(tmp_path, tmp_path / "figure.bmp", "asynchrony")


@pytest.mark.parametrize(("step_s", "scale"), [(1.0, "linear"), (100.0, "log")])
def test_synchronous_and_asynchronous_runs_stand_together_against_virtual_time(
    tmp_path, script, async_script, step_s: float, scale: str
) -> None:
    """Each line ends where its run did, and is named with the loss that it ended at."""
    sync, hub = script(rounds=10, step_s=step_s), async_script(rounds=30)
    figure = comparison_figure([sync.write(tmp_path / "a"), hub.write(tmp_path / "b")])
    time = figure.axes[1]
    unit_s = 1.0 if step_s == 1.0 else 60.0
    ends = [[e.virtual_time_s for e in run.events() if isinstance(e, Evaluated)][-1] / unit_s for run in (sync, hub)]
    assert [line.get_xdata()[-1] for line in time.get_lines()] == pytest.approx(ends)
    assert time.get_xscale() == scale
    assert time.xaxis.get_major_formatter()(0.5) == "0.5", "a time reads as a number, not as a power of ten"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["demo-ddp (2.35)", "demo-async (2.00)"]


def test_a_point_of_the_training_loss_stands_for_a_round_of_every_worker(tmp_path, async_script) -> None:
    run = async_script(rounds=12)
    rounds = [event for event in run.events() if isinstance(event, RoundFinished)]
    training = run_figure(run.write(tmp_path / "run")).axes[0].get_lines()[0]
    assert list(training.get_xdata()) == [event.steps for event in rounds[2::3]]
    assert training.get_ydata()[0] == pytest.approx(sum(event.loss for event in rounds[:3]) / 3)


# ------------------------------------------------------------------------------------------- exchanges in the background


@pytest.fixture
def acco(tmp_path):
    """The events of a run of ACCO on unequal islands, and a folder with them."""
    torch.set_num_threads(1)
    link = Link(latency_s=0.05, bandwidth_mbit_per_s=math.inf)
    done = simulate(ACCO(), steps=8, cluster=Cluster(islands=3, step_time_s=(1.0, 1.0, 3.0), link=link))
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        for event in done.events:
            sink.emit(event)
    return done, tmp_path


def test_the_panels_show_the_last_rounds_and_the_whole_run(acco) -> None:
    _, folder = acco
    timeline, times, batches = run_figure(folder, "overlap").axes
    islands = read_overlap(folder).islands
    assert [tick.get_text() for tick in timeline.get_yticklabels()] == ["0", "1", "2"]
    stacked: dict[int, float] = {}
    for bar in times.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        stacked[at] = stacked.get(at, 0.0) + bar.get_height()
    assert stacked == pytest.approx({island.island: 100.0 for island in islands})
    assert [bar.get_height() for bar in batches.patches] == [island.batches for island in islands]


def test_the_last_rounds_are_those_and_no_others(acco) -> None:
    done, _ = acco
    boundary_s = done.of(RoundFinished)[-3].virtual_time_s
    spans = last_rounds(done.events, rounds=2)
    assert {island for island, *_ in spans} == {0, 1, 2}
    first = [what for island, what, _ in spans if island == 0]
    assert set(first) == {"computing", "exchange in the background"}
    assert first.count("computing") == 4  # two halves in each of two rounds
    assert min(start for island, what, (start, _) in spans if (island, what) == (2, "computing")) == pytest.approx(boundary_s)


def test_a_run_that_has_just_begun_is_drawn_as_far_as_it_is(acco, tmp_path) -> None:
    done, _ = acco
    assert last_rounds(done.events[:6])
    (tmp_path / "young").mkdir()
    with JsonlSink(tmp_path / "young" / "events.jsonl") as sink:
        for event in done.events[:12]:
            sink.emit(event)
    assert plot_run(tmp_path / "young", tmp_path / "new" / "figure.png", "overlap").read_bytes().startswith(b"\x89PNG")


def test_overlap_of_a_run_without_exchanges_cannot_be_drawn(tmp_path, async_script) -> None:
    with pytest.raises(AtollError, match="has no exchanges"):
        plot_run(async_script().write(tmp_path / "hub"), tmp_path / "figure.png", "overlap")
    (tmp_path / "empty").mkdir()
    with JsonlSink(tmp_path / "empty" / "events.jsonl"):
        pass
    with pytest.raises(AtollError, match="has no exchanges"):
        plot_run(tmp_path / "empty", tmp_path / "figure.png", "overlap")
