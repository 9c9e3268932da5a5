"""The headline claims of the three papers, in a regime where a larger batch has stopped paying.

    atoll data prepare files:WIKI --validation-corpus files:HELD_OUT --out prepared/wiki-bytes
    python benchmarks/paper_claims.py --text prepared/wiki-bytes --processes 2      about six hours of one core
    python benchmarks/paper_claims.py --text prepared/wiki --device cuda            the same with 6.8 million parameters on a GPU
    python benchmarks/paper_claims.py --text prepared/small --quick                 smoke test

`--minutes` starts no cell after that time: the same command with the same `--record` continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import paper_claims_rows as rows_of
from ablations import Group
from cells import Outcome, run_rows
from paper_claims_report import brief_table, report, save_plots
from record import Record, benchmark_parser, check_texts, open_record, replace_between, script

CHOICE_SEED = 100
"""Seeds of the tables are smaller."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    plan = rows_of.QUICK if options.quick else rows_of.plan_of(options.device)
    plan = replace(plan, text=str(options.text), more=tuple(options.set))
    record = open_record(options, "paper_claims")
    check_texts(record, {"text": options.text})
    until_s = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    how = {"quiet": options.quiet, "processes": options.processes, "until_s": until_s, "warm": record.path / "warm"}
    tried, choices = _choose(plan, record, **how)
    outcomes: dict[str, Outcome] = {}
    for count in range(1, len(options.seeds) + 1):  # seed by seed, so that a stopped study compares whole tables
        for group in rows_of.headline(plan, choices):
            outcomes |= _run(group, options.seeds[:count], record, **how)
    for group in rows_of.one_seed(plan, choices):
        outcomes |= _run(group, options.seeds[:1], record, **how)
    text = json.loads((record.path / "text.json").read_text("utf-8"))["text"]
    sections = report(plan, choices, tried, outcomes, text, len(options.seeds))
    plot = save_plots(plan, outcomes, record.plot, record.path / "deltas.png")
    record.publish("The papers' claims", sections, plot=plot, docs=(options.docs, "paper_claims"))
    if options.readme is not None:
        replace_between(options.readme, "evidence_brief", brief_table(plan, outcomes))


def _choose(plan: rows_of.Plan, record: Record, **how: Any) -> tuple[dict[str, Outcome], dict[str, rows_of.Choice]]:
    """The outcomes of all candidates, and the choice of every method whose candidates were run."""
    first = run_rows(rows_of.choice_rows(plan, {}), [CHOICE_SEED], record, "outer rules", curves=True, **how)
    found = {method: rows_of.best(plan, first, method, None) for method in rows_of.METHODS}
    outers = {method: choice.outer for method, choice in found.items() if choice is not None}
    second = run_rows(rows_of.choice_rows(plan, outers), [CHOICE_SEED], record, "inner rates", curves=True, **how)
    return first | second, rows_of.best_choices(plan, first | second)


def _run(group: Group, seeds: Sequence[int], record: Record, **how: Any) -> dict[str, Outcome]:
    """The outcomes of the rows that have cells."""
    found = run_rows(group.rows, seeds, record, group.title, curves=True, **how)
    return {label: outcome for label, outcome in found.items() if outcome.summaries or outcome.errors}


def _parser() -> Any:
    parser = benchmark_parser(__doc__, "paper_claims", page="docs/evidence.md", quick=True)
    parser.add_argument("--text", type=Path, required=True, help="a folder that `atoll data prepare` wrote")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="which workload")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the headline; other rows have the first")
    parser.add_argument("--minutes", type=float, help="start no cell after this time")
    parser.add_argument("--processes", type=int, default=1, help="cells that run in parallel")
    parser.add_argument("--readme", type=Path, help="write the headline between the markers evidence_brief of this page")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
    return parser


if __name__ == "__main__":
    script(main)
