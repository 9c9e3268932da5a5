"""This process's place: which island it is, which device of it, and over which lines it talks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.liveness import FailureAttribution
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.transport import Group
from atoll.loop.process_group_init import Met, join, meet_hidden
from atoll.loop.uneven_inputs import Lone

_MEETING_S = 600.0
"""How long processes wait for each other on entry, unless a limit is given."""


class Departures:
    """Who left by an exception, written down where all can read it."""

    def __init__(self, store: Store | None, island: int) -> None:
        self._store, self._island = store, island

    def announce(self) -> None:
        """This island leaves."""
        try:
            if self._store is not None:
                self._store.set(f"left/{self._island}", "1")
        except RuntimeError:  # the store is gone: its host left before, and nobody can read there any more
            self._store = None

    def has_left(self, island: int) -> bool:
        try:
            return self._store is not None and bool(self._store.check([f"left/{island}"]))
        except RuntimeError:
            return False


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among all.

    Attributes:
        island: its number.
        islands: how many there are.
        device: of the island, counted from 0.
        devices: of each island.
        between: a wire with this device's counterparts in all islands.
        inside: a wire with the devices of this island; none where it has one.
        departures: who left.
        groups: the process groups that were made for it.
    """

    island: int = 0
    islands: int = 1
    device: int = 0
    devices: int = 1
    between: GroupCollectives | Lone
    inside: GroupCollectives | None = None
    departures: Departures
    groups: tuple[Group, ...] = ()

    def close(self) -> None:
        """Give the groups back: nobody will talk in them any more."""
        for group in self.groups:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)


def find_place(mesh: DeviceMesh | None, limit_s: float | None) -> Place:
    """This process's place. All processes ask together: they make groups of their own, which nobody else talks in."""
    limit_s = _MEETING_S if limit_s is None else limit_s
    with _meeting(limit_s):
        met = meet_hidden(limit_s)
        return _shown_place(mesh, limit_s) if met is None else _hidden_place(met, mesh, limit_s)


@contextmanager
def _meeting(limit_s: float) -> Iterator[None]:
    """Says what torch's errors mean while processes meet."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeFailed(
            f"not all islands entered the block within {limit_s:g} s: one is late, died, or cannot be reached. Look at the others, "
            f"or give islands(limit_s=...) more. ({error})"
        ) from error


def _shown_place(mesh: DeviceMesh | None, limit_s: float) -> Place:
    """A place among the processes that torch.distributed has joined, or joins here."""
    rank, size = join(limit_s=limit_s)
    if mesh is None:
        grid = [[rank] for rank in range(size)]
    else:
        _check_mesh(mesh, size)
        grid = mesh.mesh.tolist()
    if size == 1:
        return Place(between=Lone(), departures=Departures(None, 0))
    island, device = next((i, d) for i, ranks in enumerate(grid) for d, other in enumerate(ranks) if other == rank)
    counterparts = [list(column) for column in zip(*grid, strict=True)]
    between = _group(counterparts, rank, limit_s)
    inside = _group(grid, rank, limit_s) if len(grid[0]) > 1 else None
    store = PrefixStore(f"atoll/{between.group_name}", _get_default_store())
    islands = [f"island {number}" for number in range(len(grid))]
    devices = [f"device {number} of island {island}" for number in range(len(grid[0]))]
    return Place(
        island=island,
        islands=len(grid),
        device=device,
        devices=len(grid[0]),
        between=_wire(between, islands, store, limit_s) if len(grid) > 1 else Lone(),
        inside=_wire(inside, devices, store, limit_s) if inside else None,
        departures=Departures(store, island),
        groups=(between, inside) if inside else (between,),
    )


def _hidden_place(met: Met, mesh: DeviceMesh | None, limit_s: float) -> Place:
    """A place among processes that torch.distributed knows nothing of."""
    if mesh is not None:
        raise ConfigError("a mesh needs the processes that alone() has hidden. Use one of them, or the other.")
    if met.size == 1:
        return Place(between=Lone(), departures=Departures(None, 0))
    # Blocks are counted, so that each has names of its own in the store: all islands enter the same.
    store = PrefixStore(f"atoll/block{met.store.add(f'atoll/blocks/{met.rank}', 1)}", met.store)
    group = dist.ProcessGroupGloo(store, met.rank, met.size, timedelta(seconds=limit_s))
    names, attribution = [f"island {number}" for number in range(met.size)], FailureAttribution(store, met.rank, range(met.size))
    wire = GroupCollectives(group, timeout_s=limit_s, attribution=attribution, names=names)
    return Place(island=met.rank, islands=met.size, between=wire, departures=Departures(store, met.rank), groups=(group,))


def _check_mesh(mesh: DeviceMesh, size: int) -> None:
    if mesh.mesh_dim_names != ("island", "device"):
        raise ConfigError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}: it needs ('island', 'device'), in this order. Make it with "
            f'init_device_mesh("cuda", (islands, devices), mesh_dim_names=("island", "device")).'
        )
    if mesh.size() != size:
        raise ConfigError(f"the mesh has {mesh.size()} processes, and {size} have joined: all of them must be in it.")


def _group(groups: Sequence[list[int]], rank: int, limit_s: float) -> dist.ProcessGroup:
    """The group of these that this rank is in. All processes make all of them, in the same order."""
    made: list[Any] = [dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=limit_s)) for ranks in groups]
    mine: dist.ProcessGroup = next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
    return mine


def _wire(group: dist.ProcessGroup, names: Sequence[str], store: Store, limit_s: float) -> GroupCollectives:
    ranks = dist.get_process_group_ranks(group)
    return GroupCollectives(group, timeout_s=limit_s, attribution=FailureAttribution(store, dist.get_rank(), ranks), names=names)
