"""Tests use one torch thread, because they share two cores with other processes. All tests share a few worker processes, which take
longer to start than most tests run. Ctrl-C reaches processes that tests start, also if a shell started the tests in the background,
where it ignores SIGINT."""

import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.process_pool import ProcessPool

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)


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


COLLECTED = pytest.StashKey[set]()


def pytest_configure(config):
    config.stash[COLLECTED] = set()


def pytest_itemcollected(item):
    """pytest calls this before it deselects tests, so that deselected tests count as collected."""
    item.config.stash[COLLECTED].add(item.path)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist sends the paths that it collected to the controller
        session.config.workeroutput["collected"] = [str(path) for path in session.config.stash[COLLECTED]]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[COLLECTED].update(map(Path, getattr(node, "workeroutput", {}).get("collected", ())))


def pytest_terminal_summary(terminalreporter, config):
    test_files = set(Path(__file__).parent.rglob("test_*.py"))
    collected = test_files & config.stash[COLLECTED]
    terminalreporter.write_line(f"collected {len(collected)} of {len(test_files)} test files")


@pytest.fixture
def collected(request):
    """The files that this session collected tests from; None if it runs a part of the suite."""
    config = request.config
    return config.stash[COLLECTED] if config.args == config.getini("testpaths") else None
