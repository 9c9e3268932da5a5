"""Simulated workers: each one, what it is handed in a round (its hub), and all of them together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Task as Sent
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.simulator.compute_pool import ComputePool
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.replica.forward_backward import ModuleTraits
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster


@dataclass
class SimWorker:
    """A worker that is there."""

    id: int
    replica: LocalReplica
    since_s: float
    """Up to when its presence is in the accounting."""
    dispatch: Dispatch | None = None
    """With what it is out."""
    begin_s: float = 0.0
    """When it has what it was sent off with."""
    end_s: float = 0.0
    """When it will have trained."""
    arrival_s: float = math.inf
    """When what it brings will be there."""
    steps_before: int = 0
    """Those that its replica had taken by then."""
    before: dict[str, Any] | None = None
    """Its inner optimizer and randomness when it was sent off; none where nothing is saved."""
    task: ClockTask | None = None
    stretches: list[ComputeSpan] = field(default_factory=list)
    """Of this round."""
    refusals: int = 0
    """In a row."""

    def resumable(self) -> dict[str, Any]:
        """What a checkpoint holds of its replica: as it was when it was sent off; of one that waits, as it is."""
        if self.dispatch is None:
            return self.replica.state()
        assert self.before is not None, "an engine that saves notes what a round begins with"
        return self.before


class TakesPushes(Protocol):
    """What an engine does for a worker's hub."""

    def start_pushing(self, worker: SimWorker, dispatch: Dispatch, delta: Tree, task: ClockTask) -> None: ...


class SimHub:
    """The hub, seen from one worker in one round."""

    def __init__(self, engine: TakesPushes, worker: SimWorker, dispatch: Dispatch, sent: Sent) -> None:
        self._engine, self._worker, self._dispatch, self._sent = engine, worker, dispatch, sent
        self.pushed = False

    async def pull(self) -> Sent:
        sent: Sent = await Wait(lambda task: task.resume_at(self._worker.begin_s, lambda: self._sent))
        return sent

    async def push(self, delta: Tree) -> None:
        self.pushed = True
        await Wait(partial(self._engine.start_pushing, self._worker, self._dispatch, delta.donate()))


class SimWorkers:
    """All workers that are there: when each will come, and how long it was here and computed.

    Args:
        cluster: how fast they are, and over what lines they talk.
        seed: of what the cluster draws.
        accounting: take presence and computing.
        computing: where they compute.
        make_replica: makes a worker's replica, with a fresh optimizer.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        accounting: RunAccounting,
        computing: ComputePool,
        make_replica: Callable[[int], LocalReplica],
    ) -> None:
        self.workers: dict[int, SimWorker] = {}
        self._cluster, self._seed, self._accounting, self._computing = cluster, seed, accounting, computing
        self._make_replica = make_replica
        self._habits: ModuleTraits | None = None

    def admit(self, island: int, now_s: float) -> None:
        self.workers[island] = SimWorker(island, self.replica(island), now_s)

    def replica(self, island: int) -> LocalReplica:
        """A new one. It is made aside from others that train: making a module may draw from the generators that they draw from."""
        replica = self._computing.aside(lambda: self._make_replica(island))
        replica.cancelled = self._computing.closing
        if self._habits is None:  # all are of one kind: find out once
            self._habits = replica.traits
        replica.traits = self._habits
        return replica

    # ------------------------------------------------------------------------------------------------- what can be foreseen

    def speed(self, island: int) -> float:
        """In steps per second."""
        return 1 / self._cluster.step_time(island, self._seed)

    def duration_s(self, island: int, round: int, batches: float, stretch: int = 0) -> float:
        """Of a round's so-manieth stretch of computing."""
        jitter = self._cluster.jitter(island, f"{round}.{stretch}" if stretch else round, batches, self._seed)
        return batches * (self._cluster.step_time(island, self._seed) * jitter)

    def foresee(self, worker: SimWorker, dispatch: Dispatch, num_bytes: int) -> None:
        """When the worker will have its weights, have trained, and be there."""
        line = self._cluster.line(worker.id)
        worker.begin_s = dispatch.time_s + line.latency_s + num_bytes / line.down_bytes_per_s
        worker.end_s = worker.begin_s + self.duration_s(worker.id, dispatch.round, dispatch.steps)
        worker.arrival_s = worker.end_s + line.latency_s + num_bytes / line.up_bytes_per_s

    def next_arrival_s(self, but: int | None = None) -> float:
        """When the next of those who are out will be there. Exact for a round that pulls, trains once and pushes."""
        return min((w.arrival_s for w in self.workers.values() if w.dispatch is not None and w.id != but), default=math.inf)

    # ------------------------------------------------------------------------------------------------------------ the accounting

    def settle(self, worker: SimWorker, now_s: float) -> None:
        """The worker goes, or the run is over: how long it was there, and how long it computed in a round that brought nothing."""
        self.note_presence(worker, now_s)
        self.count_computing(worker, now_s)

    def note_presence(self, worker: SimWorker, now_s: float) -> None:
        self._accounting.ledgers[worker.id].present_s += now_s - worker.since_s
        worker.since_s = now_s

    def count_computing(self, worker: SimWorker, now_s: float) -> None:
        if worker.dispatch is not None:
            self._accounting.ledgers[worker.id].computed_s += max(0.0, min(now_s, worker.end_s) - worker.begin_s)
