"""Tests use one torch thread, because they share two cores with other processes. All tests share a few worker processes, which take
longer to start than most tests run. Ctrl-C and SIGHUP reach processes that tests start, also if a shell started the tests in the
background, where it ignores SIGINT, or under nohup, which ignores SIGHUP."""

import signal
from contextlib import closing

import pytest
import torch

from tests.process_pool import ProcessPool

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    assert torch.get_num_threads() == 1, "a test or an engine changed the number of torch threads and did not restore it"


@pytest.fixture(scope="session")
def four():
    with closing(ProcessPool(4)) as together:
        yield together


@pytest.fixture
def fresh_four():
    """Four unused processes: torch caches device meshes, and with them process groups that no longer exist."""
    with closing(ProcessPool(4)) as together:
        yield together


@pytest.fixture(scope="session")
def three(four):
    return four.subset(3)


@pytest.fixture(scope="session")
def two(four):
    return four.subset(2)
