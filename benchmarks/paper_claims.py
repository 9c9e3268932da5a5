"""The headline claims of the three papers, in a regime where a larger batch has stopped paying.

    atoll data prepare files:WIKI --validation-corpus files:HELD_OUT --out prepared/wiki-bytes
    python benchmarks/paper_claims.py --text prepared/wiki-bytes --processes 2      33,000 parameters, on a CPU
    python benchmarks/paper_claims.py --text prepared/wiki-bytes --workload medium  0.6 million parameters, on a GPU
    python benchmarks/paper_claims.py --text prepared/wiki --workload large         6.8 million parameters and a BPE of 8,192
    python benchmarks/paper_claims.py --text prepared/small --quick                 smoke test

`--minutes` starts no cell after that time. Cells then run in the order of importance, and always so on a GPU: the headline, the
tables with one seed, methods of other papers. Else long cells run first. The same command with the same `--record` continues, also
with the same text in another folder; on a GPU it needs the record's folder `warm`, since two warm starts differ there. Without that
folder `--choices RECORD` begins a new record with the choices of an old one. With `--minutes 0` it writes the tables of a record,
without a GPU. `--dry-run` lists the missing cells in the order of importance. `--only` starts those of some tables.

With `--processes` above 1 on a GPU start CUDA's MPS first, else the processes compute in turns: nvidia-cuda-mps-control -d
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import paper_claims_choices as choices_of
import paper_claims_rows as rows_of
from ablations import Group
from atoll.core.errors import ConfigError
from atoll.telemetry.units import human_bytes
from cells import Outcome, Row, Wanted, limits, run_cells, study_parser
from paper_claims_pages import short_table, write_coverage
from paper_claims_report import brief_table, differences_table, report, save_plots
from paper_claims_verdicts import Study
from record import Record, check_texts, open_record, replace_between, script, text_identity

CHOICE_SEED = 100
"""Seeds of the tables are smaller."""
_VOCABULARY = 257  # of bytes: cells of one workload are compared with each other alone


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    how = limits(options)
    listed: list[str] | None = [] if options.dry_run else None
    plan = rows_of.QUICK if options.quick else rows_of.PLANS[options.workload]
    plan = replace(plan, text=str(options.text), more=tuple(options.set))
    record = open_record(options, f"paper_claims_{options.workload}")
    check_texts(record, {"text": options.text}, needed=not options.dry_run)
    if options.choices is not None and (record.path / "text.json").exists():
        take_choices(record, options.choices)
    runs = not options.dry_run and options.minutes != 0
    if runs and plan.device == "cuda":
        check_starts(record)
    order = Order(
        plan=plan,
        seeds=tuple(options.seeds),
        only=frozenset(options.only or ()),
        limited=options.minutes is not None or options.dry_run,
        waits=not options.dry_run,
    )
    found = run_cells(order.wanted, record, "the papers' claims", curves=True, warm=record.path / "warm", listed=listed, **how)
    tried = {each.label: found[each.label] for each in order.choosing(found, rows_of.METHODS)}
    choices = choices_of.best_choices(plan, found)
    if listed is not None:
        print("\n".join([*listed, _listed_text(choices, len(listed))]))
        return
    labels = [label for part, _, _ in order.tables(choices) for group in part for label in group.rows]
    outcomes = {label: found[label] for label in labels if found[label].summaries or found[label].errors}
    text = json.loads((record.path / "text.json").read_text("utf-8"))["text"]
    study = Study(plan=plan, choices=choices, tried=tried, outcomes=outcomes, text=text, seeds=order.seeds)
    sections = report(study)
    plots = save_plots(plan, outcomes, record.path)
    small = options.workload == "small"  # the page has its differences alone
    marker = f"paper_claims_{options.workload}"
    record.publish("The papers' claims", sections, plots=plots, docs=(None if small else options.docs, marker))
    if small and options.docs is not None:
        replace_between(options.docs, marker, differences_table(study))
    elif options.docs is not None and rows_of.ONE in study.outcomes:
        replace_between(options.docs, "evidence_brief", brief_table(study))
        replace_between(options.docs, "evidence_short", short_table(study))
    if options.readme is not None:
        replace_between(options.readme, "evidence_brief", brief_table(study))
    if options.coverage is not None:
        write_coverage(options.coverage, study, rows_of.one_seed(plan, choices))
    every = replace(order, only=frozenset(), limited=True, waits=False)
    missing: list[str] = []
    run_cells(every.wanted, record, "", listed=missing)
    print(f"\n{left_text(missing, record)}")


def left_text(missing: Sequence[str], record: Record) -> str:
    """Which cells of the whole study are missing, by table, and how to continue."""
    if not missing:
        return "No cell is missing."
    tables = Counter(line.partition(": ")[0] for line in missing)
    shown = ", ".join(f"{table} {count}" for table, count in tables.items())
    starts = sum(file.stat().st_size for file in (record.path / "warm").glob("*"))
    return (
        f"{len(missing)} cells are missing: {shown}. The same command continues with --record {record.path}, on another machine "
        f"with a copy of its folder warm ({human_bytes(starts)})."
    )


def take_choices(record: Record, other: Path) -> None:
    """Copies the cells of the choices from another record of the same text. No table has their seed, so their warm start may be
    another one.

    Raises:
        ConfigError: the other record read another text.
    """
    mine, its = (json.loads((path / "text.json").read_text("utf-8"))["text"] for path in (record.path, other))
    if text_identity(mine) != text_identity(its):
        raise ConfigError(f"--choices {other}: it read another text than {record.path}. Choose anew, without --choices.")
    for cell in Record(other).cells:
        if cell["seed"] == CHOICE_SEED and record.get(cell["key"]) is None:
            record.copy({**cell, "measured_in": other.resolve().name})


def check_starts(record: Record) -> None:
    """
    Raises:
        ConfigError: the record has rows of the tables, but not the weights that they began with.
    """
    begun = any(cell["seed"] != CHOICE_SEED for cell in record.cells)
    if begun and not any((record.path / "warm").glob("*.safetensors")):
        raise ConfigError(
            f"--record {record.path}: its folder warm is missing, so new rows would begin with other weights than the recorded "
            f"ones, and would not be judged. Copy the folder from where they ran, or begin another record with "
            f"--choices {record.path}."
        )


def _listed_text(choices: Mapping[str, rows_of.Choice], cells: int) -> str:
    """How many cells are missing, and which tables have rows that are not known yet."""
    later = [method for method in rows_of.METHODS if method not in choices]
    unknown = f" Rows follow when their method has chosen its rates: {', '.join(later)}." if later else ""
    return f"{cells} cells are missing.{unknown}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """The cells of the study and the order in which they run.

    Attributes:
        plan: the workload.
        seeds: of the tables with several seeds.
        only: the tables whose missing cells start; empty: all.
        limited: the order is that of importance, since the time may end, as it always may on a GPU; else long cells run first, so
            that no process is left alone with one at the end. Choices are first, since rows follow from them.
        waits: a row starts once its method has tried the rate beyond an edge, which may change its choice.
    """

    plan: rows_of.Plan
    seeds: tuple[int, ...]
    only: frozenset[str]
    limited: bool
    waits: bool = True

    def wanted(self, found: Mapping[str, Outcome]) -> list[Wanted[str]]:
        """All cells that are known to be needed, from what was found so far."""
        papers, beyond = self.choosing(found, rows_of.OF_THE_PAPERS), self.choosing(found, rows_of.BEYOND)
        choices = choices_of.best_choices(self.plan, found)
        settled = self._settled(found, choices)
        headline, alone, exchanges = (
            self._cells(groups, starting, title, {label for group in sure for label in group.rows})
            for (groups, starting, title), (sure, _, _) in zip(self.tables(choices), self.tables(settled), strict=True)
        )
        if self.limited or self.plan.device == "cuda":
            return [*papers, *headline, *alone, *beyond, *exchanges]
        return [*papers, *beyond, *sorted([*headline, *alone, *exchanges], key=lambda each: _length(each.row), reverse=True)]

    def choosing(self, found: Mapping[str, Outcome], methods: Sequence[str]) -> list[Wanted[str]]:
        """The candidates of these methods, as far as they are known."""
        best = {method: choices_of.best(self.plan, found, method, None) for method in methods}
        outers = {method: choice.outer for method, choice in best.items() if choice is not None}
        known = [method for method in methods if method in outers]
        parts = {
            "outer rules": choices_of.choice_rows(self.plan, {}, methods),
            "inner rates": choices_of.choice_rows(self.plan, outers, known),
            "further rates": choices_of.further_rows(self.plan, found, methods),
        }
        starts = not self.only or rows_of.CHOICES in self.only
        rows = {label: (row, title) for title, part in reversed(parts.items()) for label, row in part.items()}
        every = dict.fromkeys(label for part in parts.values() for label in part)
        return [Wanted(label, rows[label][0], CHOICE_SEED, rows[label][1], starts) for label in every]

    def tables(self, choices: Mapping[str, rows_of.Choice]) -> list[tuple[list[Group], tuple[int, ...], str]]:
        """The tables of methods that have chosen, with the seeds that start. A table shows every recorded seed."""
        return [
            (rows_of.headline(self.plan, choices), self.seeds, "headline"),
            (rows_of.one_seed(self.plan, choices), self.seeds[:1], "one seed"),
            (rows_of.exchanges(self.plan, choices), self.seeds, "exchanges"),
        ]

    def _settled(self, found: Mapping[str, Outcome], choices: Mapping[str, rows_of.Choice]) -> dict[str, rows_of.Choice]:
        """The choices that no missing cell can change."""
        if not self.waits or (self.only and rows_of.CHOICES not in self.only):
            return dict(choices)
        open_ones = set(choices_of.untried(self.plan, found))
        return {method: choice for method, choice in choices.items() if not {method, rows_of.CHOSEN_BY.get(method)} & open_ones}

    def _cells(self, groups: Sequence[Group], starting: Container[int], title: str, sure: Container[str]) -> list[Wanted[str]]:
        """Seed by seed, table by table, long cells first within a table."""
        return [
            Wanted(label, row, seed, title, seed in starting and label in sure and (not self.only or group.name in self.only))
            for seed in self.seeds
            for group in groups
            for label, row in sorted(group.rows.items(), key=lambda item: _length(item[1]), reverse=True)
        ]


def _length(row: Row) -> tuple[int, int]:
    """How long a cell takes, to compare it with others: the steps of all islands times the weights, then the steps that follow each
    other."""
    run = row.run(0)
    return run.train.steps * run.cluster.islands * run.model.num_params(_VOCABULARY), run.train.steps


def _parser() -> argparse.ArgumentParser:
    parser = study_parser(__doc__, "paper_claims", rows_of.TABLES, page="docs/evidence.md")
    parser.add_argument("--workload", choices=rows_of.PLANS, default="small", help="small on a CPU, the others on a GPU")
    parser.add_argument("--choices", type=Path, help="a record of the same text; a new record takes over what its methods chose")
    parser.add_argument("--readme", type=Path, help="write the headline between the markers evidence_brief of this page")
    parser.add_argument("--coverage", type=Path, help="write the verdicts of this study into this page, such as docs/coverage.md")
    return parser


if __name__ == "__main__":
    script(main)
