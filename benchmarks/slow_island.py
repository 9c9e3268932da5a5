"""One of two islands on a slow link: its spec, its process group, its workload, and its steps alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from atoll.core.protocols import Work
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import LocalReplica
from decoder_workload import DecoderWorkload, RepeatedBatch

VOCAB, SEQ_LEN = 257, 128
PORT = 29_500
"""Of the store. No other process in the namespace uses it."""
INNER = AdamW(lr=4e-4, weight_decay=0.1)
"""The optimizer of all methods, in torch's fused form where torch steps."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an island measures."""

    rank: int
    device: str  # its end of the link
    addresses: list[str]  # of all islands
    methods: list[str]  # measured in turn
    rounds: int  # per method and turn, after a warm-up round
    turns: int = 1  # steps alone and exchanges alone are measured before each turn, and after the last
    inner_steps: int = 10  # per round of DiLoCo
    layers: int = 4
    width: int = 208
    batch_size: int = 8  # sequences per inner step
    alone_steps: int = 5  # per turn
    exchanges: int = 0  # per turn
    transfer_bytes: int = 0  # sent both ways at the same time to measure throughput; 0: not measured
    limit_s: float = 120.0  # per message; torchft has its own limits

    @property
    def address(self) -> str:
        return self.addresses[self.rank]


class Loop(Protocol):
    """A training method, one round at a time. Islands start every round together."""

    steps_per_round: int
    exchanges_per_round: int
    """Reduce-scatters with all-gathers of the weights, by the formula."""

    def round(self) -> None: ...

    def close(self) -> None: ...


class IslandGroup:
    """The process group of the islands. All waits have a time limit."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.rank, self.size = spec, spec.rank, len(spec.addresses)
        self._limit = timedelta(seconds=max(spec.limit_s, 60.0))
        self.store = dist.TCPStore(spec.addresses[0], PORT, self.size, is_master=spec.rank == 0, timeout=self._limit)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size)

    def new_group(self) -> dist.ProcessGroup:
        """A group for one thread: two threads on one group would get each other's messages."""
        group = dist.new_group(backend="gloo", timeout=self._limit)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def times(self, do: Callable[[], object], count: int) -> list[float]:
        """Seconds of each call. Islands start the first together."""
        dist.barrier()
        times_s = []
        for _ in range(count):
            start_s = time.perf_counter()
            do()
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def close(self) -> None:
        """The first island hosts the store, and leaves last."""
        dist.barrier()
        dist.destroy_process_group()


def workload_of(spec: Spec) -> DecoderWorkload:
    """A small decoder on random bytes, different on each island."""
    model = GPT(layers=spec.layers, width=spec.width, heads=4, head_size=spec.width // 4)
    tokens = torch.randint(VOCAB, (spec.batch_size, SEQ_LEN + 1), generator=torch.Generator().manual_seed(spec.rank))
    return DecoderWorkload(model, RepeatedBatch(tokens), VOCAB, SEQ_LEN)


def step_alone(spec: Spec) -> Callable[[], object]:
    """An inner step without an exchange: forward, backward and a fused AdamW."""
    replica = LocalReplica(workload_of(spec), optimizer=INNER)
    work = Work(shard=0, start=0, schedule=0, examples=1)
    return lambda: replica.train(1, work)


def unsteadiness(times_s: Sequence[Sequence[float]]) -> float:
    """How much longer than the shortest step the 80th percentile is, relatively: a measure of other load on the machine.

    >>> unsteadiness([[1.0, 1.0, 1.1, 1.0, 9.0], [1.0, 1.0, 1.0, 1.2, 1.0]])
    0.2
    """
    slower = sorted(max(both) for both in zip(*times_s, strict=True))
    return round(slower[int(0.8 * (len(slower) - 1))] / slower[0] - 1, 6)


def slower_median(times_s: Sequence[Sequence[float]]) -> float:
    """The median of the slower island's seconds, for which the other waits.

    >>> slower_median([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]])
    3.0
    """
    return float(statistics.median(max(both) for both in zip(*times_s, strict=True)))
