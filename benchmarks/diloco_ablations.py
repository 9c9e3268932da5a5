"""The DiLoCo paper's ablations on one small workload, and which of its claims hold there.

    python benchmarks/diloco_ablations.py                       all of them, three seeds: about ten minutes on two cores
    python benchmarks/diloco_ablations.py --only H --only k     some of them
    python benchmarks/diloco_ablations.py --quick               all of them in miniature, to see whether they work

Rows are in `diloco_rows.py`, claims in `diloco_claims.py`. Tables go into the record and, after a whole run, into docs/diloco.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cells import Row, carry_out
from diloco_rows import DEFAULT, QUICK, Group, Plan, default_row, groups
from diloco_tables import plot_lengths, tables
from record import Record, default_path, has_marks, replace_between, script

DOCS = Path(__file__).resolve().parents[1] / "docs" / "diloco.md"
MARKER = "ablations"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    plan = replace(QUICK if options.quick else Plan(), more=tuple(options.set))
    chosen = [group for group in groups(plan) if not options.only or group.name in options.only]
    part = options.quick or bool(options.only) or bool(options.set)
    docs: Path | None = options.docs or (None if part else DOCS)
    if docs is not None:
        has_marks(docs, MARKER)  # a page without them should not cost the whole benchmark
    record = Record(options.record or default_path("diloco_ablations" + ("_part" if part else "")))

    rows = all_rows(plan, chosen)
    found = carry_out(list(dict.fromkeys(rows.values())), options.seeds, record, "DiLoCo's ablations", quiet=options.quiet)
    outcomes = {label: found[row] for label, row in rows.items()}
    text = tables(plan, chosen, outcomes, options.seeds)
    lengths = next((group for group in chosen if group.name == "H"), None)
    sections = [text]
    if lengths is not None:
        plot_lengths(lengths, outcomes, record.plot)
        sections.append(f"![loss against bytes]({record.plot.name})")
    readme = record.write("DiLoCo's ablations", sections)
    print(text)
    print(f"\nrecord: {readme}")
    if docs is not None:
        written = replace_between(docs, MARKER, text)
        print(f"docs:   {docs}" if written else f"docs:   {docs} is not there; the tables are in the record alone")


def all_rows(plan: Plan, chosen: Sequence[Group]) -> dict[str, Row]:
    """Every row that is needed, by label: those of the groups, and the default."""
    rows = {DEFAULT: default_row(plan)}
    for group in chosen:
        rows |= group.rows
    return rows


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = [group.name for group in groups(QUICK)]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--only", action="append", choices=names, help="this ablation; may be given several times; None: all")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether everything works")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every row")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_diloco_ablations")
    parser.add_argument("--docs", type=Path, help="the page that takes the tables; None: docs/diloco.md after a whole run")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
