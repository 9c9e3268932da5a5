"""One torch thread: two cores are shared by everything that runs beside the tests."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    assert torch.get_num_threads() == 1, "a test or an engine changed the number of torch threads and did not put it back"
