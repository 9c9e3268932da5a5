"""This process among all: who they are, in which groups they talk, and what they can leave for each other in a store.

torchrun starts the processes and tells each its rank. Ranks are dealt out to islands in order: with d devices per island, rank r is
device r % d of island r // d. Each process has a group with its counterparts, the same device of every island, over which weights
travel between islands; one with the devices of its own island; and one with everybody, for whatever is not training.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.processes.collectives import Wire
from atoll.engines.processes.failure_attribution import Blame
from atoll.engines.processes.heartbeat import SILENT_S, Pulse

_POLL_S = 0.01  # between two looks for a word


@dataclass
class World:
    """This process among all.

    Attributes:
        rank: among all processes.
        size: how many processes there are.
        local_rank: among those of this machine.
        devices: per island.
        store: outlives ranks.
        everybody: a wire with all, for the thread that computes.
        islands: a wire with this device's counterparts in all islands, for the line.
        inside: a wire with the devices of this island, for the line; none where they have no algorithm of their own.
        pulse: this process's signs of life.
        backend: of the groups that weights travel in.
    """

    rank: int
    size: int
    local_rank: int
    devices: int
    store: Store
    everybody: Wire
    islands: Wire
    inside: Wire | None
    pulse: Pulse
    backend: str = "gloo"

    @property
    def island(self) -> int:
        return self.rank // self.devices

    @property
    def device(self) -> int:
        return self.rank % self.devices

    @property
    def first(self) -> bool:
        """Whether this process speaks for all: it alone reports and judges."""
        return self.rank == 0

    def leave_word(self, key: str, text: str) -> None:
        """For others to read."""
        self.store.set(key, text)

    def word(self, key: str, of: int) -> str:
        """What a rank left; waits for it, for as long as that rank shows signs of life and is within the limit."""
        began_s, watch = time.monotonic(), self.pulse.watch(of)
        try:
            while not self.store.check([key]):
                waited_s, silent_s = time.monotonic() - began_s, watch.silent_s()
                words = watch.last_words()
                if words or silent_s > SILENT_S or waited_s > self.everybody.limit_s:
                    gone = (
                        f"it has given no sign of life for {silent_s:.0f} s" if silent_s > SILENT_S else "it takes longer than that"
                    )
                    gone = f"it has ended ({words})" if words else gone
                    raise ExchangeFailed(
                        f"rank {self.rank} waited {waited_s:.0f} s for a word of rank {of} ({key}): {gone}. The last "
                        f"checkpoint stands."
                    )
                time.sleep(_POLL_S)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise ExchangeFailed(
                f"rank {self.rank} waited for a word of rank {of} ({key}), and the store on rank 0's machine is gone: "
                f"that machine, or what was started there, has ended. What was saved before this round stands. ({error})"
            ) from error

    def forget(self, key: str) -> None:
        """A word that all have read."""
        self.store.delete_key(key)

    def agreed(self, key: str, text: str, what: str) -> None:
        """Check that all processes say the same here."""
        self.leave_word(f"{key}/{self.rank}", text)
        said = [self.word(f"{key}/{rank}", of=rank) for rank in range(self.size)]
        others = [rank for rank, word in enumerate(said) if word != said[0]]
        if others:
            raise ConfigError(f"ranks {others} have {what} that differ from rank 0's. All processes need the same: bring it there.")

    def meet(self) -> None:
        """Wait for everybody."""
        self.everybody.tell()

    def mesh(self, kind: str, limit_s: float) -> DeviceMesh:
        """The devices of this island as torch's DeviceMesh, cpu or cuda. All processes call this together. `limit_s` bounds an
        exchange there."""
        if kind == "cuda" and self.backend != "nccl":
            raise ConfigError(
                "inside=FSDP on GPUs needs NCCL between the devices of an island. Use --backend nccl, or inside=ZeRO1."
            )
        mine: Any = None
        for first in range(0, self.size, self.devices):
            ranks = list(range(first, first + self.devices))
            group = dist.new_group(ranks, backend=self.backend, timeout=timedelta(seconds=limit_s))
            mine = group if self.rank in ranks else mine
        return DeviceMesh.from_group(mine, kind, mesh_dim_names=("device",))

    def close(self) -> None:
        self.pulse.close()
        dist.destroy_process_group()


def is_started() -> bool:
    """Whether torchrun, or something like it, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_given() -> int:
    """Which of them this is."""
    return int(os.environ["RANK"])


def size_given() -> int:
    """How many processes were started."""
    return int(os.environ["WORLD_SIZE"])


def meet(limit_s: float) -> tuple[Store, int, int]:
    """Find the other processes: a store that all of them see, this one's rank, and how many they are. Others are waited for so
    long, here and wherever one process leaves word for another."""
    wait = timedelta(seconds=limit_s)
    store, rank, size = next(rendezvous("env://", timeout=wait))
    store.set_timeout(wait)
    dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=rank, world_size=size, timeout=wait)
    return PrefixStore("atoll", store), rank, size


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    devices: int = 1,
    inside: bool = False,
    backend: str = "gloo",
    start_limit_s: float = 3600.0,
) -> World:
    """Join the other processes. All of them call this.

    Args:
        store: that all of them see.
        rank: of this one.
        size: how many they are.
        devices: per island.
        inside: whether these have an algorithm of their own.
        backend: of the groups that weights travel in.
        start_limit_s: how long others are waited for outside of rounds: the first rank's warm start and evaluations, everybody's
            data, a checkpoint. The limit of exchanges is another, which whoever exchanges sets.
    """
    if size % devices:
        raise ConfigError(f"{size} processes cannot be islands of {devices} devices each. Start a multiple of {devices}.")
    counterparts = [list(range(device, size, devices)) for device in range(devices)]
    neighbours = [list(range(first, first + devices)) for first in range(0, size, devices)]
    islands = _wire(counterparts, rank, backend, start_limit_s, store)
    within = _wire(neighbours, rank, backend, start_limit_s, store) if inside else None
    everybody = _wire([list(range(size))], rank, "gloo", start_limit_s, store)
    assert islands is not None
    assert everybody is not None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return World(rank, size, local_rank, devices, store, everybody, islands, within, Pulse(store, rank), backend)


def _wire(groups: list[list[int]], rank: int, backend: str, limit_s: float, store: Store) -> Wire | None:
    """The wire of that group which this rank is in. Everybody makes all of them, in the same order."""
    mine: Wire | None = None
    for ranks in groups:
        group: Any = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=limit_s))
        if rank in ranks:
            names = [f"rank {member}" for member in ranks]
            mine = Wire(group, limit_s=limit_s, blame=Blame(store, rank, ranks), names=names)
    return mine
