"""`make test` covers every file: pytest collects every test file and every example of a docstring, ruff lints every Python file,
mypy checks every source file, and no file opts out.

pytest and ruff skip folders with certain names by default (`dist`, `build`, `venv`). A package of that name would leave `make test`
without a message.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
PYTHON = ("src", "tests", "benchmarks", "examples", "docs", "tools")
OPTS_OUT = re.compile(r"#\s*(ruff:\s*noqa|flake8:\s*noqa|mypy:\s*(ignore|disable)|fmt:\s*off|isort:\s*skip_file)")
UNTYPED = {"datasets", "tokenizers", "transformers", "sklearn", "zstandard", "matplotlib", "tensorboard", "safetensors"}
UNTYPED |= {"lightning", "torchft", "ray"}


def python_files(*folders):
    return {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts}


def paths_of(*command):
    """The paths that a tool prints, one per line."""
    printed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {(ROOT / line.partition(":")[0]).resolve() for line in printed.splitlines()}


def test_every_test_file_and_every_source_file_with_examples_is_collected(collected):
    found = paths_of("pytest", "--collect-only", "-q", "src", "tests") if collected is None else collected
    expected = {path for path in python_files("tests") if path.name.startswith("test_")}
    expected |= {path for path in python_files("src") if ">>> " in path.read_text()}
    assert not expected - found, f"pytest does not collect {sorted(expected - found)}"


def test_every_python_file_is_linted():
    missing = python_files(*PYTHON) - paths_of("ruff", "check", "--show-files")
    assert not missing, f"ruff does not lint {sorted(missing)}"


def test_every_source_file_is_type_checked():
    assert CONFIG["mypy"]["files"] == ["src"], "mypy checks all of src"
    assert CONFIG["mypy"].keys() <= {"strict", "files", "python_version", "overrides"}
    without = {path.parent for path in python_files("src/atoll") if not (path.parent / "__init__.py").exists()}
    assert not without, f"mypy does not see packages without __init__.py: {sorted(without)}"


def test_type_checks_are_relaxed_for_third_party_modules_only():
    for override in CONFIG["mypy"]["overrides"]:
        assert override.keys() <= {"module", "ignore_missing_imports", "follow_imports"}
        assert set(override["module"]) <= {f"{library}.*" for library in UNTYPED}


def test_no_file_opts_out_of_the_checks():
    found = [path for path in python_files(*PYTHON) if OPTS_OUT.search(path.read_text())]
    assert not found, f"these files turn a check off for all of their lines: {found}"
