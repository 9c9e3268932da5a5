"""One of two islands on a slow link: its spec, its rendezvous with the other, its workload, and what it measures alone."""

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
from atoll.testing.simulated_runs import DecoderWorkload, RepeatedBatch

VOCAB, SEQ_LEN = 257, 128
PORT = 29_500
"""Of the store; in a namespace of its own nobody else has it."""
INNER = AdamW(lr=4e-4, weight_decay=0.1)
"""What everybody trains with, in torch's fused form where torch steps."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an island is told.

    Attributes:
        rank: of the island.
        device: its end of the line.
        addresses: of all islands.
        methods: what to train with, in turn.
        rounds: of each method and turn, after one that only warms up.
        turns: how often methods take turns. Computing and exchanging alone are measured before each, and after the last.
        inner_steps: of a round of DiLoCo.
        layers, width: of the model.
        batch_size: sequences of an inner step.
        alone_steps: how many steps to measure before each turn.
        exchanges: how many exchanges to measure before each turn.
        transfer_bytes: sent each way at a time to see what the line carries; 0: not looked at.
        limit_s: how long a message may take. Those who have limits of their own keep them.
    """

    rank: int
    device: str
    addresses: list[str]
    methods: list[str]
    rounds: int
    turns: int = 1
    inner_steps: int = 10
    layers: int = 4
    width: int = 208
    batch_size: int = 8
    alone_steps: int = 5
    exchanges: int = 0
    transfer_bytes: int = 0
    limit_s: float = 120.0

    @property
    def address(self) -> str:
        return self.addresses[self.rank]


class Loop(Protocol):
    """A way to train, of which one round is taken at a time. Islands come to every round together."""

    steps_per_round: int
    exchanges_per_round: int
    """Each of which is, by the formula, a reduce-scatter and an all-gather of the weights."""

    def round(self) -> None: ...

    def close(self) -> None: ...


class Meeting:
    """The islands, joined. Everything that waits has a time limit."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.rank, self.size = spec, spec.rank, len(spec.addresses)
        self._limit = timedelta(seconds=max(spec.limit_s, 60.0))
        self.store = dist.TCPStore(spec.addresses[0], PORT, self.size, is_master=spec.rank == 0, timeout=self._limit)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size)

    def new_group(self) -> dist.ProcessGroup:
        """For one thread alone: two on one group get each other's messages."""
        group = dist.new_group(backend="gloo", timeout=self._limit)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def tell(self, name: str, value: str) -> None:
        self.store.set(name, value)

    def told(self, name: str) -> str:
        """What another tells, as soon as it does."""
        return bytes(self.store.get(name)).decode()

    def together(self) -> None:
        """Goes on when all are here."""
        dist.barrier()

    def times(self, do: Callable[[], object], count: int) -> list[float]:
        """Seconds of each of so many calls, which all islands begin together."""
        self.together()
        times_s = []
        for _ in range(count):
            start_s = time.perf_counter()
            do()
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def close(self) -> None:
        """The first island has the store, and leaves last."""
        self.together()
        dist.destroy_process_group()


def workload_of(spec: Spec) -> DecoderWorkload:
    """A small decoder on random bytes, other ones on each island."""
    model = GPT(layers=spec.layers, width=spec.width, heads=4, head_size=spec.width // 4)
    tokens = torch.randint(VOCAB, (spec.batch_size, SEQ_LEN + 1), generator=torch.Generator().manual_seed(spec.rank))
    return DecoderWorkload(model, RepeatedBatch(tokens), VOCAB, SEQ_LEN)


def step_alone(spec: Spec) -> Callable[[], object]:
    """An inner step that exchanges nothing: forward, backward and a fused AdamW."""
    replica = LocalReplica(workload_of(spec), optimizer=INNER)
    work = Work(shard=0, start=0, schedule=0, examples=1)
    return lambda: replica.train(1, work)


def unsteadiness(times_s: Sequence[Sequence[float]]) -> float:
    """By how much of it the slow ones among steps alone are longer than the shortest: what else went on on this machine.

    >>> unsteadiness([[1.0, 1.0, 1.1, 1.0, 9.0], [1.0, 1.0, 1.0, 1.2, 1.0]])
    0.2
    """
    slower = sorted(max(both) for both in zip(*times_s, strict=True))
    return round(slower[int(0.8 * (len(slower) - 1))] / slower[0] - 1, 6)


def middle(times_s: Sequence[Sequence[float]]) -> float:
    """The median over rounds of the slower island's seconds: both wait for it.

    >>> middle([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]])
    3.0
    """
    return float(statistics.median(max(both) for both in zip(*times_s, strict=True)))
