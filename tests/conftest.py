"""One torch thread: two cores are shared by everything that runs beside the tests. And a few processes, which all tests share: they
cost more to start than the tests take. Ctrl-C reaches what tests start, also where the tests themselves were started in the
background by a shell, which has it ignored."""

import signal
import sys
from pathlib import Path

import pytest
import torch

from atoll.testing.processes import processes

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    assert torch.get_num_threads() == 1, "a test or an engine changed the number of torch threads and did not put it back"


@pytest.fixture(scope="session")
def _importable():
    """Functions of tests are sent to processes by name: there, the tests must be found."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    yield
    sys.path.remove(root)


@pytest.fixture(scope="session")
def four(_importable):
    with processes(4) as together:
        yield together


@pytest.fixture
def fresh_four(_importable):
    """Four that have done nothing yet: torch keeps meshes of devices in mind, and with them groups that are no more."""
    with processes(4) as together:
        yield together


@pytest.fixture(scope="session")
def three(four):
    return four.few(3)


@pytest.fixture(scope="session")
def two(four):
    return four.few(2)
