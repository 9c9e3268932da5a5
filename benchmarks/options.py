"""What benchmarks over seeds can be told."""

from __future__ import annotations

import argparse
from pathlib import Path


def seeds_parser(doc: str | None, name: str, page: str) -> argparse.ArgumentParser:
    """Options of a benchmark whose cells are rows with seeds.

    Args:
        doc: the script's docstring, whose first line describes it.
        name: of the record.
        page: of the docs, which has marks of that name.

    >>> options = seeds_parser("What it is for.", "acco_demo", "docs/acco.md").parse_args(["--set", "train.steps=4"])
    >>> options.seeds, options.set, options.processes, options.record
    ([0, 1, 2], ['train.steps=4'], 2, None)
    """
    first = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per row and seed")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--processes", type=int, default=2, help="cells that run at a time")
    parser.add_argument("--record", type=Path, help=f"the record's folder; None: records/<today>_{name}")
    parser.add_argument("--docs", type=Path, help=f"a page whose marks are filled with the tables, such as {page}")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser
