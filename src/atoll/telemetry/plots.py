"""Figures of runs: validation loss against tokens, time and bytes; and one run's losses and agreement.

Needs the extra `plot`. A figure is made as an object and written to a file; pyplot, and with it the user's own backend and open
figures, is never touched. Runs that are not finished can be drawn too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import Compared, Evaluated, RoundFinished, RunStarted
from atoll.telemetry.async_summary import is_asynchronous
from atoll.telemetry.clocks import Clock, clock_name, clock_of
from atoll.telemetry.event_log import read_events
from atoll.telemetry.figures import COLOURS, format_axis, new_figure, save_figure, time_unit
from atoll.telemetry.labels import RunName, distinct_labels
from atoll.telemetry.units import human_bytes, human_count, human_loss

_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FEW_POINTS = 30


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """One run's evaluations."""

    label: str
    points: list[Evaluated]
    clock: Clock

    @property
    def losses(self) -> list[float]:
        return [point.metrics["loss"] for point in self.points]


def plot_comparison(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Validation loss of several runs against tokens, time and bytes sent per island, as one figure.

    The axis of times names the clock. Where some runs were simulated and others were not, it names both, and the legend each one's.

    Args:
        folders: the runs' folders, in the order of the legend.
        path: where to write the figure, as .png, .svg or .pdf.
    """
    return save_figure(comparison_figure, folders, path)


def plot_run(folder: str | Path, path: str | Path) -> Path:
    """One run's training and validation loss; and where islands were compared, the cosine and the norms of their deltas."""
    return save_figure(run_figure, folder, path)


def comparison_figure(folders: Sequence[str | Path]) -> Any:
    """What plot_comparison writes, as a matplotlib Figure: for notebooks, or to change it before it is saved."""
    curves = _curves(folders)
    figure, panels = new_figure(3, share_y=True)
    unit, unit_s = time_unit(max(curve.points[-1].time_s for curve in curves))
    _draw(panels[0], curves, lambda e: e.tokens, "tokens", human_count)
    clock = clock_name(curve.clock for curve in curves)
    _draw(panels[1], curves, lambda e: e.time_s / unit_s, f"{clock} ({unit})", "{:g}".format)
    _draw(panels[2], curves, lambda e: e.sent_bytes_per_island, "bytes sent per island", human_bytes)
    panels[0].set_ylabel("validation loss")
    handles = panels[0].get_lines()
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), frameon=False, fontsize=11)
    return figure


def run_figure(folder: str | Path) -> Any:
    """What plot_run writes, as a matplotlib Figure."""
    rounds, evaluations, compared = _read_run(Path(folder))
    # One worker's round says little about all: each has its own shard. So a point stands for as many rounds as there are workers.
    together = rounds[0].islands if is_asynchronous(folder) else 1
    cosines = [(steps, event) for steps, event in compared if event.cosine_mean is not None]
    figure, panels = new_figure(1 + bool(cosines) + bool(compared), share_x=True)
    _draw_losses(panels[0], rounds, evaluations, together)
    if cosines:
        _draw_cosines(panels[1], cosines)
    if compared:
        _draw_norms(panels[-1], compared)
    for panel in panels:
        panel.set_xlabel("inner steps")
        format_axis(panel, human_count)
    return figure


# ---------------------------------------------------------------------------------------------------------------- reading


def _curves(folders: Sequence[str | Path]) -> list[_Curve]:
    if not folders:
        raise ConfigError("no run folders were given, so there is nothing to draw. Give one folder or more.")
    names, points, clocks = [], [], []
    for folder in folders:
        events = list(read_events(Path(folder) / "events.jsonl", kinds=(RunStarted, Evaluated)))
        started = next((event for event in events if isinstance(event, RunStarted)), None)
        evaluations = [event for event in events if isinstance(event, Evaluated) and "loss" in event.metrics]
        if started is None or not evaluations:
            raise AtollError(f"the run in {folder} has not been evaluated yet, so it has no curve. Leave it out, or let it run on.")
        names.append(RunName(recipe=started.recipe, seed=started.seed, folder=str(folder), engine=started.engine))
        points.append(evaluations)
        clocks.append(clock_of(started.engine))
    labels = distinct_labels(names)
    if len(set(clocks)) > 1:
        labels = [f"{label}, {clock} time" for label, clock in zip(labels, clocks, strict=True)]
    return [_Curve(label=label, points=run, clock=clock) for label, run, clock in zip(labels, points, clocks, strict=True)]


def _read_run(folder: Path) -> tuple[list[RoundFinished], list[Evaluated], list[tuple[int, Compared]]]:
    """Rounds, evaluations, and comparisons with the step at which their round ended."""
    rounds: list[RoundFinished] = []
    evaluations: list[Evaluated] = []
    compared: list[tuple[int, Compared]] = []
    open_round: list[Compared] = []
    for event in read_events(folder / "events.jsonl", kinds=(RoundFinished, Evaluated, Compared)):
        if isinstance(event, RoundFinished):
            rounds.append(event)
            compared += [(event.steps, earlier) for earlier in open_round]
            open_round = []
        elif isinstance(event, Evaluated) and "loss" in event.metrics:
            evaluations.append(event)
        elif isinstance(event, Compared) and event.norms:
            open_round.append(event)
    if not rounds:
        raise AtollError(f"the run in {folder} has not finished a round yet, so there is nothing to draw. Let it run on.")
    return rounds, evaluations, compared


# ---------------------------------------------------------------------------------------------------------------- drawing


def _draw(
    panel: Any, curves: Sequence[_Curve], x: Callable[[Evaluated], float], name: str, text: Callable[[float], str] | None
) -> None:
    """Every curve against one quantity; on a logarithmic axis where the runs' totals lie a decade or more apart."""
    totals = [x(curve.points[-1]) for curve in curves]
    logarithmic = min(totals) > 0 and max(totals) >= 10 * min(totals)
    for number, curve in enumerate(curves):
        points = [(x(point), loss) for point, loss in zip(curve.points, curve.losses, strict=True)]
        if logarithmic:
            points = [point for point in points if point[0] > 0]  # zero has no place on a logarithmic axis
        panel.plot(
            *zip(*points, strict=True),
            label=f"{curve.label} ({human_loss(curve.losses[-1])})",
            color=COLOURS[number % len(COLOURS)],
            linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markevery=sorted({*range(0, len(points), max(1, len(points) // 10)), len(points) - 1}),
            markersize=4.5,
            linewidth=1.8,
        )
    if logarithmic:
        panel.set_xscale("log")
    panel.set_xlabel(name)
    format_axis(panel, text, logarithmic=logarithmic)


def _draw_losses(panel: Any, rounds: Sequence[RoundFinished], evaluations: Sequence[Evaluated], together: int) -> None:
    """Each point of the training loss is the mean over so many rounds, and stands at the last of them."""
    groups = [rounds[start : start + together] for start in range(0, len(rounds), together)]
    losses = [fmean(event.loss for event in group) for group in groups]
    panel.plot([group[-1].steps for group in groups], losses, color=COLOURS[4], linewidth=1.2, label="training")
    if evaluations:
        steps, losses = [event.steps for event in evaluations], [event.metrics["loss"] for event in evaluations]
        marker = "o" if len(steps) <= _FEW_POINTS else None
        panel.plot(steps, losses, color=COLOURS[1], linewidth=1.8, marker=marker, markersize=4.5, label="validation")
    panel.set_ylabel("loss")
    panel.legend(frameon=False, fontsize=11)


def _draw_cosines(panel: Any, compared: Sequence[tuple[int, Compared]]) -> None:
    steps = [at for at, _ in compared]
    means = [event.cosine_mean or 0.0 for _, event in compared]
    spread = [event.cosine_std or 0.0 for _, event in compared]
    low = [mean - std for mean, std in zip(means, spread, strict=True)]
    high = [mean + std for mean, std in zip(means, spread, strict=True)]
    panel.fill_between(steps, low, high, color=COLOURS[2], alpha=0.2, linewidth=0)
    panel.plot(steps, means, color=COLOURS[2], linewidth=1.8)
    panel.set_ylabel("cosine between deltas (mean ± std)")


def _draw_norms(panel: Any, compared: Sequence[tuple[int, Compared]]) -> None:
    steps = [at for at, _ in compared]
    low, high = [min(event.norms) for _, event in compared], [max(event.norms) for _, event in compared]
    panel.fill_between(steps, low, high, color=COLOURS[0], alpha=0.25, linewidth=0, label="islands' deltas")
    panel.plot(steps, [sum(event.norms) / len(event.norms) for _, event in compared], color=COLOURS[0], linewidth=1.8)
    panel.plot(steps, [event.mean_norm for _, event in compared], color=COLOURS[1], linewidth=1.8, label="their mean")
    panel.set_ylabel("norm")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=11)
