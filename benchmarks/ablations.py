"""A paper's ablations as a command: groups of rows to run, their tables, and the paper's claims, for a record and a docs page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import figure_text
from atoll.telemetry.units import human_times
from cells import Outcome, Row, carry_out
from claims import Claim, claims_section
from record import Record, default_path, has_marks, markdown_table, replace_between
from workload import Workload

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
    same_tokens: float = figure_text.SAME_TOKENS
    drawn: Callable[[Mapping[str, Outcome]], str] | None = None


def table(group: Group, outcomes: Mapping[str, Outcome], share: str = "") -> str:
    """The group's section. `share` heads the column of shares of virtual time, where there is one."""
    headings = ["row", "settings", "val loss", "least to greatest", "compared with", "difference", "verdict"]
    headings += _cost_headings(group, share)
    rows = []
    for label in group.rows:
        shown = _settings(outcomes[label], outcomes[DEFAULT].row.recipe)
        told = [*figure_text.loss_text(outcomes[label]), *compared(group, label, outcomes)]
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
        rows.append([label, figure_text.loss_text(outcomes[label])[0] + alone, told, *_costs(group, label, outcomes)])
    usual = markdown_table(["row", "val loss", heading, *_cost_headings(group, share)], rows)
    return _section(group, group.drawn(outcomes) if group.drawn else usual)


def _section(group: Group, drawn: str) -> str:
    return f"### {group.title}\n\n{group.note}\n\n{drawn}"


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
    """What makes the row; its recipe if it is not the default's."""
    row = outcome.row
    shown = ([f"recipe {row.recipe}"] if row.recipe != recipe else []) + [f"`{setting}`" for setting in row.settings]
    return ", ".join(shown) or "none"


def compared(group: Group, label: str, outcomes: Mapping[str, Outcome]) -> tuple[str, str, str]:
    """With what, by how much it differs, and the verdict, which tells where tokens differ too."""
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
        page: the file in docs/ that takes the tables after a whole run.
        plan: the workload, and the values that rows run through.
        quick: the same in miniature.
        groups: all ablations.
        standing: rows that are run whatever is chosen, by label; the default is among them.
        introduction: what stands before the tables, from the plan, the seeds and the default's outcome.
        claims: what the paper says.
        plot: draws what is worth it of these groups into a file, and says what it shows; None if there is nothing to draw.
        share: heads the column of shares of virtual time.
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
        """Runs what is asked for on the command line."""
        options = self._parser().parse_args(arguments)
        plan = replace(self.quick if options.quick else self.plan, more=tuple(options.set))
        chosen = [group for group in self.groups(plan) if not options.only or group.name in options.only]
        part = options.quick or bool(options.only) or bool(options.set)
        docs: Path | None = options.docs or (None if part else PAGES / self.page)
        if docs is not None:
            has_marks(docs, MARKER)  # a page without them should not cost the whole benchmark
        record = Record(options.record or default_path(self.name + ("_part" if part else "")))

        rows = self.all_rows(plan, chosen)
        found = carry_out(list(dict.fromkeys(rows.values())), options.seeds, record, self.title, quiet=options.quiet)
        outcomes = {label: found[row] for label, row in rows.items()}
        text = self.tables(plan, chosen, outcomes, options.seeds)
        shown = self.plot(chosen, outcomes, record.plot)
        readme = record.write(self.title, [text] if shown is None else [text, f"![{shown}]({record.plot.name})"])
        print(text)
        print(f"\nrecord: {readme}")
        if docs is not None:
            written = replace_between(docs, MARKER, text)
            print(f"docs:   {docs}" if written else f"docs:   {docs} is not there; the tables are in the record alone")

    def all_rows(self, plan: P, chosen: Sequence[Group]) -> dict[str, Row]:
        """Every row that is needed, by label: the standing ones, and those of the groups."""
        rows = dict(self.standing(plan))
        for group in chosen:
            rows |= group.rows
        return rows

    def tables(self, plan: P, chosen: Sequence[Group], outcomes: Mapping[str, Outcome], seeds: Sequence[int]) -> str:
        """The introduction, a table per ablation, and the paper's claims."""
        parts = [self.introduction(plan, seeds, outcomes[DEFAULT]), *(table(group, outcomes, self.share) for group in chosen)]
        return "\n\n".join([*parts, claims_section(self.claims(plan), outcomes)])

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=self.about.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        names = [group.name for group in self.groups(self.quick)]
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
        parser.add_argument("--only", action="append", choices=names, help="this ablation; may be given several times; None: all")
        parser.add_argument("--quick", action="store_true", help="in miniature, to see whether everything works")
        parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
        parser.add_argument("--record", type=Path, help=f"the record's folder; None: records/<today>_{self.name}")
        parser.add_argument("--docs", type=Path, help=f"the page that takes the tables; None: docs/{self.page} after a whole run")
        parser.add_argument("--quiet", action="store_true", help="no progress")
        return parser
