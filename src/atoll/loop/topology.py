"""Process groups of a loop: joining torchrun's processes, and the topology of islands and devices.

A trainer that finds torchrun's variables or a process group sets up data-parallel training over these processes. To prevent that,
`hide_torchrun` renames the variables. The islands then rendezvous on entry, in groups that torch.distributed does not know.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from atoll.engines.network_interfaces import LOOPBACK
from atoll.engines.point_to_point import Group
from atoll.engines.processes.intra_island import check_sliceable
from atoll.engines.processes.rank_context import new_group
from atoll.engines.rank_rendezvous import exchange_interface, wait_for_all
from atoll.engines.rank_store import (
    AGENT_STORE,
    TRUSTED,
    environment,
    find_store,
    loopback_interfaces,
    machine,
    open_store,
    refuse_untrusted_network,
    spans_machines,
)
from atoll.loop.settings import LoopSettings
from atoll.loop.uneven_inputs import UnevenCollectives

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = {
    *_RENDEZVOUS,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
"""Variables that torchrun sets in every process, besides those that begin with TORCHELASTIC_."""
_HIDDEN = "ATOLL_HIDDEN_"
_DEVICES = "ATOLL_ISLAND_DEVICES"
"""Variables in which `hide_torchrun` keeps torchrun's, and the number of devices of an island."""
_START_S = 600.0
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

    Without torchrun it returns (0, 1); after `alone()` it returns what that returned, without a group. On CPUs, if you chose no
    number of torch threads and the processes of this machine would use more threads than it has cores, `join` divides the cores
    among them.

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
    if is_hidden() or not (dist.is_initialized() or _started_by_torchrun()):
        return RankAndSize(*hidden_position()[:2])
    if not dist.is_initialized():
        spans = spans_machines()
        _check_network(spans=spans, trusted=trusted_network)
        _divide_cores(chosen=threads is not None)
        store, rank, size = find_store(limit_s)
        with _connected(store, rank, size, spans=spans, limit_s=limit_s):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
    return RankAndSize(dist.get_rank(), dist.get_world_size())


def _check_network(*, spans: bool, trusted: bool) -> None:
    refuse_untrusted_network(spans=spans, trusted=trusted, setting=_SETTING)
    if spans and os.environ.get("RANK", "0") == "0":
        log_info(TRUSTED)


@contextmanager
def _connected(store: Store, rank: int, size: int, *, spans: bool, limit_s: float) -> Iterator[None]:
    """Waits until all processes are here. Groups that are created here use an interface on which they reach each other. The first
    process of each machine logs whom it waits for."""
    log: Callable[[str], object] = log_info if os.environ.get("LOCAL_RANK", "0") == "0" else lambda text: None
    own = PrefixStore(f"atoll/enters-{store.add(f'atoll/enters/{rank}', 1)}", store)  # a group's store has keys of earlier blocks
    wait_for_all(own, rank, size, limit_s, log)
    with exchange_interface(own, rank, size, spans=spans, limit_s=limit_s, log=log):
        yield


def hide_torchrun(devices: int = 1) -> GridPosition:
    """Renames torchrun's variables, so that a trainer sees a single process, or the devices of its island alone. `find_topology`
    still finds the others. A second call changes nothing."""
    if is_hidden() or not _started_by_torchrun():
        return hidden_position()
    size, on_machine = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if devices < 1 or size % devices or on_machine % devices:
        raise ConfigError(
            f"devices={devices}: torchrun started {size} processes, {on_machine} of them here. The devices of an island are "
            f"processes of one machine: give a number that divides both."
        )
    _divide_cores()
    for name in _torchrun_names():
        os.environ[_HIDDEN + name] = os.environ.pop(name)
    os.environ[_DEVICES] = str(devices)
    if devices > 1:
        _show_island(hidden_position())
    return hidden_position()


def is_hidden() -> bool:
    """Whether `hide_torchrun` has hidden torchrun's other processes."""
    return _HIDDEN + "RANK" in os.environ


def hidden_position() -> GridPosition:
    """This process among those that `hide_torchrun` hid; the only one if it hid none."""
    if not is_hidden():
        return GridPosition()
    rank, size, devices = (int(os.environ.get(name, "1")) for name in (_HIDDEN + "RANK", _HIDDEN + "WORLD_SIZE", _DEVICES))
    return GridPosition(rank // devices, size // devices, rank % devices, devices)


def _show_island(position: GridPosition) -> None:
    """Has a trainer take the devices of this island for all of torchrun's processes. They find each other in a store that the first
    of them hosts, on the loopback interface."""
    with _torchrun_visible():
        spans = spans_machines()
        found, _, _ = find_store(_START_S)
    if position.device == 0:
        hosted, port = open_store(LOOPBACK)
        atexit.register(lambda held: None, hosted)  # it lives as long as this process
        found.set(f"port/{position.island}", str(port))
    numbers = {"RANK": position.device, "LOCAL_RANK": position.device}
    numbers |= {"WORLD_SIZE": position.devices, "LOCAL_WORLD_SIZE": position.devices}
    texts = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": found.get(f"port/{position.island}").decode(), AGENT_STORE: "True"}
    os.environ.update({name: str(number) for name, number in numbers.items()} | texts | {"TORCHELASTIC_RUN_ID": "island"})
    if not spans:
        os.environ.update(loopback_interfaces())


def _torchrun_names() -> list[str]:
    return [name for name in os.environ if name in _TORCHRUN or name.startswith("TORCHELASTIC_")]


def _started_by_torchrun() -> bool:
    return all(name in os.environ for name in _RENDEZVOUS)


@contextmanager
def _torchrun_visible() -> Iterator[None]:
    shown = {name: os.environ.pop(name) for name in _torchrun_names()}
    try:
        with environment({name.removeprefix(_HIDDEN): os.environ[name] for name in [*os.environ] if name.startswith(_HIDDEN)}):
            yield
    finally:
        os.environ.update(shown)


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
    store: Store | None = None  # that all processes share in this block; None if there is one

    def close(self) -> None:
        for group in self.groups:
            dist.destroy_process_group(group)


def find_topology(settings: LoopSettings) -> Topology:
    """Creates the process groups of the islands. All processes call it together."""
    timeout_s = ExchangeTimeout(settings.limit_s).timeout_s
    try:
        return (_hidden_topology if is_hidden() else _visible_topology)(settings, timeout_s)
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
    with _connected(_get_default_store(), rank, size, spans=spans, limit_s=timeout_s):
        inter = new_group(counterparts, rank, "gloo", timeout_s)
        intra = new_group(grid, rank, "gloo", timeout_s) if position.devices > 1 else None
    store = PrefixStore(f"atoll/{inter.group_name}", _get_default_store())
    inter_island = _uneven_collectives(settings, timeout_s, inter, counterparts[device], store, position.devices)
    default = _get_default_store()
    shared = PrefixStore(f"atoll/block/{default.add(f'atoll/blocks/{rank}', 1)}", default)
    if intra is None:
        return Topology(position, inter_island, groups=(inter,), store=shared)
    intra_island = _intra_collectives(intra, timeout_s, FailureAttribution(store, rank, grid[island]), position)
    return Topology(position, inter_island, intra_island, (inter, intra), shared)


def _group_spans_machines(rank: int, size: int) -> bool:
    """Whether the processes of torch.distributed run on several machines. A user who initialized it need not have torchrun's
    variables: then the processes exchange where they run."""
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
    position, timeout = hidden_position(), timedelta(seconds=timeout_s)
    island, islands, device, devices = position
    outer, ranks = PrefixStore(f"device{device}", store), range(device, size, devices)
    with _torchrun_visible(), _connected(store, rank, size, spans=spans, limit_s=timeout_s):
        group = dist.ProcessGroupGloo(outer, island, islands, timeout)
        inter_island = _uneven_collectives(settings, timeout_s, group, ranks, outer, devices)
        if devices == 1:
            return Topology(position, inter_island, store=store)
        check_sliceable(settings.algorithm)
        inner = PrefixStore(f"island{island}", store)
        inside = dist.ProcessGroupGloo(inner, device, devices, timeout)
    attribution = FailureAttribution(inner, device, range(devices))
    return Topology(position, inter_island, _intra_collectives(inside, timeout_s, attribution, position), store=store)


def _intra_collectives(group: Group, timeout_s: float, attribution: FailureAttribution, position: GridPosition) -> GroupCollectives:
    names = [f"device {number} of island {position.island}" for number in range(position.devices)]
    return GroupCollectives(group, timeout_s=timeout_s, attribution=attribution, names=names)


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
        needs_all = "with several devices per island the others cannot know whether all of its devices left"
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
