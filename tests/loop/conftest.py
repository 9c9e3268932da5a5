"""Real processes, started once for all tests of the loop."""

import sys
from pathlib import Path

import pytest

from atoll.testing.processes import processes


@pytest.fixture(scope="session")
def _importable():
    """Functions of these tests are sent to processes by name: there, the tests must be found."""
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    yield
    sys.path.remove(root)


@pytest.fixture(scope="session")
def two(_importable):
    with processes(2) as together:
        yield together


@pytest.fixture(scope="session")
def three(_importable):
    with processes(3) as together:
        yield together


@pytest.fixture(scope="session")
def four(_importable):
    with processes(4) as together:
        yield together
