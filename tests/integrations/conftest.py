"""Two processes for the trainers alone, because trainers change global state; and torchrun's environment."""

import os
from contextlib import closing, contextmanager
from functools import partial

import pytest
import torch.distributed as dist

from atoll.engines.network_interfaces import free_port
from tests.process_pool import ProcessPool


@pytest.fixture(scope="session")
def two():
    with closing(ProcessPool(2)) as pool:
        yield pool


@pytest.fixture
def four():
    """Processes of their own: a trainer that has several keeps state of them."""
    with closing(ProcessPool(4)) as pool:
        yield pool


@contextmanager
def by_torchrun(port):
    """The environment of a process that torchrun started and that has not initialized torch.distributed."""
    variables = {name: dist.get_rank() for name in ("RANK", "LOCAL_RANK")}
    variables |= {name: dist.get_world_size() for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    dist.destroy_process_group()
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(("ATOLL_HIDDEN_", "ATOLL_ISLAND_", "TORCHELASTIC_"))]:
            del os.environ[name]
        for name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys():
            del os.environ[name]
        if dist.is_initialized():  # a trainer's group of the devices of an island
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the pool takes down again


@pytest.fixture
def torchrun():
    """Returns a context manager that gives a process torchrun's environment."""

    def started():
        return partial(by_torchrun, free_port("127.0.0.1"))

    return started
