"""Examples in the benchmarks' docstrings are true."""

import doctest

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "spread",
        "record",
        "wording",
        "claims",
        "demo_seeds",
        "async_demo",
        "async_ray",
        "async_rows",
        "async_claims",
        "acco_unequal",
        "page",
        "options",
        "slow_island",
        "slow_tables",
    ],
)
def test_examples_in_docstrings_are_true(b, name):
    assert doctest.testmod(getattr(b, name)).failed == 0
