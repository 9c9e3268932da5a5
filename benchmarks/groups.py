"""Ablations: groups of rows that are tried side by side, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import wording
from atoll.telemetry.units import human_times
from cells import Outcome, Row
from record import markdown_table

DEFAULT = "default"
"""The label of the row that others are compared with."""
ONE_SEED = " †"
"""Marks a row of a brief table."""


def mild(label: str) -> str:
    """The label of the same row with a milder outer rule."""
    return f"milder, {label}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """One ablation.

    Attributes:
        name: what `--only` calls it.
        title: of its table.
        note: what to know when reading it.
        rows: by label; a label means the same row in every group.
        against: the label of the row that each is compared with, and none for those not named here; if empty, all are compared
            with the default.
        timed: the label of the row of which each one's virtual time is told as a share; if empty, there is no such column.
        same_tokens: shares of tokens up to which a difference is not spoken of.
        drawn: makes the table where losses, row by row, are not what it is about.
    """

    name: str
    title: str
    note: str
    rows: Mapping[str, Row]
    against: Mapping[str, str] = field(default_factory=dict)
    timed: Mapping[str, str] = field(default_factory=dict)
    same_tokens: float = wording.SAME_TOKENS
    drawn: Callable[[Mapping[str, Outcome]], str] | None = None


def table(group: Group, outcomes: Mapping[str, Outcome], share: str = "") -> str:
    """The group's section. `share` heads the column of shares of virtual time, where there is one."""
    headings = ["row", "settings", "val loss", "least to greatest", "compared with", "difference", "verdict"]
    headings += _cost_headings(group, share)
    rows = []
    for label in group.rows:
        shown = _settings(outcomes[label], outcomes[DEFAULT].row.recipe)
        told = [*wording.loss_text(outcomes[label]), *compared(group, label, outcomes)]
        rows.append([label, shown, *told, *_costs(group, label, outcomes)])
    return _section(group, group.drawn(outcomes) if group.drawn else markdown_table(headings, rows, left=2))


def brief_table(group: Group, outcomes: Mapping[str, Outcome], share: str = "") -> str:
    """The same for a page that links to the record: without settings and ranges, and each difference with its interval alone."""
    found = {label: compared(group, label, outcomes) for label in group.rows}
    others = {other for other, _, _ in found.values() if other != "-"}
    heading = f"minus {others.pop()}" if len(others) == 1 else "difference"
    rows = []
    for label, (other, difference, _) in found.items():
        told = difference if heading != "difference" or other == "-" else f"{difference} to {other}"
        alone = ONE_SEED if len(outcomes[label].summaries) == 1 else ""
        rows.append([label, wording.loss_text(outcomes[label])[0] + alone, told, *_costs(group, label, outcomes)])
    usual = markdown_table(["row", "val loss", heading, *_cost_headings(group, share)], rows)
    return _section(group, group.drawn(outcomes) if group.drawn else usual)


def _section(group: Group, drawn: str) -> str:
    return f"### {group.title}\n\n{group.note}\n\n{drawn}"


def _cost_headings(group: Group, share: str) -> list[str]:
    return ["tokens", "sent", "virtual time", *([share] if group.timed else [])]


def _costs(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    outcome = outcomes[label]
    tokens = wording.tokens_text(outcome, outcomes[DEFAULT], group.same_tokens)
    costs = [tokens, wording.bytes_text(outcome), wording.time_text(outcome)]
    if group.timed:
        costs.append(wording.time_ratio_text(outcome, outcomes[group.timed[label]]) if label in group.timed else "-")
    return costs


def _settings(outcome: Outcome, recipe: str) -> str:
    """What makes the row; its recipe if it is not the default's."""
    row = outcome.row
    shown = ([f"recipe {row.recipe}"] if row.recipe != recipe else []) + [f"`{setting}`" for setting in row.settings]
    return ", ".join(shown) or "none"


def compared(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> tuple[str, str, str]:
    """With what, by how much it differs, and the verdict, which tells where tokens differ too."""
    other = group.against.get(label) if group.against else DEFAULT
    if other is None or outcomes[other].summaries == outcomes[label].summaries:
        return "-", "-", "-"
    found, verdict = wording.difference_text(outcomes[label].loss, outcomes[other].loss)
    ratio = wording.tokens_ratio(outcomes[label], outcomes[other], group.same_tokens)
    more = f", at ×{human_times(ratio)} tokens" if ratio is not None and ratio != 1 else ""
    return other, found, verdict + more
