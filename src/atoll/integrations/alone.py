"""Trainers that find torchrun's variables set up data-parallel training by themselves. Here each process is to train alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from atoll.core.errors import ConfigError
from atoll.loop.process_group_init import Joined, hide


def alone() -> Joined:
    """Hide from this process that there are others: a trainer made after it trains by itself. Islands find each other all the same.

    Call it first in your script, under torchrun. What torchrun says of processes is put away in this process's environment, no
    process group is made that others could see, and on a machine with several GPUs this process sees that of its local rank only.

    Returns:
        This island's rank and how many islands there are: shard your data by them.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("alone() hides the other processes, and torch.distributed has joined them. Call it first in your script.")
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and torch.cuda.is_available() and torch.cuda.device_count() > 1:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError("alone() chooses one GPU for this process, and CUDA is in use already. Call it first in your script.")
        os.environ["CUDA_VISIBLE_DEVICES"] = _one_gpu(os.environ, torch.cuda.device_count(), int(local_rank))
    return hide()


def _one_gpu(environment: Mapping[str, str], count: int, local_rank: int) -> str:
    """The visible GPU of this local rank.

    >>> _one_gpu({}, 4, 2)
    '2'
    >>> _one_gpu({"CUDA_VISIBLE_DEVICES": "4,7"}, 2, 3)
    '7'
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(i) for i in range(count)]
    return visible[local_rank % len(visible)]
