"""Examples in the benchmarks' docstrings are true."""

import doctest
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

WITH_EXAMPLES = [path.stem for path in BENCHMARKS.glob("*.py") if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(b, name):
    assert doctest.testmod(getattr(b, name)).failed == 0
