"""A plot of loss against virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure, time_unit
from cells import Outcome

CAPTION = "loss against virtual time"


def save_curves(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draws the rows whose curves were kept."""
    save_figure(_figure, {label: outcome for label, outcome in outcomes.items() if outcome.curves}, path)


def _figure(outcomes: Mapping[str, Outcome]) -> Any:
    """One line per row and seed."""
    longest_s = max((point[0] for outcome in outcomes.values() for curve in outcome.curves for point in curve), default=1.0)
    unit, unit_s = time_unit(longest_s)
    figure, (panel,) = new_figure(1)
    figure.set_size_inches(7, 4.4)
    for colour, (label, outcome) in zip(COLOURS, outcomes.items(), strict=False):
        for number, curve in enumerate(outcome.curves):
            times, losses = [time_s / unit_s for time_s, _, _ in curve], [loss for _, _, loss in curve]
            panel.plot(times, losses, color=colour, linewidth=1.4, alpha=0.8, label=None if number else label)
            panel.plot(times[-1:], losses[-1:], color=colour, marker="o", markersize=4)
    panel.set_xlabel(f"virtual time ({unit})")
    panel.set_ylabel("validation loss")
    if outcomes:
        panel.legend(frameon=False, fontsize=10, title="one line per seed")
    return figure
