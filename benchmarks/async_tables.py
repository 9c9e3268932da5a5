"""What stands before the tables of asynchronous Local-SGD's ablations, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wording
from async_rows import DDP, DELAYED, DILOCO, NAIVE, SAME_TOKENS, SYNC, Plan
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure, time_unit
from cells import Outcome
from groups import Group


def introduction(plan: Plan, seeds: Sequence[int], default: Outcome) -> str:
    diloco = next(setting for setting in plan.base(DILOCO) if setting.startswith("algorithm="))
    return (
        f"{wording.decoder_text(default)} on "
        f"{plan.islands} workers of very different speeds: {plan.warm_start} steps of warm start, then "
        f"{plan.steps} per worker, {plan.steps * plan.islands} local updates in all; seeds {', '.join(map(str, seeds))}. This is "
        f"{DELAYED}, Delayed Nesterov with Dynamic Local Updates, and a row adds the settings it shows (a row of recipe {DILOCO} "
        f"has `{diloco}` instead, and one of recipe {DDP} has `algorithm=DDP()`):\n\n```\n{default.row.command}\n```\n\n"
        f"{wording.RULE}\n\nTokens include the warm start's. A hub stops with the arrival that reaches the local updates, up to a "
        f"round too late; only where tokens differ by more than {100 * SAME_TOKENS:g} % does the verdict say how many times as "
        f"many there are. Bytes sent are per worker, on average. The last column is the virtual time as a share of synchronous "
        f"training's on the same workers."
    )


def plot_levels(groups: Sequence[Group], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss and virtual time by level, of the three methods."""
    group = next((group for group in groups if group.name == "level"), None)
    if group is None:
        return None
    levels = [label.removesuffix(f", {SYNC}") for label in group.rows if label.endswith(f", {SYNC}")]
    save_figure(lambda found: _levels_figure(levels, found), outcomes, path)
    return "loss and virtual time by level"


def _levels_figure(levels: Sequence[str], outcomes: Mapping[str, Outcome]) -> Any:
    """Means with bars from least to greatest; methods stand side by side, so that bars do not cover each other."""
    figure, (losses, times) = new_figure(2)
    longest_s = max((outcomes[f"{level}, {SYNC}"].mean("virtual_time_s") or 0.0 for level in levels), default=0.0)
    unit, unit_s = time_unit(longest_s)
    for number, (method, marker) in enumerate(((SYNC, "s"), (NAIVE, "^"), (DELAYED, "o"))):
        colour, style = COLOURS[number], {"linestyle": "", "marker": marker, "markersize": 6}
        for at, level in enumerate(levels):
            outcome, place, label = outcomes[f"{level}, {method}"], at + 0.14 * (number - 1), None if at else method
            if outcome.loss is not None:
                loss = outcome.loss
                bars = [[loss.mean - loss.low], [loss.high - loss.mean]]
                losses.errorbar(place, loss.mean, yerr=bars, color=colour, capsize=3, label=label, **style)
            if (time_s := outcome.mean("virtual_time_s")) is not None:
                times.plot([place], [time_s / unit_s], color=colour, label=label, **style)
    for panel in (losses, times):
        panel.set_xticks(range(len(levels)), levels)
        panel.set_xlabel("how much the workers differ")
        panel.grid(visible=False, axis="x")
    losses.set_ylabel("validation loss (bars: over seeds)")
    times.set_ylabel(f"virtual time ({unit})")
    times.set_ylim(bottom=0)
    times.legend(frameon=False, fontsize=11)
    return figure
