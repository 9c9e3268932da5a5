"""One torch thread: two cores are shared by everything that runs beside the tests."""

import pytest
import torch

from atoll.testing.processes import processes

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    assert torch.get_num_threads() == 1, "a test or an engine changed the number of torch threads and did not put it back"


@pytest.fixture(scope="session")
def four():
    """Four processes: they cost more to start than the tests take, so all tests share them."""
    with processes(4) as together:
        yield together
