"""Runs the fast tests with several versions of Python and torch, each in an environment of its own: `make matrix`.

    python -m tools.matrix                                   # all fast tests in every cell whose Python is installed
    python -m tools.matrix --short                           # without command line, recipes, examples, pages, elastic and ray
    python -m tools.matrix 3.13:2.13.0 --tests tests/loop    # one cell, some of the tests
    python -m tools.matrix --docs docs/overview.md           # and writes the table of results into this page

Results are kept in `.matrix/results.json`, so that cells may be run one by one; the table has the newest of each cell.
A cell is PYTHON:TORCH. Its environment is kept in `.matrix/` and takes 8 GB where no index has a CPU build of that torch;
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu names one that has. uv and pyenv install further Pythons.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tools.environments import ROOT, new_environment

CELLS = ("3.11:2.9.0", "3.11:2.13.0", "3.12:2.13.0", "3.13:2.13.0")
"""The oldest and the tested torch, and every Python."""
FOLDER = ROOT / ".matrix"
RESULTS = FOLDER / "results.json"
SHORT = (
    "algorithms",
    "core",
    "data",
    "optim",
    "replica",
    "models",
    "runs",
    "loop",
    "integrations",
    "telemetry",
    "engines/simulator",
    "engines/processes",
    "test_battery.py",
)


class CellResult(NamedTuple):
    """What became of a cell."""

    outcome: str  # "passed", or why not
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    tests: str = ""  # which were run
    date: str = ""
    commit: str = ""


def interpreter(version: str) -> str | None:
    """The command of this Python: on the path, or the newest that pyenv has."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{version}")


def carry_out(cell: str, tests: Sequence[str], what: str) -> CellResult:
    """Runs the tests of a cell; no path means all."""
    version, torch = cell.split(":")
    python = interpreter(version)
    if python is None:
        return CellResult(f"not run: there is no python{version} here")
    folder = FOLDER / cell.replace(":", "-")
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            new_environment(folder, ["-e", f"{ROOT}[dev]"], python=python, torch=torch)
        except RuntimeError as error:
            return CellResult(f"failed: {str(error).strip().splitlines()[-1]}")
        (folder / "complete").touch()
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [folder / "bin" / "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow", "--junitxml", report]
    done = subprocess.run([*map(str, command), *tests], cwd=ROOT, check=False)
    result = result_of(done.returncode, report.read_text() if report.exists() else "<testsuite/>")
    return result._replace(tests=what, date=date.today().isoformat(), commit=_commit())


def result_of(code: int, report: str) -> CellResult:
    """The result of a run of pytest, from its exit code and its report.

    >>> result_of(1, '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>')[:4]
    ('failed', 5, 2, 2)
    """
    suites = [suite.attrib for suite in ElementTree.fromstring(report).iter("testsuite")]
    count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    outcome = "passed" if code == 0 else "failed" if code == 1 else f"failed: pytest ended with {code}"
    return CellResult(outcome, count["tests"] - failed - count["skipped"], count["skipped"], failed)


def table(results: Mapping[str, CellResult]) -> str:
    """The results of all cells in Markdown.

    >>> print(table({"3.11:2.9.0": CellResult("passed", 5, 1, 0, "all fast tests", "2026-01-31", "abc")}).splitlines()[2])
    | 3.11 | 2.9.0 | passed | 5 | 1 | 0 | all fast tests | 2026-01-31, abc |
    """
    lines = [
        "| Python | torch | outcome | passed | skipped | failed | tests | date and commit |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for cell in dict.fromkeys((*CELLS, *results)):
        one = results.get(cell, CellResult("no result is recorded"))
        ran = [*map(str, one[1:5]), f"{one.date}, {one.commit}"] if one.date else [""] * 5
        lines.append(f"| {' | '.join([*cell.split(':'), one.outcome, *ran])} |")
    return "\n".join(lines)


def with_table(page: str, lines: str) -> str:
    """The page with this table between its markers.

    >>> with_table("a <!-- matrix:begin --> b <!-- matrix:end --> c", "| 1 |").split("\\n\\n")
    ['a <!-- matrix:begin -->', '| 1 |', '<!-- matrix:end --> c']
    """
    before, begin, rest = page.partition("<!-- matrix:begin -->")
    _, end, after = rest.partition("<!-- matrix:end -->")
    if not end:
        raise SystemExit("the page needs the line <!-- matrix:begin --> and after it <!-- matrix:end -->")
    return f"{before}{begin}\n\n{lines}\n\n{end}{after}"


def read_results() -> dict[str, CellResult]:
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {cell: CellResult(**fields) for cell, fields in recorded.items()}


def _commit() -> str:
    named = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return named.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS, help=f"PYTHON:TORCH; by default {' '.join(CELLS)}")
    parser.add_argument("--short", action="store_true", help="about 60 %% of the fast tests")
    parser.add_argument("--tests", nargs="+", help="these tests alone")
    parser.add_argument("--docs", type=Path, help="a page with the markers `<!-- matrix:begin -->` and `<!-- matrix:end -->`")
    given = parser.parse_args()
    if given.docs:
        with_table(given.docs.read_text(), "")  # a page without markers is refused before the tests run
    tests = given.tests or ([f"tests/{name}" for name in SHORT] if given.short else [])
    what = " ".join(given.tests or []) or ("`--short`" if given.short else "all fast tests")
    results = {}
    for cell in given.cells:
        results[cell] = carry_out(cell, tests, what)
        FOLDER.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({name: one._asdict() for name, one in (read_results() | results).items()}, indent=1))
    print(table(read_results()))
    if given.docs:
        given.docs.write_text(with_table(given.docs.read_text(), table(read_results())))
    return 0 if all(result.outcome == "passed" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
