"""This rank's context in a run: its place among the ranks, the process groups that it belongs to, and the store of all ranks.

torchrun starts the processes and assigns the ranks. With d devices per island, rank r is device r % d of island r // d. Each rank
belongs to three groups: its counterparts, which are the same device of every island, for exchanges between islands; the devices of
its island; and all ranks, for everything that is not training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import WAIT_LOG_S, FailureAttribution, Heartbeat, HeartbeatMonitor, store_heartbeat

_POLL_S = 0.01  # between two looks into the store


@dataclass
class RankContext:
    """This rank among all ranks."""

    rank: int
    size: int
    devices_per_island: int
    store: Store
    """It outlives the ranks."""
    all_ranks: GroupCollectives
    """For the computing thread."""
    counterparts: GroupCollectives
    """This device of every island, for the communication thread."""
    island_devices: GroupCollectives | None
    """The devices of this island, for the communication thread; None where they have no algorithm of their own."""
    heartbeat: Heartbeat
    backend: str = "gloo"
    """Of the groups that weights travel in."""
    log: Callable[[str], object] = lambda line: None
    """Takes a line about whom this rank waits for."""

    @property
    def islands(self) -> int:
        return self.size // self.devices_per_island

    @property
    def island(self) -> int:
        return self.rank // self.devices_per_island

    @property
    def device(self) -> int:
        return self.rank % self.devices_per_island

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 alone reports and evaluates."""
        return self.rank == 0

    def get(self, key: str, of: int) -> str:
        """The value that another rank sets in the store. Waits for it while that rank is alive, up to the timeout of all_ranks."""
        began_s, monitor, log_s = time.monotonic(), HeartbeatMonitor(self.store, of), WAIT_LOG_S
        try:
            while not self.store.check([key]):
                waited_s, failure = time.monotonic() - began_s, monitor.failure()
                if failure or waited_s > self.all_ranks.timeout_s:
                    raise ExchangeFailed(
                        f"rank {self.rank} waited {waited_s:.0f} s for rank {of} to set {key}: {failure or 'it takes longer'}. "
                        f"The last checkpoint is valid."
                    )
                if waited_s > log_s:
                    log_s += WAIT_LOG_S
                    limit_s = self.all_ranks.timeout_s
                    self.log(f"rank {self.rank} waits for rank {of} to set {key} ({waited_s:.0f} s of at most {limit_s:.0f} s)")
                time.sleep(_POLL_S)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise ExchangeFailed(
                f"rank {self.rank} waited for rank {of} to set {key}, and the store on rank 0's machine is gone: that machine, or "
                f"the launcher there, has ended. What was saved before this round is valid. ({error})"
            ) from error

    def differing_ranks(self, key: str, text: str) -> list[int]:
        """The ranks whose text differs from rank 0's. All ranks call this together, each with its own text."""
        self.store.set(f"{key}/{self.rank}", text)
        texts = [self.get(f"{key}/{rank}", of=rank) for rank in range(self.size)]
        return [rank for rank, other in enumerate(texts) if other != texts[0]]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_ranks.all_gather_numbers()

    def device_mesh(self, device_type: str, timeout_s: float) -> DeviceMesh:
        """The devices of this island as torch's DeviceMesh, cpu or cuda. All ranks call this together."""
        if device_type == "cuda" and self.backend != "nccl":
            raise ConfigError(
                "inside=FSDP on GPUs needs NCCL between the devices of an island. Use engine.backend=nccl, or inside=ZeRO1."
            )
        group = new_group(_island_ranks(self.size, self.devices_per_island), self.rank, self.backend, timeout_s)
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("device",))

    def close(self) -> None:
        self.heartbeat.close()
        dist.destroy_process_group()


def create_context(
    store: Store,
    rank: int,
    size: int,
    *,
    devices: int = 1,
    inside: bool = False,
    backend: str = "gloo",
    start_limit_s: float = 3600.0,
    log: Callable[[str], object] = lambda line: None,
) -> RankContext:
    """Create this rank's groups, for islands of so many devices. All ranks call this together.

    Args:
        inside: whether the devices of an island have an algorithm of their own.
        start_limit_s: how long a rank waits for others outside of rounds: for rank 0's warm start and evaluations, for data, for a
            checkpoint. Exchanges have another timeout, which the engine sets.
        log: takes a line every 15 s about whom this rank waits for outside of rounds.
    """

    def collectives(groups: list[list[int]], backend: str) -> GroupCollectives:
        ranks = next(ranks for ranks in groups if rank in ranks)
        return GroupCollectives(
            new_group(groups, rank, backend, start_limit_s),
            timeout_s=start_limit_s,
            attribution=FailureAttribution(store, rank, ranks),
            names=[f"rank {member}" for member in ranks],
        )

    counterparts = collectives([list(range(device, size, devices)) for device in range(devices)], backend)
    island_devices = collectives(_island_ranks(size, devices), backend) if inside else None
    all_ranks = collectives([list(range(size))], "gloo")
    heartbeat = store_heartbeat(store, rank)
    return RankContext(rank, size, devices, store, all_ranks, counterparts, island_devices, heartbeat, backend, log)


def _island_ranks(size: int, devices: int) -> list[list[int]]:
    return [list(range(first, first + devices)) for first in range(0, size, devices)]


def new_group(groups: Sequence[Sequence[int]], rank: int, backend: str, timeout_s: float) -> Any:
    """This rank's group. torch requires that all ranks create all groups, in the same order."""
    mine: Any = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=timeout_s))
        mine = group if rank in ranks else mine
    return mine
