"""Simulated workers of a hub: the state of each one, the hub that it sees in a round, and its timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from atoll.algorithms.async_scheduler import Dispatch
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Task
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.simulator.compute_pool import ComputePool
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.replica.forward_backward import ModuleTraits
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster


@dataclass
class SimWorker:
    """A worker that is present."""

    id: int
    replica: LocalReplica
    accounted_s: float
    """Until when its presence is accounted."""
    dispatch: Dispatch | None = None
    """Its present round."""
    begin_s: float = 0.0
    """When it has received the weights of this round."""
    end_s: float = 0.0
    """When it will have trained."""
    arrival_s: float = math.inf
    """When its update will arrive at the hub."""
    steps_before: int = 0
    """Steps of its replica before this round."""
    replica_before: dict[str, Any] | None = None
    """The replica's state before this round; None if the run saves nothing."""
    task: ClockTask | None = None
    spans: list[ComputeSpan] = field(default_factory=list)
    """Of this round."""
    refusals: int = 0
    """In a row."""

    def resumable(self) -> dict[str, Any]:
        """The replica's state for a checkpoint: as it was before the present round, or as it is if there is none."""
        if self.dispatch is None:
            return self.replica.state()
        assert self.replica_before is not None, "an engine that saves keeps the state before each round"
        return self.replica_before


class PushReceiver(Protocol):
    """Takes the pushes of workers."""

    def start_push(self, worker: SimWorker, dispatch: Dispatch, delta: Tree, task: ClockTask) -> None: ...


class SimHub:
    """The hub, seen from one worker in one round. A protocols.Hub."""

    def __init__(self, receiver: PushReceiver, worker: SimWorker, dispatch: Dispatch, task: Task) -> None:
        self._receiver, self._worker, self._dispatch, self._task = receiver, worker, dispatch, task
        self.pushed = False

    async def pull(self) -> Task:
        task: Task = await Wait(lambda waiting: waiting.resume_at(self._worker.begin_s, lambda: self._task))
        return task

    async def push(self, delta: Tree) -> None:
        self.pushed = True
        await Wait(partial(self._receiver.start_push, self._worker, self._dispatch, delta.donate()))


class SimWorkers:
    """All present workers, with their timing and their ledgers."""

    def __init__(
        self, cluster: Cluster, seed: int, accounting: RunAccounting, pool: ComputePool, make_replica: Callable[[int], LocalReplica]
    ) -> None:
        self.present: dict[int, SimWorker] = {}
        self._cluster, self._seed, self._accounting, self._pool = cluster, seed, accounting, pool
        self._make_replica = make_replica
        self._traits: ModuleTraits | None = None

    def add(self, island: int, now_s: float) -> None:
        self.present[island] = SimWorker(island, self.new_replica(island), now_s)

    def new_replica(self, island: int) -> LocalReplica:
        """Made on the pool, because making a module may draw from the generators that training replicas draw from."""
        replica = self._pool.run(lambda: self._make_replica(island))
        replica.cancelled = self._pool.closing
        if self._traits is None:  # the traits are the same for all replicas
            self._traits = replica.traits
        replica.traits = self._traits
        return replica

    def speed(self, island: int) -> float:
        """In steps per second."""
        return 1 / self._cluster.step_time(island, self._seed)

    def duration_s(self, island: int, round: int, batches: float, span: int = 0) -> float:
        """Of the compute span with this number in a round."""
        jitter = self._cluster.jitter(island, f"{round}.{span}" if span else round, batches, self._seed)
        return batches * (self._cluster.step_time(island, self._seed) * jitter)

    def predict(self, worker: SimWorker, dispatch: Dispatch, num_bytes: int) -> None:
        """Predicts when the worker has its weights, has trained, and its update arrives."""
        link = self._cluster.line(worker.id)
        worker.begin_s = dispatch.time_s + link.latency_s + num_bytes / link.down_bytes_per_s
        worker.end_s = worker.begin_s + self.duration_s(worker.id, dispatch.round, dispatch.steps)
        worker.arrival_s = worker.end_s + link.latency_s + num_bytes / link.up_bytes_per_s

    def next_arrival_s(self, but: int | None = None) -> float:
        """The predicted time of the next arrival. It is exact for a round that pulls, trains once and pushes."""
        return min((w.arrival_s for w in self.present.values() if w.dispatch is not None and w.id != but), default=math.inf)

    def close(self, worker: SimWorker, now_s: float) -> None:
        """Accounts a worker that leaves, or that is present at the end of the run."""
        self.account_presence(worker, now_s)
        self.account_lost_computing(worker, now_s)

    def account_presence(self, worker: SimWorker, now_s: float) -> None:
        self._accounting.ledgers[worker.id].present_s += now_s - worker.accounted_s
        worker.accounted_s = now_s

    def account_lost_computing(self, worker: SimWorker, now_s: float) -> None:
        """Accounts the computing of a round whose update is lost or refused."""
        if worker.dispatch is not None:
            self._accounting.ledgers[worker.id].computed_s += max(0.0, min(now_s, worker.end_s) - worker.begin_s)
