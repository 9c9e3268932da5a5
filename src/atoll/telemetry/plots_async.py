"""One asynchronous run as a figure: staleness over time, arrivals per window, steps per shard, and each worker's time.

Needs the extra `plot`. Runs that are not finished can be drawn too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.errors import AtollError
from atoll.core.events import Arrived
from atoll.core.optional_imports import require
from atoll.telemetry.async_summary import AsynchronySummary, WorkerTimes, read_asynchrony
from atoll.telemetry.clocks import read_clock
from atoll.telemetry.event_log import read_events
from atoll.telemetry.figures import COLOURS, new_figure, save_figure, short, time_unit
from atoll.telemetry.units import human_count

_DOTS = 400  # with more arrivals than this, single ones can no longer be told apart
_BINS = 100
_BARS_NAMED = 16


def plot_asynchrony(folder: str | Path, path: str | Path) -> Path:
    """Staleness, arrivals per window, steps per shard and workers' time of one asynchronous run, as .png, .svg or .pdf."""
    return save_figure(asynchrony_figure, folder, path)


def asynchrony_figure(folder: str | Path) -> Any:
    """What plot_asynchrony writes, as a matplotlib Figure."""
    summary = read_asynchrony(folder)
    if summary is None or not summary.arrivals:
        what = "is not asynchronous" if summary is None else "has no arrivals yet"
        raise AtollError(f"the run in {folder} {what}, so there is no staleness to draw. Draw it with plot_run.")
    points = [
        (event.time_s, event.staleness)
        for event in read_events(Path(folder) / "events.jsonl", kinds=(Arrived,))
        if isinstance(event, Arrived)
    ]
    figure, (staleness, windows, shards, workers) = new_figure(4)
    _draw_staleness(staleness, points, summary)
    staleness.set_xlabel(f"{read_clock(folder)} time ({time_unit(points[-1][0])[0]})")
    _draw_bars(windows, summary.arrivals_per_window.counts, "arrivals in a window", "windows")
    _draw_bars(shards, summary.steps_per_shard, "shard", "inner steps that arrived")
    _draw_times(workers, summary.workers)
    return figure


def in_bins(points: Sequence[tuple[float, int]], bins: int) -> list[tuple[float, float, int, int]]:
    """Points in order of time, in so many stretches of equal length: the middle of each, and its mean, least and most.

    >>> in_bins([(0.0, 2), (1.0, 4), (9.0, 0), (10.0, 1)], bins=2)
    [(2.5, 3.0, 2, 4), (7.5, 0.5, 0, 1)]
    """
    length_s = points[-1][0] / bins
    if not length_s:
        values = [value for _, value in points]
        return [(0.0, fmean(values), min(values), max(values))]
    groups: dict[int, list[int]] = {}
    for time_s, value in points:
        groups.setdefault(min(bins - 1, int(time_s / length_s)), []).append(value)
    return [((number + 0.5) * length_s, fmean(group), min(group), max(group)) for number, group in groups.items()]


def _draw_staleness(panel: Any, points: Sequence[tuple[float, int]], summary: AsynchronySummary) -> None:
    """A dot per arrival; where these would run together, the mean in a band from least to most."""
    _, unit_s = time_unit(points[-1][0])
    if len(points) <= _DOTS:
        times = [time_s / unit_s for time_s, _ in points]
        panel.plot(times, [value for _, value in points], linestyle="", marker="o", markersize=4.5, color=COLOURS[0], alpha=0.6)
    else:
        binned = in_bins(points, _BINS)
        times = [time_s / unit_s for time_s, *_ in binned]
        low, high = [least for *_, least, _ in binned], [most for *_, most in binned]
        panel.fill_between(times, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="least to most")
        panel.plot(times, [mean for _, mean, *_ in binned], color=COLOURS[0], linewidth=1.8, label="mean")
    mean = summary.staleness.mean
    panel.axhline(mean, color=COLOURS[1], linewidth=1.2, linestyle="--", label=f"mean of the run ({mean:.3g})")
    panel.set_ylabel("staleness (updates)")
    panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    panel.yaxis.set_major_locator(_whole_numbers())
    panel.legend(frameon=False, fontsize=11)


def _draw_bars(panel: Any, heights: Mapping[int, int], name: str, height_name: str) -> None:
    """A bar per number; all are named while there is room."""
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    panel.bar(list(heights), list(heights.values()), color=COLOURS[0], width=0.8)
    if len(heights) <= _BARS_NAMED and max(heights) - min(heights) < _BARS_NAMED:
        panel.set_xticks(range(min(heights), max(heights) + 1))
    else:
        panel.xaxis.set_major_locator(_whole_numbers())
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(human_count(value))))
    panel.set_xlabel(name)
    panel.set_ylabel(height_name)
    panel.grid(visible=False, axis="x")


def _draw_times(panel: Any, workers: Sequence[WorkerTimes]) -> None:
    """Where each worker's time went: a stack of shares."""
    here = [worker for worker in workers if worker.present_s > 0]
    islands, below = [worker.island for worker in here], [0.0] * len(here)
    parts = {"computing": "computed_s", "waiting": "waited_s", "talking": "talked_s", "without result": "unfinished_s"}
    for number, (name, field) in enumerate(parts.items()):
        shares = [100 * getattr(worker, field) / worker.present_s for worker in here]
        if any(shares):
            panel.bar(islands, shares, bottom=below, color=COLOURS[number], width=0.8, label=name)
        below = [one + two for one, two in zip(below, shares, strict=True)]
    panel.xaxis.set_major_locator(_whole_numbers())
    panel.set_xlabel("worker")
    panel.set_ylabel("its time (%)")
    panel.grid(visible=False, axis="x")
    panel.legend(frameon=False, fontsize=11, loc="lower right")


def _whole_numbers() -> Any:
    ticker = require("matplotlib.ticker", extra="plot", purpose="figures")
    return ticker.MaxNLocator(nbins=6, integer=True)
