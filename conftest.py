"""The order of the tests, and which files a session collects tests from, for tests/test_gate.py and the last line of the output.

ATOLL_NAMESPACES=required refuses a machine on which the tests that need network namespaces would be skipped.
"""

import os
from pathlib import Path

import pytest

COLLECTED = pytest.StashKey[set]()


def pytest_configure(config):
    config.stash[COLLECTED] = set()
    if not hasattr(config, "workerinput"):  # once for all workers of pytest-xdist
        require_namespaces()


def require_namespaces():
    if os.environ.get("ATOLL_NAMESPACES", "") != "required":
        return
    from atoll.testing import network_namespaces

    if why := network_namespaces.unavailable_reason(nat=True):
        raise pytest.UsageError(f"ATOLL_NAMESPACES=required, and tests with network namespaces would be skipped: {why}")


def pytest_itemcollected(item):
    """pytest calls this before it deselects tests, so that deselected tests count as collected."""
    item.config.stash[COLLECTED].add(item.path)


def pytest_collection_modifyitems(items):
    """Put files with a long setup first: a worker of pytest-xdist that takes a part of their tests repeats it."""
    items.sort(key=lambda item: item.get_closest_marker("long_setup") is None)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist sends the paths that it collected to the controller
        session.config.workeroutput["collected"] = [str(path) for path in session.config.stash[COLLECTED]]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[COLLECTED].update(map(Path, getattr(node, "workeroutput", {}).get("collected", ())))


def pytest_terminal_summary(terminalreporter, config):
    test_files = set((Path(__file__).parent / "tests").rglob("test_*.py"))
    collected = test_files & config.stash[COLLECTED]
    terminalreporter.write_line(f"collected {len(collected)} of {len(test_files)} test files")


@pytest.fixture
def collected(request):
    """The files that this session collected tests from; None if it runs a part of the suite."""
    config = request.config
    return config.stash[COLLECTED] if config.args == config.getini("testpaths") else None
