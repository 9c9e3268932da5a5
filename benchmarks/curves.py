"""Plots of outcomes whose curves were kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure, time_unit
from cells import Outcome

CAPTION = "loss against virtual time"
_DASHES = ("-", "--", ":", "-.")


def save_curves(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draws the loss against virtual time of the rows whose curves were kept."""
    save_figure(_figure, {label: outcome for label, outcome in outcomes.items() if outcome.curves}, path)


def line_styles(count: int) -> list[dict[str, Any]]:
    """Colour and dashes of so many lines, no two alike up to four times the number of colours.

    >>> len({tuple(style.values()) for style in line_styles(28)})
    28
    """
    return [
        {"color": COLOURS[number % len(COLOURS)], "linestyle": _DASHES[number // len(COLOURS) % len(_DASHES)]}
        for number in range(count)
    ]


def _figure(outcomes: Mapping[str, Outcome]) -> Any:
    """One line per row and seed."""
    longest_s = max((point[0] for outcome in outcomes.values() for curve in outcome.curves for point in curve), default=1.0)
    unit, unit_s = time_unit(longest_s)
    figure, (panel,) = new_figure(1)
    figure.set_size_inches(7, 4.4)
    for style, (label, outcome) in zip(line_styles(len(outcomes)), outcomes.items(), strict=True):
        for number, curve in enumerate(outcome.curves):
            times, losses = [time_s / unit_s for time_s, _, _ in curve], [loss for _, _, loss in curve]
            panel.plot(times, losses, **style, linewidth=1.4, alpha=0.8, label=None if number else label)
            panel.plot(times[-1:], losses[-1:], color=style["color"], marker="o", markersize=4)
    panel.set_xlabel(f"virtual time ({unit})")
    panel.set_ylabel("validation loss")
    if outcomes:
        panel.legend(frameon=False, fontsize=10, title="one line per seed")
    return figure


def costs_figure(outcomes: Mapping[str, Outcome]) -> Any:
    """Loss against tokens, virtual time and bytes; one line per row and seed."""
    figure, panels = new_figure(3)
    for style, (label, outcome) in zip(line_styles(len(outcomes)), outcomes.items(), strict=True):
        run = outcome.row.run(0)
        tokens_per_update = run.train.batch_size * run.data.seq_len / 1e6  # type: ignore[union-attr]
        for number, (curve, sent) in enumerate(zip(outcome.curves, outcome.sent, strict=True)):
            losses = [loss for _, _, loss in curve]
            against: tuple[Sequence[float], ...] = (
                [updates * tokens_per_update for _, updates, _ in curve],
                [t / 3600 for t, _, _ in curve],
                [b / 1e6 for b in sent],
            )
            for panel, values in zip(panels, against, strict=True):
                panel.plot(values, losses, **style, linewidth=1.3, alpha=0.8, label=None if number else label)
    for panel, name in zip(panels, ("tokens (millions)", "virtual time (hours)", "sent per island (MB)"), strict=True):
        panel.set(xlabel=name, ylabel="validation loss")
    panels[2].set_xscale("symlog")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def deltas_figure(outcomes: Mapping[str, Outcome]) -> Any:
    """Cosines and norms of the islands' deltas over a run: the mean over seeds of each row, and a band from the lowest to the
    highest."""
    figure, panels = new_figure(3)
    for style, (label, outcome) in zip(line_styles(len(outcomes)), outcomes.items(), strict=True):
        rounds = list(zip(*outcome.deltas, strict=True))  # of each round, the figures of all seeds
        at = [number / max(1, len(rounds) - 1) for number in range(len(rounds))]
        for panel, part in zip(panels, (3, 1, 2), strict=True):  # of a round: number, mean norm, norm of the mean, cosine
            seeds = [[math.nan if each[part] is None else each[part] for each in found] for found in rounds]
            panel.plot(at, [fmean(values) for values in seeds], **style, linewidth=1.3, label=label)
            panel.fill_between(at, [*map(min, seeds)], [*map(max, seeds)], color=style["color"], alpha=0.15, linewidth=0)
    for panel, name in zip(
        panels, ("mean cosine of the islands' deltas", "mean norm of the deltas", "norm of their mean"), strict=True
    ):
        panel.set(xlabel="share of the run", ylabel=name)
    panels[0].legend(frameon=False, fontsize=8)
    return figure
