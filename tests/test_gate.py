"""Nothing is outside of the gate: every test file is collected, every Python file is linted, every source file is type-checked.

pytest and ruff skip folders with certain names by default (`dist`, `build`, `venv`): a package of that name would leave `make test`
silently.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def python_files(*folders):
    return {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts}


def paths_of(*command):
    """The paths that a tool prints, one per line."""
    printed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {(ROOT / line.partition(":")[0]).resolve() for line in printed.splitlines()}


def test_every_test_file_is_collected(collected):
    found = paths_of("pytest", "--collect-only", "-q", "tests") if collected is None else collected
    missing = {path for path in python_files("tests") if path.name.startswith("test_")} - found
    assert not missing, f"pytest does not collect {sorted(missing)}"


def test_every_python_file_is_linted():
    missing = python_files("src", "tests", "benchmarks", "examples") - paths_of("ruff", "check", "--show-files")
    assert not missing, f"ruff does not look at {sorted(missing)}"


def test_every_source_file_is_type_checked():
    assert CONFIG["mypy"]["files"] == ["src"], "mypy is to look at all of src"
    assert "exclude" not in CONFIG["mypy"]
    without = {path.parent for path in python_files("src/atoll") if not (path.parent / "__init__.py").exists()}
    assert not without, f"mypy does not see packages without __init__.py: {sorted(without)}"
