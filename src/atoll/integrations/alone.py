"""Trainers that find torchrun's variables set up data-parallel training by themselves. Here each process is to train alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from atoll.errors import ConfigError
from atoll.loop.joining import Joined, join

_TOLD = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def alone(*, limit_s: float = 600.0) -> Joined:
    """Join the other islands, then hide from this process that there are any: a trainer made after it trains by itself.

    Call it first in your script, under torchrun. What torchrun says of processes is taken out of this process's environment, and on
    a machine with several GPUs this process sees one of them, that of its local rank.

    Args:
        limit_s: how long to wait for the others.

    Returns:
        This island's rank and how many islands there are: shard your data by them.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    joined = join(limit_s=limit_s)
    if local_rank is not None and torch.cuda.is_available() and torch.cuda.device_count() > 1:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError("alone() chooses one GPU for this process, and CUDA is in use already. Call it first in your script.")
        os.environ["CUDA_VISIBLE_DEVICES"] = _one_gpu(os.environ, torch.cuda.device_count(), int(local_rank))
    for name in [name for name in os.environ if name in _TOLD or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    return joined


def _one_gpu(environment: Mapping[str, str], count: int, local_rank: int) -> str:
    """The visible GPU of this local rank.

    >>> _one_gpu({}, 4, 2)
    '2'
    >>> _one_gpu({"CUDA_VISIBLE_DEVICES": "4,7"}, 2, 3)
    '7'
    """
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(i) for i in range(count)]
    return visible[local_rank % len(visible)]
