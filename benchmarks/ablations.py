"""A paper's ablations as a command: rows to run, tables and claims for the record and for the paper's page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from cells import Outcome, Row, carry_out
from claims import Claim, claims_section
from groups import DEFAULT, Group, table
from record import Record, default_path, has_marks, replace_between
from workload import Workload

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
