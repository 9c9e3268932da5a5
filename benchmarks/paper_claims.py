"""The headline claims of the three papers, in a regime where a larger batch has stopped paying.

    atoll data prepare files:WIKI --validation-corpus files:HELD_OUT --out prepared/wiki-bytes
    python benchmarks/paper_claims.py --text prepared/wiki-bytes --processes 2      33,000 parameters, on a CPU
    python benchmarks/paper_claims.py --text prepared/wiki-bytes --workload medium  0.6 million parameters, on a GPU
    python benchmarks/paper_claims.py --text prepared/wiki --workload large         6.8 million parameters and a BPE of 8,192
    python benchmarks/paper_claims.py --text prepared/small --quick                 smoke test

`--minutes` starts no cell after that time: the same command with the same `--record` continues, also with the same text in another
folder. `--dry-run` lists the missing cells in their order: the headline, the tables with one seed, methods of other papers.
`--only` starts those of some tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import paper_claims_choices as choices_of
import paper_claims_rows as rows_of
from ablations import Group
from cells import Outcome, Row, run_rows
from paper_claims_report import brief_table, differences_table, report, save_plots
from paper_claims_verdicts import Study
from record import Record, benchmark_parser, check_texts, open_record, replace_between, script

CHOICE_SEED = 100
"""Seeds of the tables are smaller."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    plan = rows_of.QUICK if options.quick else rows_of.PLANS[options.workload]
    plan = replace(plan, text=str(options.text), more=tuple(options.set))
    record = open_record(options, f"paper_claims_{options.workload}")
    check_texts(record, {"text": options.text})
    listed: dict[str, str] | None = {} if options.dry_run else None
    run = _Cells(record, options, listed)
    tried, choices = run.choose(plan, rows_of.OF_THE_PAPERS)
    outcomes = run.tables(rows_of.headline(plan, choices), options.seeds, "headline")
    outcomes |= run.tables(rows_of.one_seed(plan, choices), options.seeds[:1], "one seed")
    tried_beyond, choices_beyond = run.choose(plan, rows_of.BEYOND)
    tried, choices = tried | tried_beyond, choices | choices_beyond
    outcomes |= run.tables(rows_of.exchanges(plan, choices), options.seeds, "exchanges")
    if listed is not None:
        print("\n".join([*listed.values(), _listed_text(plan, choices, len(listed))]))
        return
    text = json.loads((record.path / "text.json").read_text("utf-8"))["text"]
    study = Study(plan=plan, choices=choices, tried=tried, outcomes=outcomes, text=text, seeds=tuple(options.seeds))
    sections = report(study)
    plot = save_plots(plan, outcomes, record.plot, record.path / "deltas.png")
    small = options.workload == "small"  # the page has its differences alone
    marker = f"paper_claims_{options.workload}"
    record.publish("The papers' claims", sections, plot=plot, docs=(None if small else options.docs, marker))
    if small and options.docs is not None:
        replace_between(options.docs, marker, differences_table(study))
    if options.readme is not None:
        replace_between(options.readme, "evidence_brief", brief_table(study))


def _listed_text(plan: rows_of.Plan, choices: Mapping[str, rows_of.Choice], cells: int) -> str:
    """How many cells are missing, and which tables have rows that are not known yet."""
    later = [method for method in rows_of.METHODS if method not in choices]
    unknown = f" Rows follow when their method has chosen its rates: {', '.join(later)}." if later else ""
    return f"{cells} cells are missing.{unknown}"


class _Cells:
    """Runs the missing cells of chosen tables; or lists them."""

    def __init__(self, record: Record, options: argparse.Namespace, listed: dict[str, str] | None) -> None:
        self._record, self._only, self._listed = record, options.only, listed
        self._until_s = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        self._how = {"quiet": options.quiet, "processes": options.processes, "curves": True, "warm": record.path / "warm"}

    def choose(self, plan: rows_of.Plan, methods: Sequence[str]) -> tuple[dict[str, Outcome], dict[str, rows_of.Choice]]:
        """The outcomes of these methods' candidates, and the choice of every method whose candidates were run."""
        tried = self._candidates(choices_of.choice_rows(plan, {}, methods), "outer rules")
        found = {method: choices_of.best(plan, tried, method, None) for method in methods}
        outers = {method: choice.outer for method, choice in found.items() if choice is not None}
        tried |= self._candidates(choices_of.choice_rows(plan, outers, methods), "inner rates")
        tried |= self._candidates(choices_of.further_rows(plan, tried, methods), "further rates")
        return tried, choices_of.best_choices(plan, tried)

    def _candidates(self, rows: Mapping[str, Row], title: str) -> dict[str, Outcome]:
        return self._run(rows, [CHOICE_SEED], title, starts=not self._only or rows_of.CHOICES in self._only)

    def tables(self, groups: Sequence[Group], seeds: Sequence[int], title: str) -> dict[str, Outcome]:
        """The outcomes of all rows that have cells. Cells run seed by seed, table by table, and long ones first within a table.
        One call has the cells of all tables: no process waits at a table's end."""
        found: dict[str, Outcome] = {}
        for starts in (True, False):
            rows = {}
            for group in groups:
                if (not self._only or group.name in self._only) == starts:
                    rows |= sorted(group.rows.items(), key=lambda item: -item[1].run(0).train.steps)
            found |= self._run(rows, seeds, title, starts=starts)
        return {label: outcome for label, outcome in found.items() if outcome.summaries or outcome.errors}

    def _run(self, rows: Mapping[str, Row], seeds: Sequence[int], title: str, *, starts: bool) -> dict[str, Outcome]:
        """The outcomes of rows, whose missing cells start unless `starts` is false."""
        if not starts:
            return run_rows(rows, seeds, self._record, title, listed={}, **self._how)
        return run_rows(rows, seeds, self._record, title, until_s=self._until_s, listed=self._listed, **self._how)


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, "paper_claims", page="docs/evidence.md", quick=True)
    parser.add_argument("--text", type=Path, required=True, help="a folder that `atoll data prepare` wrote")
    parser.add_argument("--workload", choices=rows_of.PLANS, default="small", help="small on a CPU, the others on a GPU")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the headline; other rows have the first")
    parser.add_argument("--only", action="append", choices=rows_of.TABLES, help="start cells of this table alone; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="list the missing cells in the order in which they would run")
    parser.add_argument("--minutes", type=float, help="start no cell after this time")
    parser.add_argument("--processes", type=int, default=1, help="cells that run in parallel")
    parser.add_argument("--readme", type=Path, help="write the headline between the markers evidence_brief of this page")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
    return parser


if __name__ == "__main__":
    script(main)
