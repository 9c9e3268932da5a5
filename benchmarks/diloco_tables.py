"""DiLoCo's ablations as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import wording
from atoll.errors import ConfigError
from atoll.telemetry.units import human_times
from cells import Outcome
from claims import judged
from diloco_claims import claims
from diloco_rows import DDP, DEFAULT, DILOCO, Group, Plan
from record import markdown_table


def tables(plan: Plan, groups: Sequence[Group], outcomes: Mapping[str, Outcome], seeds: Sequence[int]) -> str:
    """The rule, the base command, a table per ablation, and the paper's claims."""
    parts = [_introduction(plan, seeds, outcomes[DEFAULT]), *(_table(group, outcomes) for group in groups), _claims(plan, outcomes)]
    return "\n\n".join(parts)


def _introduction(plan: Plan, seeds: Sequence[int], default: Outcome) -> str:
    params = default.mean("params")
    size = f" of {params:,.0f} parameters" if params is not None else ""
    return (
        f"A decoder{size} on {plan.islands} equal islands: {plan.warm_start} steps of warm start, then {plan.steps} of DiLoCo with "
        f"H={plan.inner_steps}; seeds {', '.join(map(str, seeds))}. This is the default, and a row adds the settings it shows "
        f"(a row of recipe {DDP} has `algorithm=DDP()` instead):\n\n```\n{default.row.command}\n```\n\n{wording.RULE}\n\n"
        f"Tokens include the warm start's. Where a row has other tokens than the one it is compared with, the verdict says how "
        f"many times as many: such a difference is not the setting's alone. Bytes sent are per island, on average."
    )


def _table(group: Group, outcomes: Mapping[str, Outcome]) -> str:
    headings = ["row", "settings", "val loss", "least to greatest", "compared with", "difference", "verdict"]
    headings += ["tokens", "sent", "virtual time"]
    rows = []
    for label in group.rows:
        outcome = outcomes[label]
        costs = [wording.tokens_text(outcome, outcomes[DEFAULT]), wording.bytes_text(outcome), wording.time_text(outcome)]
        rows.append([label, _settings(outcome), *wording.loss_text(outcome), *_compared(group, label, outcomes), *costs])
    return f"### {group.title}\n\n{group.note}\n\n{markdown_table(headings, rows, left=2)}"


def _settings(outcome: Outcome) -> str:
    row = outcome.row
    shown = ([f"recipe {row.recipe}"] if row.recipe != DILOCO else []) + [f"`{setting}`" for setting in row.settings]
    return ", ".join(shown) or "none"


def _compared(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> tuple[str, str, str]:
    """With what, by how much it differs, and the verdict, which tells where tokens differ too."""
    other = group.against.get(label) if group.against else DEFAULT
    if other is None or outcomes[other].summaries == outcomes[label].summaries:
        return "-", "-", "-"
    found, verdict = wording.difference_text(outcomes[label].loss, outcomes[other].loss)
    ratio = wording.tokens_ratio(outcomes[label], outcomes[other])
    more = f", at ×{human_times(ratio)} tokens" if ratio is not None and ratio != 1 else ""
    return other, found, verdict + more


def _claims(plan: Plan, outcomes: Mapping[str, Outcome]) -> str:
    lines = [line for claim in claims(plan) if (line := judged(claim, outcomes)) is not None]
    note = (
        "In parentheses the paper's figures. A claim holds here if all of the 95 % interval is where it says, does not hold if "
        "none of it is, and else lies within the spread. Small models on short runs need not behave as the paper's."
    )
    told = "\n".join(f"- {line}" for line in lines) or "None of them can be judged from these rows."
    return f"### The paper's claims, here\n\n{note}\n\n{told}"


def plot_lengths(group: Group, outcomes: Mapping[str, Outcome], path: Path) -> Path:
    """Loss against bytes over the lengths of a round."""
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
    return path
