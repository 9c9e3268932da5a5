"""A paper's ablations as a command: groups of rows, their tables, and the paper's claims, for a record and a docs page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import figure_text
from atoll.telemetry.units import human_times
from cells import Outcome, Row, run_rows
from claims import Claim, claims_section
from record import Record, benchmark_parser, default_path, has_markers, markdown_table, replace_between
from workload import Workload

DEFAULT = "default"
"""The label of the row that others are compared with."""
ONE_SEED = " †"
"""Marks a row with one seed in a brief table."""


def mild(label: str) -> str:
    """The label of the same row with a milder outer rule."""
    return f"milder, {label}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """One ablation: a table of rows.

    Attributes:
        name: its name for `--only`.
        title: of its table.
        note: before the table.
        rows: by label; a label means the same row in every group.
        against: by label, the row that a row is compared with. Rows not named are compared with none. Empty: all with the default.
        timed: by label, the row whose virtual time a row's time is divided by. Empty: no such column.
        same_tokens: relative differences of tokens up to this are not reported.
        table: makes a table that is not about losses.
    """

    name: str
    title: str
    note: str
    rows: Mapping[str, Row]
    against: Mapping[str, str] = field(default_factory=dict)
    timed: Mapping[str, str] = field(default_factory=dict)
    same_tokens: float = figure_text.SAME_TOKENS
    table: Callable[[Mapping[str, Outcome]], str] | None = None


def table(group: Group, outcomes: Mapping[str, Outcome], share: str = "") -> str:
    """The group's section. `share` is the heading of the column of virtual time over another row's."""
    headings = ["row", "settings", "val loss", "range", "compared with", "difference", "verdict", *_cost_headings(group, share)]
    rows = []
    for label in group.rows:
        shown = _settings(outcomes[label], outcomes[DEFAULT].row.recipe)
        losses = [*figure_text.loss_text(outcomes[label]), *compared(group, label, outcomes)]
        rows.append([label, shown, *losses, *_costs(group, label, outcomes)])
    return _section(group, outcomes, markdown_table(headings, rows, left=2))


def _section(group: Group, outcomes: Mapping[str, Outcome], loss_table: str) -> str:
    return f"### {group.title}\n\n{group.note}\n\n{group.table(outcomes) if group.table else loss_table}"


def _cost_headings(group: Group, share: str) -> list[str]:
    return ["tokens", "sent", "virtual time", *([share] if group.timed else [])]


def _costs(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> list[str]:
    outcome = outcomes[label]
    tokens = figure_text.tokens_text(outcome, outcomes[DEFAULT], group.same_tokens)
    costs = [tokens, figure_text.bytes_text(outcome), figure_text.time_text(outcome)]
    if group.timed:
        costs.append(figure_text.time_ratio_text(outcome, outcomes[group.timed[label]]) if label in group.timed else "-")
    return costs


def _settings(outcome: Outcome, recipe: str) -> str:
    """The row's settings, and its recipe if it is not the default's."""
    row = outcome.row
    shown = ([f"recipe {row.recipe}"] if row.recipe != recipe else []) + [f"`{setting}`" for setting in row.settings]
    return ", ".join(shown) or "none"


def compared(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> tuple[str, str, str]:
    """The row it is compared with, the difference, and the verdict, with the ratio of tokens if they differ."""
    other = group.against.get(label) if group.against else DEFAULT
    if other is None or outcomes[other].summaries == outcomes[label].summaries:
        return "-", "-", "-"
    found, verdict = figure_text.difference_text(outcomes[label].loss, outcomes[other].loss)
    ratio = figure_text.tokens_ratio(outcomes[label], outcomes[other], group.same_tokens)
    more = f", at ×{human_times(ratio)} tokens" if ratio is not None and ratio != 1 else ""
    return other, found, verdict + more


P = TypeVar("P", bound=Workload)

MARKER = "ablations"
PAGES = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True, kw_only=True)
class Study(Generic[P]):
    """A paper's ablations.

    Attributes:
        name: of the record.
        title: of the record's page.
        about: the script's docstring, whose first line `--help` shows.
        page: the file in docs/ that takes the tables after a complete run.
        plan: the workload and the values of the rows.
        quick: a plan of small sizes.
        groups: all ablations.
        standing: rows that always run, by label, the default among them.
        introduction: text before the tables, from the plan, the seeds and the default's outcome.
        claims: the paper's claims.
        plot: draws some of the groups into a file and returns a caption; None if there is nothing to draw.
        share: heading of the column of virtual time over another row's.
    """

    name: str
    title: str
    about: str
    page: str
    plan: P
    quick: P
    groups: Callable[[P], list[Group]]
    standing: Callable[[P], dict[str, Row]]
    introduction: Callable[[P, Sequence[int], Outcome], str]
    claims: Callable[[P], list[Claim]]
    plot: Callable[[Sequence[Group], Mapping[str, Outcome], Path], str | None]
    share: str = ""

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Runs the command."""
        options = self._parser().parse_args(arguments)
        plan = replace(self.quick if options.quick else self.plan, more=tuple(options.set))
        chosen = [group for group in self.groups(plan) if not options.only or group.name in options.only]
        part = options.quick or bool(options.only) or bool(options.set)
        docs: Path | None = options.docs or (None if part else PAGES / self.page)
        if docs is not None:
            has_markers(docs, MARKER)  # fail before the cells run, not after
        record = Record(options.record or default_path(self.name + ("_part" if part else "")))

        outcomes = run_rows(self.all_rows(plan, chosen), options.seeds, record, self.title, quiet=options.quiet)
        text = self.tables(plan, chosen, outcomes, options.seeds)
        shown = self.plot(chosen, outcomes, record.plot)
        readme = record.write(self.title, [text] if shown is None else [text, f"![{shown}]({record.plot.name})"])
        print(text)
        print(f"\nrecord: {readme}")
        if docs is not None:
            written = replace_between(docs, MARKER, text)
            print(f"docs:   {docs}" if written else f"docs:   {docs} does not exist; only the record has the tables")

    def all_rows(self, plan: P, chosen: Sequence[Group]) -> dict[str, Row]:
        """The standing rows and those of the groups, by label."""
        rows = dict(self.standing(plan))
        for group in chosen:
            rows |= group.rows
        return rows

    def tables(self, plan: P, chosen: Sequence[Group], outcomes: Mapping[str, Outcome], seeds: Sequence[int]) -> str:
        """The introduction, a table per ablation, and the paper's claims."""
        parts = [self.introduction(plan, seeds, outcomes[DEFAULT]), *(table(group, outcomes, self.share) for group in chosen)]
        return "\n\n".join([*parts, claims_section(self.claims(plan), outcomes)])

    def _parser(self) -> argparse.ArgumentParser:
        parser = benchmark_parser(self.about, self.name, quick=True)
        names = [group.name for group in self.groups(self.quick)]
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
        parser.add_argument("--only", action="append", choices=names, help="run this ablation; repeatable; None: all")
        parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
        parser.add_argument("--docs", type=Path, help=f"the page for the tables; None: docs/{self.page} after a complete run")
        return parser
