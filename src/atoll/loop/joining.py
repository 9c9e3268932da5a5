"""Joining the processes that torchrun started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from atoll.errors import ConfigError

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells every process."""


class Joined(NamedTuple):
    """This process among all.

    Attributes:
        rank: counted from 0.
        size: how many there are.
    """

    rank: int
    size: int


def join(*, limit_s: float = 600.0, threads: int | None = None) -> Joined:
    """Join the other processes by gloo, if torchrun started this one and nobody has joined them yet.

    Without torchrun this process is alone, and nothing is done. On CPUs torch's threads are shared out: two processes that each
    take all cores wait for each other most of the time.

    Args:
        limit_s: how long to wait for the others.
        threads: of torch, in this process; none: the cores over the processes of this machine. Not looked at where there is a GPU.
    """
    if limit_s <= 0:
        raise ConfigError(f"limit_s={limit_s}: it is more than 0 seconds. Leave it out for 10 minutes.")
    if not dist.is_initialized():
        if not all(name in os.environ for name in _TOLD):
            return Joined(0, 1)
        if not torch.cuda.is_available():
            torch.set_num_threads(threads or max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    return Joined(dist.get_rank(), dist.get_world_size())


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
