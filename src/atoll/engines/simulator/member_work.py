"""The work of simulated islands and of their devices: how long each computes, which batches it reads, whether its messages arrive.

Both engines own this object, and peers, collectives and the devices of an island use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.core.protocols import Work
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.shared_and_sharded_state import pending_tokens
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.compute_pool import ComputePool
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.engines.training_setup import DataPositions, TrainingSetup
from atoll.replica.forward_backward import ModuleTraits
from atoll.replica.local_replica import ComputeJob, LocalReplica
from atoll.runs.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SimSetup(TrainingSetup):
    """What both simulators, the synchronous and the asynchronous one, need for a run."""

    cluster: Cluster
    seed: int = 0  # of all random draws of the cluster
    batched_compute: BatchedCompute | None = None  # computes for several islands at once, if they share one device
    gives_moments: bool = False  # whether a joiner begins with its donor's inner moments


@dataclass
class SimMember:
    """An island, or a device of an island."""

    id: int  # of the island
    replica: LocalReplica
    state: Any
    clock_s: float = 0.0
    uncommitted_tokens: int = 0
    device: int | None = None

    def commit_tokens(self) -> int:
        """The tokens of an update. Those of gradients that the State keeps belong to a later one, and stay uncommitted."""
        read, self.uncommitted_tokens = self.uncommitted_tokens, pending_tokens(self.state)
        return read - self.uncommitted_tokens


class MemberWork:
    """The computing and the data of all members. If islands have `devices` with an algorithm of their own, device j of island i is
    reader i * devices + j; else island i is reader i. `in_step`: all readers ask for the same number of batches in a round."""

    def __init__(self, setup: SimSetup, report_progress: Callable[[], None], *, devices: int = 0, in_step: bool = True) -> None:
        self.cluster, self.seed, self.sink, self.gives_moments = setup.cluster, setup.seed, setup.sink, setup.gives_moments
        self.accounting = RunAccounting(setup.cluster.islands, devices)
        self.pool = ComputePool(setup.cluster, report_progress, setup.batched_compute)
        self.data = DataPositions(setup.batches)
        self.layout = setup.params.layout
        self.devices, self._two_levels = devices or 1, devices > 0
        self._make_replica, self._in_step = setup.make_replica, in_step
        self._traits: ModuleTraits | None = None
        self._readers: list[int] = []  # of the present round
        self.last_span_s: dict[tuple[int, int | None], tuple[float, float]] = {}  # of each member: its last compute span

    def begin_round(self, islands: Iterable[int]) -> None:
        """A round of these islands begins."""
        self.data.begin_round()
        self._readers = [reader for island in islands for reader in self.readers(island)]

    def readers(self, island: int) -> range:
        return range(island * self.devices, (island + 1) * self.devices)

    def new_replica(self, reader: int) -> LocalReplica:
        """Made on the pool, because making a module may draw from the generators that training replicas draw from."""
        replica = self.pool.run(lambda: self._make_replica(reader))
        replica.cancelled = self.pool.closing
        self._traits = replica.traits = self._traits or replica.traits  # the same for all replicas
        return replica

    def assign(self, island: int, device: int | None, batches: int, pieces: int, schedule: int) -> Work:
        """The next work for an island, or for one of its devices. An island of devices trains on what these ask for."""
        readers = self.readers(island)
        if device is None and self._two_levels:
            return Work(shard=readers[0], start=0, schedule=schedule, examples=self.data.examples(readers), pieces=pieces)
        if not self._in_step:
            return self.data.assign(readers[device or 0], batches, pieces, schedule)
        return self.data.assign_in_step(readers[device or 0], batches, pieces, schedule, self._readers)

    def compute(self, member: SimMember, job: ComputeJob) -> Wait:
        """A compute span of an island, or of one of its devices, which begins when it is awaited."""

        def start(task: ClockTask) -> None:
            island, device, work = member.id, member.device, job.work
            ledger = self.accounting.ledger(island, device)
            # Pieces of a batch share its jitter.
            number = ledger.spans if work.pieces == 1 else f"batch {work.shard}.{work.start // work.pieces}"
            ledger.spans += 1
            seconds = self.duration_s(island, number if device is None else f"{number}.{device}", job.batches)
            self.pool.compute(job, task, seconds, partial(self._account, member))

        return Wait(start)

    def _account(self, member: SimMember, span: ComputeSpan) -> None:
        self.sink.emit(self.accounting.computed(member.id, span, device=member.device))
        member.uncommitted_tokens += span.tokens
        self.last_span_s[member.id, member.device] = span.start_s, span.end_s

    def duration_s(self, island: int, span: int | str, batches: float) -> float:
        """Of an island's compute span with this number."""
        return batches * (self.cluster.step_time(island, self.seed) * self.cluster.jitter(island, span, batches, self.seed))

    def delivers(self, island: int, present: Collection[int]) -> bool:
        """Whether this island's messages reach the others in this round. A single island sends none, so none can be lost."""
        return len(present) == 1 or self.cluster.delivers(island, self.accounting.totals.round, self.seed)
