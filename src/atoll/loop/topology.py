"""Process groups of a loop: joining torchrun's processes, and the topology of islands and devices.

A trainer that finds torchrun's variables or a process group sets up data-parallel training over these processes. To prevent that,
`hide_torchrun` renames the variables. The islands then rendezvous on entry, in groups that torch.distributed does not know.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import ExchangeTimeout, FailureAttribution
from atoll.engines.point_to_point import Group
from atoll.engines.processes.rank_context import new_group
from atoll.engines.rank_store import TRUSTED, find_store, machine, on_loopback, refuse_untrusted_network, spans_machines
from atoll.loop.settings import LoopSettings
from atoll.loop.uneven_inputs import UnevenCollectives

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = {
    *_RENDEZVOUS,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
"""Variables that torchrun sets in every process, besides those that begin with TORCHELASTIC_."""
_HIDDEN = "ATOLL_HIDDEN_"
_SETTING = "trusted_network=True to atoll.join and atoll.islands"


class RankAndSize(NamedTuple):
    rank: int
    size: int


def log_info(text: str) -> None:
    """Logs at INFO to the logger `atoll`; to stderr if logging is not configured, because INFO would then be lost."""
    logger = logging.getLogger("atoll")
    if logger.hasHandlers():
        logger.info(text)
    else:
        sys.stderr.write(f"atoll: {text}\n")


# ------------------------------------------------------------------------------------------------------- torchrun's processes


def join(*, limit_s: float = 600.0, threads: int | None = None, trusted_network: bool = False) -> RankAndSize:
    """Initializes a gloo process group if torchrun started this process and no group exists. Returns rank and size.

    Without torchrun it returns (0, 1). On CPUs, if you chose no number of torch threads and the processes of this machine would use
    more threads than it has cores, `join` divides the cores among them.

    Args:
        limit_s: timeout for the other processes.
        threads: torch threads of this process. None keeps what OMP_NUM_THREADS or torch.set_num_threads chose. (torchrun itself
            sets OMP_NUM_THREADS=1 if it starts several processes and you did not set it.)
        trusted_network: allows processes on several machines. torch's transport has no authentication and no encryption: everyone
            on that network can read and change the run, and torchrun executes what it receives. Without it the group listens on the
            loopback interface only, and processes on several machines are refused.
    """
    if limit_s <= 0:
        raise ConfigError(f"limit_s={limit_s}: give more than 0 seconds, or leave it out for 600 s.")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: give 1 or more, or leave it out to keep the present number.")
    if threads is not None:
        torch.set_num_threads(threads)
    if not dist.is_initialized():
        if not _started_by_torchrun():
            return RankAndSize(0, 1)
        spans = spans_machines()
        _check_network(spans=spans, trusted=trusted_network)
        _divide_cores(chosen=threads is not None)
        with on_loopback(unless=spans):
            store, rank, size = find_store(limit_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
    return RankAndSize(dist.get_rank(), dist.get_world_size())


def _check_network(*, spans: bool, trusted: bool) -> None:
    refuse_untrusted_network(spans=spans, trusted=trusted, setting=_SETTING)
    if spans and os.environ.get("RANK", "0") == "0":
        log_info(TRUSTED)


def hide_torchrun() -> RankAndSize:
    """Renames torchrun's variables, so that a trainer sees a single process. `find_topology` still finds the others."""
    if not _started_by_torchrun():
        return RankAndSize(0, 1)
    joined = RankAndSize(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _divide_cores()
    for name in [name for name in os.environ if name in _TORCHRUN or name.startswith("TORCHELASTIC_")]:
        os.environ[_HIDDEN + name] = os.environ.pop(name)
    return joined


def _started_by_torchrun() -> bool:
    return all(name in os.environ for name in _RENDEZVOUS)


@contextmanager
def _torchrun_visible() -> Iterator[None]:
    names = [name.removeprefix(_HIDDEN) for name in os.environ if name.startswith(_HIDDEN)]
    os.environ.update({name: os.environ[_HIDDEN + name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _divide_cores(*, chosen: bool = False) -> None:
    cores, processes, threads = _cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads()
    chosen = chosen or any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    is_default = threads in (cores, cores // 2)  # with and without hyper-threads
    if chosen or not is_default or threads * processes <= cores or torch.cuda.is_available():
        return
    torch.set_num_threads(max(1, cores // processes))
    if threads > 1 and os.environ["RANK"] == "0":
        log_info(
            f"{processes} processes share {cores} cores: {torch.get_num_threads()} torch threads each, instead of {threads}. "
            f"Set OMP_NUM_THREADS or call atoll.join(threads=...) for another number."
        )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------------------ topology


class GridPosition(NamedTuple):
    """This process in the grid of islands and their devices."""

    island: int = 0
    islands: int = 1
    device: int = 0
    devices: int = 1

    def __str__(self) -> str:
        return f"device {self.device} of {self.devices} in island {self.island} of {self.islands}"


@dataclass(frozen=True)
class Topology:
    """This process's position, and its collectives."""

    position: GridPosition
    inter_island: UnevenCollectives  # with the same device of all islands
    intra_island: GroupCollectives | None = None  # with the devices of this island; None if it has one
    groups: tuple[dist.ProcessGroup, ...] = ()  # those that torch.distributed knows

    def close(self) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)


def find_topology(settings: LoopSettings) -> Topology:
    """Creates the process groups of the islands. All processes call it together."""
    timeout_s = ExchangeTimeout(settings.limit_s).timeout_s
    try:
        return (_hidden_topology if _HIDDEN + "RANK" in os.environ else _visible_topology)(settings, timeout_s)
    except RuntimeError as error:
        raise ExchangeFailed(
            f"not all islands entered the block within {timeout_s:g} s: one is late, died, or is unreachable. Look at their logs, "
            f"or raise islands(limit_s=...). ({error})"
        ) from error


def _visible_topology(settings: LoopSettings, timeout_s: float) -> Topology:
    """Groups among the processes of torch.distributed, which `join` initializes if necessary."""
    rank, size = join(limit_s=timeout_s, trusted_network=settings.trusted_network)
    grid = [[rank] for rank in range(size)] if settings.mesh is None else _checked_grid(settings.mesh, size)
    if size == 1:
        return _single_process(settings)
    island, device = next((i, d) for i, ranks in enumerate(grid) for d, other in enumerate(ranks) if other == rank)
    position = GridPosition(island, len(grid), device, len(grid[0]))
    counterparts = [list(column) for column in zip(*grid, strict=True)]
    spans = _group_spans_machines(rank, size)
    refuse_untrusted_network(spans=spans, trusted=settings.trusted_network, setting=_SETTING)
    with on_loopback(unless=spans):
        inter = new_group(counterparts, rank, "gloo", timeout_s)
        intra = new_group(grid, rank, "gloo", timeout_s) if position.devices > 1 else None
    store = PrefixStore(f"atoll/{inter.group_name}", _get_default_store())
    inter_island = _uneven_collectives(settings, timeout_s, inter, counterparts[device], store, position.devices)
    if intra is None:
        return Topology(position, inter_island, groups=(inter,))
    names = [f"device {number} of island {island}" for number in range(position.devices)]
    attribution = FailureAttribution(store, rank, grid[island])
    intra_island = GroupCollectives(intra, timeout_s=timeout_s, attribution=attribution, names=names)
    return Topology(position, inter_island, intra_island, (inter, intra))


def _group_spans_machines(rank: int, size: int) -> bool:
    """Whether the processes of torch.distributed run on several machines. A user who initialized it need not have torchrun's
    variables: then the processes tell each other where they run."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return spans_machines()
    store = PrefixStore("atoll/machine", _get_default_store())
    store.set(str(rank), machine())
    return any(store.get(str(other)).decode() != machine() for other in range(size))


def _hidden_topology(settings: LoopSettings, timeout_s: float) -> Topology:
    """A group among the processes that `hide_torchrun` hid from torch.distributed."""
    if settings.mesh is not None:
        raise ConfigError("a mesh needs the processes that alone() hides. Use either a mesh or alone().")
    with _torchrun_visible():
        spans = spans_machines()
        _check_network(spans=spans, trusted=settings.trusted_network)
        store, rank, size = find_store(timeout_s)
    if size == 1:
        return _single_process(settings)
    with on_loopback(unless=spans):
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    inter_island = _uneven_collectives(settings, timeout_s, group, range(size), store)
    return Topology(GridPosition(rank, size), inter_island)


def _single_process(settings: LoopSettings) -> Topology:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # it never sends a message
    return Topology(GridPosition(), _uneven_collectives(settings, 0.0, group, [0], None))


def _uneven_collectives(
    settings: LoopSettings, timeout_s: float, group: Group, ranks: Sequence[int], store: Store | None, devices: int = 1
) -> UnevenCollectives:
    needs_all, together = "", settings.finish == "together"
    if settings.sharded:
        needs_all = "its slice of the optimizer's state is lost"
    elif devices > 1:
        needs_all = "with several devices per island the others cannot tell whether all of its devices left"
    return UnevenCollectives(group, ranks, store, timeout_s=timeout_s, finish_together=together, needs_all=needs_all)


def _checked_grid(mesh: DeviceMesh, size: int) -> list[list[int]]:
    if mesh.mesh_dim_names != ("island", "device"):
        raise ConfigError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}: it needs ('island', 'device'), in this order. Make it with "
            f'init_device_mesh("cuda", (islands, devices), mesh_dim_names=("island", "device")).'
        )
    if mesh.size() != size:
        raise ConfigError(f"the mesh has {mesh.size()} processes and the process group {size}: put all of them into the mesh.")
    grid: list[list[int]] = mesh.mesh.tolist()
    return grid
