"""Two real processes, started once for all trainers."""

import sys
from pathlib import Path

import pytest

from atoll.testing.processes import processes


@pytest.fixture(scope="session")
def two():
    """Functions of these tests are sent to processes by name: there, the tests must be found."""
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    with processes(2) as together:
        yield together
    sys.path.remove(root)
