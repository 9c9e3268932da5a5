"""The figure of an asynchronous run shows its arrivals, windows and shards, and runs of both kinds go onto one comparison."""

from __future__ import annotations

import pytest

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Arrived, Evaluated, RoundFinished
from atoll.telemetry import JsonlSink, plot_asynchrony, read_asynchrony
from atoll.telemetry.plots import comparison_figure, run_figure
from atoll.telemetry.plots_async import asynchrony_figure, in_bins


def test_the_panels_show_every_arrival_every_window_and_every_shard(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    folder = run.write(tmp_path / "run")
    staleness, windows, shards, workers = asynchrony_figure(folder).axes
    arrivals = [event for event in run.events() if isinstance(event, Arrived)]
    dots = staleness.get_lines()[0]
    assert list(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == [(e.virtual_time_s, e.staleness) for e in arrivals]
    summary = read_asynchrony(folder)
    assert [bar.get_height() for bar in windows.patches] == list(summary.arrivals_per_window.counts.values())
    assert [bar.get_height() for bar in shards.patches] == list(summary.steps_per_shard.values())
    assert f"({summary.staleness.mean:.3g})" in staleness.get_legend().get_texts()[-1].get_text()
    stacked = {}
    for bar in workers.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        stacked[at] = stacked.get(at, 0.0) + bar.get_height()
    assert stacked == pytest.approx({worker.island: 100.0 for worker in summary.workers})


def test_many_arrivals_are_drawn_as_a_band_around_their_mean(tmp_path, async_script) -> None:
    staleness = asynchrony_figure(async_script(rounds=600).write(tmp_path / "run")).axes[0]
    assert len(staleness.get_lines()[0].get_xdata()) <= 100
    assert [text.get_text() for text in staleness.get_legend().get_texts()][:2] == ["least to most", "mean"]


def test_every_arrival_is_in_one_bin() -> None:
    points = [(0.1 * number, number % 7) for number in range(1, 500)]
    binned = in_bins(points, bins=1)
    assert binned == [(pytest.approx(24.95), pytest.approx(sum(value for _, value in points) / 499), 0, 6)]
    assert in_bins([(0.0, 3), (0.0, 1)], bins=10) == [(0.0, 2.0, 1, 3)]


def test_the_figure_is_written_also_while_the_run_goes_on(tmp_path, async_script) -> None:
    folder = async_script(finished=False).write(tmp_path / "run")
    assert plot_asynchrony(folder, tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_hub_or_without_an_arrival_is_named(tmp_path, script, async_script) -> None:
    with pytest.raises(AtollError, match="is not asynchronous"):
        plot_asynchrony(script().write(tmp_path / "sync"), tmp_path / "figure.png")
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        for event in list(async_script().events())[:5]:
            sink.emit(event)
    with pytest.raises(AtollError, match="has no arrivals yet"):
        plot_asynchrony(tmp_path, tmp_path / "figure.png")
    with pytest.raises(ConfigError, match="Rename it"):
        plot_asynchrony(tmp_path, tmp_path / "figure.bmp")


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
