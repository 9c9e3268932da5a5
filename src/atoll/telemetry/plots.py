"""Plots of runs, finished or not: several runs compared, and the figures of one run. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Arrived, Attended, Compared, Computed, Evaluated, Event, Exchanged, Leased, RoundFinished, RunStarted
from atoll.telemetry.async_summary import AsynchronySummary, WorkerTimes, is_asynchronous, read_asynchrony
from atoll.telemetry.compare import distinct_labels
from atoll.telemetry.event_log import clock_of, read_clock, read_events, read_kind
from atoll.telemetry.plot_style import COLOURS, FONT_SIZE, GREY, add_legend, format_axis, new_figure, save_figure, time_unit
from atoll.telemetry.summary import ParticipationSummary, read_participation
from atoll.telemetry.sync_summary import Interval, IslandTimes, OverlapSummary, by_device, device_name, read_overlap
from atoll.telemetry.units import human_bytes, human_count, human_loss

_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MAX_MARKERS = 30
_MAX_DOTS = 400  # more arrivals than this are drawn as a band
_BINS = 100
_MAX_TICKS = 16  # bars that all have a name
_TIMELINE_ROUNDS = 4
_TIMELINE_ISLANDS = 16
_MAX_EDGES = 40
_HIDDEN = COLOURS[2]
_PART_COLOURS = {
    "computing": COLOURS[0],
    "communicating": COLOURS[1],
    "exchange in the background": _HIDDEN,
    "waiting": GREY,
    "no result": COLOURS[3],
}


def plot_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Validation loss of several runs against tokens, time and bytes sent per island, as .png, .svg or .pdf.

    The axis of times names the clock. If some runs were simulated and others were not, the legend names the clock of each.
    """
    return save_figure(comparison_figure, folders, path)


def plot_run(folder: str | Path, path: str | Path, kind: str = "losses") -> Path:
    """One figure of a run, as .png, .svg or .pdf.

    Args:
        kind: losses (with the agreement of the islands' deltas), asynchrony, overlap or participation.
    """
    return save_figure(lambda run: run_figure(run, kind), folder, path)


def write_plots(folder: str | Path) -> list[Path]:
    """Writes every figure that applies to the run in a folder into that folder, and returns their paths."""
    kinds = [kind for kind, plot in _PLOTS.items() if getattr(plot.read(folder), plot.reported, 0)]
    return [plot_run(folder, Path(folder) / "plot.png"), *(plot_run(folder, Path(folder) / f"{kind}.png", kind) for kind in kinds)]


def run_figure(folder: str | Path, kind: str = "losses") -> Any:
    """The matplotlib Figure that plot_run writes."""
    figure = _figure_of(Path(folder), kind)
    for started in read_kind(folder, RunStarted)[:1]:
        name = f"{started.recipe}, seed {started.seed}: {Path(folder).name}"
        figure.supxlabel(name, x=0.01, horizontalalignment="left", fontsize=FONT_SIZE, color=GREY)
    return figure


def _figure_of(folder: Path, kind: str) -> Any:
    if kind == "losses":
        return _losses_figure(folder)
    if kind not in _PLOTS:
        raise ConfigError(f"there is no plot {kind!r} of a run. Choose one of: losses, {', '.join(_PLOTS)}.")
    plot = _PLOTS[kind]
    summary = plot.read(folder)
    if not getattr(summary, plot.needed, 0):
        raise AtollError(f"the run in {folder} has no {plot.needed}, so it has no {kind} to draw. Draw it with kind='losses'.")
    return plot.draw(folder, summary)


def comparison_figure(folders: Sequence[str | Path]) -> Any:
    """The matplotlib Figure that plot_comparison writes."""
    if not folders:
        raise ConfigError("no run folders were given, so there is nothing to draw. Give one folder or more.")
    starts, curves = [], []
    for folder in folders:
        started = read_kind(folder, RunStarted)
        points = [event for event in read_kind(folder, Evaluated) if "loss" in event.metrics]
        if not started or not points:
            raise AtollError(f"the run in {folder} has not been evaluated yet, so it has no curve. Leave it out, or let it run on.")
        starts.append(started[0])
        curves.append(points)
    clocks = [clock_of(started.engine) for started in starts]
    labels = distinct_labels(starts, [str(folder) for folder in folders])
    if len(set(clocks)) > 1:
        labels = [f"{label}, {clock} time" for label, clock in zip(labels, clocks, strict=True)]
    unit, unit_s = time_unit(max(points[-1].time_s for points in curves))
    axes: tuple[tuple[str, Callable[[Evaluated], float], Callable[[float], str]], ...] = (
        ("tokens", lambda e: e.tokens, human_count),
        (f"{' or '.join(sorted(set(clocks)))} time ({unit})", lambda e: e.time_s / unit_s, "{:g}".format),
        ("bytes sent per island", lambda e: e.sent_bytes_per_island, human_bytes),
    )
    figure, panels = new_figure(3, ("Loss by tokens", "Loss by time", "Loss by bytes sent"), share_y=True)
    for panel, (name, x, text) in zip(panels, axes, strict=True):
        _draw_curves(panel, dict(zip(labels, curves, strict=True)), x, text)
        panel.set_xlabel(name)
    panels[0].set_ylabel("validation loss")
    add_legend(figure)
    return figure


def _draw_curves(
    panel: Any, curves: Mapping[str, Sequence[Evaluated]], x: Callable[[Evaluated], float], text: Callable[[float], str]
) -> None:
    """Every curve against one quantity; on a logarithmic axis if the totals of the runs differ by a factor of 10 or more."""
    totals = [x(points[-1]) for points in curves.values()]
    logarithmic = min(totals) > 0 and max(totals) >= 10 * min(totals)
    for number, (label, points) in enumerate(curves.items()):
        drawn = [(x(point), point.metrics["loss"]) for point in points if x(point) > 0 or not logarithmic]
        panel.plot(
            *zip(*drawn, strict=True),
            label=f"{label} ({human_loss(points[-1].metrics['loss'])})",
            color=COLOURS[number % len(COLOURS)],
            linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=sorted({*range(0, len(drawn), max(1, len(drawn) // 10)), len(drawn) - 1}),
            markersize=4.5,
            linewidth=1.8,
        )
    panel.set_xscale("log" if logarithmic else "linear")
    format_axis(panel.xaxis, text, log=logarithmic)


def _losses_figure(folder: Path) -> Any:
    """Training and validation loss; where the deltas of islands were compared, their cosines and norms."""
    rounds, evaluations, compared = _read_rounds(folder)
    # A round of one worker says little about the others, which have other shards: a point averages one round per worker.
    group = rounds[0].islands if is_asynchronous(folder) else 1
    cosines = [(steps, event) for steps, event in compared if event.cosine_mean is not None]
    titles = ["Loss", *(["Agreement of deltas"] if cosines else ()), *(["Size of deltas"] if compared else ())]
    figure, panels = new_figure(len(titles), titles, share_x=True)
    _draw_losses(panels[0], rounds, evaluations, group)
    if cosines:
        means, stds = [e.cosine_mean or 0.0 for _, e in cosines], [e.cosine_std or 0.0 for _, e in cosines]
        low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
        _draw_band(panels[1], [steps for steps, _ in cosines], low, means, high, COLOURS[2], None)
        panels[1].set_ylabel("cosine of deltas (± std)")
    if compared:
        norms = [event.norms for _, event in compared]
        means, low, high = [sum(n) / len(n) for n in norms], [min(n) for n in norms], [max(n) for n in norms]
        steps = [steps for steps, _ in compared]
        _draw_band(panels[-1], steps, low, means, high, COLOURS[0], "norms of the islands' deltas")
        mean_norms = [event.mean_norm for _, event in compared]
        panels[-1].plot(steps, mean_norms, color=COLOURS[3], linewidth=1.8, label="norm of the mean delta")
        panels[-1].set_ylabel("norm")
        panels[-1].set_ylim(bottom=0)
    for panel in panels:
        panel.set_xlabel("inner steps")
        format_axis(panel.xaxis, human_count)
    add_legend(figure)
    return figure


def _read_rounds(folder: Path) -> tuple[list[RoundFinished], list[Evaluated], list[tuple[int, Compared]]]:
    """Rounds, evaluations, and comparisons of deltas with the step at which their round ended."""
    rounds: list[RoundFinished] = []
    compared: list[tuple[int, Compared]] = []
    open_round: list[Compared] = []
    for event in read_events(folder / "events.jsonl", kinds=(RoundFinished, Compared)):
        if isinstance(event, RoundFinished):
            rounds.append(event)
            compared += [(event.steps, earlier) for earlier in open_round]
            open_round = []
        elif isinstance(event, Compared) and event.norms:
            open_round.append(event)
    evaluations = [event for event in read_kind(folder, Evaluated) if "loss" in event.metrics]
    if not rounds:
        raise AtollError(f"the run in {folder} has not finished a round yet, so there is nothing to draw. Let it run on.")
    return rounds, evaluations, compared


def _draw_losses(panel: Any, rounds: Sequence[RoundFinished], evaluations: Sequence[Evaluated], group: int) -> None:
    """A point of the training loss is the mean of a group of rounds, at the step of the last."""
    groups = [rounds[start : start + group] for start in range(0, len(rounds), group)]
    losses = [fmean(event.loss for event in members) for members in groups]
    panel.plot([members[-1].steps for members in groups], losses, color=COLOURS[4], linewidth=1.2, label="training loss")
    if evaluations:
        steps, losses = [event.steps for event in evaluations], [event.metrics["loss"] for event in evaluations]
        marker = "o" if len(steps) <= _MAX_MARKERS else None
        panel.plot(steps, losses, color=COLOURS[1], linewidth=1.8, marker=marker, markersize=4.5, label="validation loss")
    panel.set_ylabel("loss")


def _draw_band(panel: Any, x: Any, low: Any, middle: Any, high: Any, colour: str, label: str | None) -> None:
    panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    panel.plot(x, middle, color=colour, linewidth=1.8, label=label)


def _asynchrony_figure(folder: Path, summary: AsynchronySummary) -> Any:
    """Staleness over time, arrivals per window, steps per shard, and how each worker spent its time."""
    points = [(event.time_s, event.staleness) for event in read_kind(folder, Arrived)]
    titles = ("Staleness of arrivals", "Arrivals per window", "Steps by shard", "Time of each worker")
    figure, (staleness, windows, shards, workers) = new_figure(4, titles)
    unit, unit_s = time_unit(points[-1][0])
    if len(points) <= _MAX_DOTS:
        times, values = zip(*points, strict=True)
        dots = {"linestyle": "", "marker": "o", "markersize": 4.5, "color": COLOURS[0], "alpha": 0.6}
        staleness.plot([time_s / unit_s for time_s in times], values, **dots)
    else:
        middles, means, low, high = zip(*binned(points, _BINS), strict=True)
        _draw_band(staleness, [time_s / unit_s for time_s in middles], low, means, high, COLOURS[0], None)
    mean = summary.staleness.mean
    staleness.axhline(mean, color=COLOURS[1], linewidth=1.2, linestyle="--")
    place = {"xycoords": staleness.get_yaxis_transform(), "ha": "right", "va": "bottom", "fontsize": FONT_SIZE}
    staleness.annotate(f"mean {mean:.3g}", (1.0, mean), color=COLOURS[1], **place)
    staleness.set(xlabel=f"{read_clock(folder)} time ({unit})", ylabel="staleness (updates)")
    staleness.set_ylim(bottom=min(0.0, staleness.get_ylim()[0]))
    format_axis(staleness.yaxis, whole=True)
    _draw_bars(windows, summary.arrivals_per_window.counts, "arrivals in a window", "windows")
    _draw_bars(shards, summary.steps_per_shard, "shard", "inner steps that arrived")
    _draw_time_shares(workers, summary.workers)
    workers.set_xlabel("worker")
    format_axis(workers.xaxis, whole=True)
    add_legend(figure)
    return figure


def binned(points: Sequence[tuple[float, int]], bins: int) -> list[tuple[float, float, int, int]]:
    """Points in order of time, in bins of equal length: the middle of each bin, and its mean, least and greatest value.

    >>> binned([(0.0, 2), (1.0, 4), (9.0, 0), (10.0, 1)], bins=2)
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


def _overlap_figure(folder: Path, summary: OverlapSummary) -> Any:
    """The last rounds as a timeline, how each island spent its time, and how much it computed."""
    events = read_events(folder / "events.jsonl", kinds=(RunStarted, Computed, Exchanged, RoundFinished))
    devices = summary.devices_per_island
    who = "island" if devices is None else "device"
    figure, (timeline, times, batches) = new_figure(3, ("The last rounds", f"Time of each {who}", f"Batches of each {who}"))
    _draw_timelines(timeline, last_rounds(by_device(events)), devices)
    timeline.set_xlabel(f"{read_clock(folder)} {timeline.get_xlabel()}")
    _draw_time_shares(times, summary.islands)
    hidden = [(island.island, 100 * island.hidden) for island in summary.islands if island.present_s and island.hidden is not None]
    if hidden:
        marks = {"linestyle": "", "marker": "D", "color": _HIDDEN, "markeredgecolor": "white", "clip_on": False, "zorder": 3}
        where = "" if devices is None else " inside"
        times.plot(*zip(*hidden, strict=True), label=f"hidden share of exchanges{where}", **marks)
    _draw_bars(batches, {island.island: island.batches for island in summary.islands}, "", "batches computed")
    for panel in (times, batches):
        format_axis(panel.xaxis, lambda value: device_name(round(value), devices), whole=True)
        panel.set_xlabel("island" if devices is None else "island.device")
    timeline.set_ylabel("island" if devices is None else "island.device")
    add_legend(figure)
    return figure


def last_rounds(events: Iterable[Event], rounds: int = _TIMELINE_ROUNDS) -> list[tuple[int, str, Interval]]:
    """What islands did in the last finished rounds (before the first is finished, in the open one), and when."""
    kept: list[list[Computed | Exchanged]] = []
    open_round: list[Computed | Exchanged] = []
    for event in events:
        if isinstance(event, Computed | Exchanged):
            open_round.append(event)
        elif isinstance(event, RoundFinished):
            kept, open_round = [*kept, open_round][-rounds:], []
    spans: list[tuple[int, str, Interval]] = []
    for event in chain.from_iterable(kept or [open_round]):
        if isinstance(event, Computed):
            spans.append((event.island, "computing", (event.start_s, event.end_s)))
        else:
            what = "exchange in the background" if event.background else "communicating"
            for island, arrived_s in zip(event.islands, event.arrived_s, strict=True):
                spans.append((island, what, (max(arrived_s, event.start_s), event.end_s)))
    return spans


def _draw_timelines(panel: Any, spans: Sequence[tuple[int, str, Interval]], devices: int | None) -> None:
    """Two bars per island: computing above, exchanges below. A gap in the upper bar is idle time."""
    numbers = sorted({island for island, *_ in spans})[:_TIMELINE_ISLANDS]
    drawn = [span for span in spans if span[0] in numbers]
    begin_s, end_s = min(start for _, _, (start, _) in drawn), max(end for _, _, (_, end) in drawn)
    unit, unit_s = time_unit(end_s - begin_s)
    bars = {"computing": (-0.4, 0.4), "exchange in the background": (0.05, 0.3), "communicating": (0.05, 0.3)}
    for what, (below, height) in bars.items():
        colour = _PART_COLOURS[what]
        if any(part == what for _, part, _ in drawn):
            panel.plot([], [], color=colour, linewidth=6, label=what)
        for place, number in enumerate(numbers):
            lane = [interval for island, part, interval in drawn if (island, part) == (number, what)]
            edge = "white" if len(lane) <= _MAX_EDGES else colour  # white edges of many short bars would hide them
            bounds = [((start - begin_s) / unit_s, (end - start) / unit_s) for start, end in lane]
            panel.broken_barh(bounds, (place + below, height), facecolors=colour, edgecolors=edge, linewidth=0.4)
    panel.set_yticks(range(len(numbers)), [device_name(number, devices) for number in numbers])
    panel.set_ylim(len(numbers) - 0.5, -0.5)  # the first island on top
    panel.set_xlabel(f"time of the last rounds ({unit})")
    panel.grid(visible=False, axis="y")


def _participation_figure(folder: Path, _: ParticipationSummary) -> Any:
    """Islands known, alive and participating over time, and the leases of data."""
    attended, leased = read_kind(folder, Attended), read_kind(folder, Leased)
    figure, (islands, leases) = new_figure(2, ("Islands at each commit", "Leases of data, in sum"), share_x=True)
    unit, unit_s = time_unit(attended[-1].time_s)
    times = [event.time_s / unit_s for event in attended]
    # Mostly the three are equal: the lower lines are wider, so that all can be seen.
    for name, colour, width in (("known", GREY, 7), ("alive", COLOURS[1], 4), ("participating", COLOURS[0], 1.5)):
        islands.step(times, [getattr(event, name) for event in attended], where="post", label=name, color=colour, linewidth=width)
    for name, label, colour in (("delivered", "delivered", COLOURS[2]), ("returned", "assigned again", COLOURS[3])):
        totals = list(accumulate(len(getattr(event, name)) for event in leased))
        leases.step(times, totals, where="post", label=label, color=colour)
    for panel, name in ((islands, "islands"), (leases, "leases of data")):
        panel.set(xlabel=f"wall time ({unit})", ylabel=name)
        panel.set_ylim(bottom=-0.03 * panel.get_ylim()[1])  # a line at 0 stands above the axis
        format_axis(panel.yaxis, human_count, whole=True)
    add_legend(figure)
    return figure


def _draw_bars(panel: Any, heights: Mapping[int, float], name: str, height_name: str) -> None:
    """A bar per number; all bars have a name while there is room."""
    panel.bar(list(heights), list(heights.values()), color=COLOURS[0], width=0.8)
    if max(heights) - min(heights) < _MAX_TICKS:
        panel.set_xticks(range(min(heights), max(heights) + 1))
    else:
        format_axis(panel.xaxis, whole=True)
    format_axis(panel.yaxis, human_count, whole=True)
    margin = 0.6 if len(heights) > 1 else 1.0
    panel.set_xlim(min(heights) - margin, max(heights) + margin)
    panel.set(xlabel=name, ylabel=height_name)
    panel.grid(visible=False, axis="x")


def _draw_time_shares(panel: Any, islands: Sequence[IslandTimes | WorkerTimes]) -> None:
    """How each island or worker spent its time: a stack of percentages."""
    present = [island for island in islands if island.present_s > 0]
    below = [0.0] * len(present)
    for name, field in present[0].time_parts.items() if present else ():
        shares = [100 * getattr(island, field) / island.present_s for island in present]
        if any(shares):
            numbers = [island.island for island in present]
            panel.bar(numbers, shares, bottom=below, color=_PART_COLOURS[name], width=0.8, label=name)
        below = [one + two for one, two in zip(below, shares, strict=True)]
    panel.set_ylabel("share of time (%)")
    panel.grid(visible=False, axis="x")


class _RunPlot(NamedTuple):
    read: Callable[[str | Path], Any]
    draw: Callable[[Path, Any], Any]
    needed: str  # the count in the summary that must not be 0 for the plot
    reported: str  # the count that must not be 0 for `write_plots`


_PLOTS: Mapping[str, _RunPlot] = {
    "overlap": _RunPlot(read_overlap, _overlap_figure, "exchanges", "background"),
    "participation": _RunPlot(read_participation, _participation_figure, "commits", "commits"),
    "asynchrony": _RunPlot(read_asynchrony, _asynchrony_figure, "arrivals", "arrivals"),
}
