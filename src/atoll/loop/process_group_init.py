"""Joining the processes that torchrun started: as torch's own group, or without torch.distributed knowing of it.

A trainer that finds torchrun's variables, or a process group, takes the processes for its own. So they can be hidden: the variables
are put away under other names, and when a block is entered the islands meet without a group that others could see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from atoll.core.errors import ConfigError
from atoll.loop.notices import say

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TOLD = {
    *_NEEDED,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
"""What torchrun tells every process, besides what begins with TORCHELASTIC_."""
_HIDDEN = "ATOLL_HIDDEN_"


class Joined(NamedTuple):
    """This process among all.

    Attributes:
        rank: counted from 0.
        size: how many there are.
    """

    rank: int
    size: int


class Met(NamedTuple):
    """Processes that have met, and that torch.distributed knows nothing of: this one among them, and a store that all see."""

    store: Store
    rank: int
    size: int


def join(*, limit_s: float = 600.0, threads: int | None = None) -> Joined:
    """Join the other processes by gloo, if torchrun started this one and nobody has joined them yet.

    Without torchrun this process is alone, and nothing is done. Where nobody has chosen a number of torch's threads, and the
    processes of this machine would together take more than its cores, they share these out: processes that each take all of them
    wait for each other most of the time.

    Args:
        limit_s: how long to wait for the others.
        threads: of torch, in this process. None leaves what you chose, by OMP_NUM_THREADS or torch.set_num_threads. (torchrun
            itself sets OMP_NUM_THREADS=1 if it starts several processes and you did not set it.)
    """
    if limit_s <= 0:
        raise ConfigError(f"limit_s={limit_s}: it is more than 0 seconds. Leave it out for 10 minutes.")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: it is 1 or more. Leave it out to keep what there is.")
    if threads is not None:
        torch.set_num_threads(threads)
    if not dist.is_initialized():
        if not all(name in os.environ for name in _NEEDED):
            return Joined(0, 1)
        _share_cores(chosen=threads is not None)
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    return Joined(dist.get_rank(), dist.get_world_size())


def hide() -> Joined:
    """Put away what torchrun tells, so that a trainer takes this process for the only one. Islands find it all the same."""
    if not all(name in os.environ for name in _NEEDED):
        return Joined(0, 1)
    joined = Joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _share_cores()
    for name in [name for name in os.environ if name in _TOLD or name.startswith("TORCHELASTIC_")]:
        os.environ[_HIDDEN + name] = os.environ.pop(name)
    return joined


def meet_hidden(limit_s: float) -> Met | None:
    """Meet the other processes where they were hidden; none if they were not."""
    if _HIDDEN + "RANK" not in os.environ:
        return None
    with _shown():
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    store.set_timeout(timedelta(seconds=limit_s))
    return Met(store, rank, size)


@contextmanager
def _shown() -> Iterator[None]:
    """What was put away, for a moment."""
    names = [name.removeprefix(_HIDDEN) for name in os.environ if name.startswith(_HIDDEN)]
    os.environ.update({name: os.environ[_HIDDEN + name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _share_cores(*, chosen: bool = False) -> None:
    """Where nobody chose a number of threads, and there would be more of them than cores."""
    cores, processes, threads = _cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads()
    chosen = chosen or any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    by_default = threads in (cores, cores // 2)  # with and without a core's second thread
    if chosen or not by_default or threads * processes <= cores or torch.cuda.is_available():
        return
    torch.set_num_threads(max(1, cores // processes))
    if threads > 1 and os.environ["RANK"] == "0":
        say(
            f"{processes} processes share {cores} cores: {torch.get_num_threads()} threads of torch each, instead of {threads}. "
            f"Set OMP_NUM_THREADS, or use atoll.join(threads=...), for another number."
        )


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
