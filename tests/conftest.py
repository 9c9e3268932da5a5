"""One torch thread: two cores are shared by everything that runs beside the tests. And a few processes, which all tests share: they
cost more to start than the tests take. Ctrl-C reaches what tests start, also where the tests themselves were started in the
background by a shell, which has it ignored."""

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
    assert torch.get_num_threads() == 1, "a test or an engine changed the number of torch threads and did not put it back"


@pytest.fixture(scope="session")
def four():
    with closing(ProcessPool(4)) as together:
        yield together


@pytest.fixture
def fresh_four():
    """Four that have done nothing yet: torch keeps meshes of devices in mind, and with them groups that are no more."""
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
    """Before anything is deselected: a test that is not asked for today is still seen."""
    item.config.stash[COLLECTED].add(item.path)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist: what it collected goes to the controller
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
    """The files that this session collected tests from; none if it was asked for a part of the suite."""
    config = request.config
    return config.stash[COLLECTED] if config.args == config.getini("testpaths") else None
