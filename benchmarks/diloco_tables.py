"""What stands before the tables of DiLoCo's ablations, and their plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import wording
from atoll.core.errors import ConfigError
from cells import Outcome
from diloco_rows import DDP, Plan
from groups import Group


def introduction(plan: Plan, seeds: Sequence[int], default: Outcome) -> str:
    return (
        f"{wording.decoder_text(default)} on "
        f"{plan.islands} equal islands: {plan.warm_start} steps of warm start, then {plan.steps} of DiLoCo with "
        f"H={plan.inner_steps}; seeds {', '.join(map(str, seeds))}. This is the default, and a row adds the settings it shows "
        f"(a row of recipe {DDP} has `algorithm=DDP()` instead):\n\n```\n{default.row.command}\n```\n\n{wording.RULE}\n\n"
        f"Tokens include the warm start's. Where a row has other tokens than the one it is compared with, the verdict says how "
        f"many times as many: such a difference is not the setting's alone. Bytes sent are per island, on average."
    )


def plot_lengths(groups: Sequence[Group], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against bytes over the lengths of a round."""
    group = next((group for group in groups if group.name == "H"), None)
    if group is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('matplotlib is missing, and plots need it. Install it: pip install "atoll[plot]"') from error
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for label in group.rows:
        loss, sent = outcomes[label].loss, outcomes[label].mean("sent_bytes_per_island")
        if loss is not None and sent:
            axes.errorbar(sent, loss.mean, yerr=[[loss.mean - loss.low], [loss.high - loss.mean]], fmt="o", color="C0", capsize=3)
            axes.annotate(label, (sent, loss.mean), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set(xscale="log", xlabel="bytes sent per island", title="Steps between two agreements")
    axes.set_ylabel("validation loss (bars: over seeds)")
    axes.margins(x=0.15)  # labels stand to the right of their points
    figure.savefig(path, dpi=150)
    return "loss against bytes"
