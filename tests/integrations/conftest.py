"""Two real processes for all trainers, which leave things behind in theirs; and what torchrun tells them."""

import os
import socket
from contextlib import contextmanager
from functools import partial

import pytest
import torch.distributed as dist

from atoll.testing.processes import processes


@pytest.fixture(scope="session")
def two(_importable):
    with processes(2) as together:
        yield together


@contextmanager
def by_torchrun(port):
    """As torchrun starts a process: it is told who it is, and has joined nobody yet."""
    told = {name: dist.get_rank() for name in ("RANK", "LOCAL_RANK")}
    told |= {name: dist.get_world_size() for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    dist.destroy_process_group()
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ATOLL_HIDDEN_")]:
            del os.environ[name]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the pool takes down again


@pytest.fixture
def torchrun():
    """Makes what a process enters to be one of those that torchrun started together."""

    def started():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return partial(by_torchrun, found.getsockname()[1])

    return started
