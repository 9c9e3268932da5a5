"""Replays an asynchronous run from its log: the same rounds, in the order in which they arrived.

The log of a run with a hub, simulated or real, has for every round the version of the weights it began with, its shard, position
and steps, and when it arrived. These determine the weights. The replay computes each round when it arrives, and takes the hub's
step; it needs no clock. On the machine that made the log, with the same number of threads, it gives the same bits.

The state of a worker's inner optimizer counts too. A joiner begins with a fresh one, and so does a worker whose update was refused.
A worker whose update was lost on the link has trained all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Dispatched, Event, IslandJoined, IslandLeft, Refused, Returned, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, AsyncAlgorithm, Batches, Task, Work
from atoll.engines.processes.replica import ProcessReplica, run_worker_round
from atoll.replica.local_replica import LocalReplica


@dataclass(frozen=True)
class ReplayOutcome:
    """The hub's weights after the last arrival, and what arrived."""

    params: Tree
    rounds: int
    local_updates: int
    workers: int


_KINDS = (Dispatched, Arrived, Refused, Returned, IslandJoined, IslandLeft, RoundFinished)


def replay(
    events: Iterable[Event],
    *,
    algorithm: AsyncAlgorithm[Any],
    params: Tree,
    batches: Batches,
    make_replica: Callable[[int], LocalReplica],
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ReplayOutcome:
    """Replays a log.

    Args:
        events: of the log, in order.
        algorithm: of the run.
        params: its first weights.
        batches: its data.
        make_replica: makes a worker's replica, with a fresh optimizer.
        progress: called with the rounds that have arrived, and those of the whole log.

    Raises:
        ConfigError: the log is not that of a run with a hub, or incomplete.
    """
    schedule = [event for event in events if isinstance(event, _KINDS)]
    replayed = _Replay(algorithm, params.copy(), batches, make_replica, schedule)
    total = sum(isinstance(event, Arrived) for event in schedule)
    for event in schedule:
        replayed.apply(event)
        if isinstance(event, Arrived):
            progress(replayed.rounds, total)
    if not replayed.rounds:
        raise ConfigError("the log has no arrival at a hub: only asynchronous runs can be replayed. Give the folder of one.")
    return ReplayOutcome(replayed.params, replayed.rounds, replayed.local_updates, len(replayed.workers))


def _workers_at_arrivals(schedule: Iterable[Event]) -> dict[int, int]:
    """The number of workers at each round's arrival, from the RoundFinished event that follows it."""
    present, arrived = {}, None
    for event in schedule:
        if isinstance(event, Arrived):
            arrived = event.round
        elif isinstance(event, RoundFinished) and arrived is not None:
            present[arrived], arrived = event.islands, None
    return present


class _Replay:
    def __init__(
        self,
        algorithm: AsyncAlgorithm[Any],
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        schedule: Sequence[Event],
    ) -> None:
        self._algorithm, self._batches, self._make_replica = algorithm, batches, make_replica
        self._present = _workers_at_arrivals(schedule)
        self._needed = Counter(event.version for event in schedule if isinstance(event, Dispatched))
        """Rounds that will still begin from each version of the weights."""
        self._state = algorithm.init(params)
        self._version = 0
        self._versions = {0: params}
        self._replicas: dict[int, LocalReplica] = {}
        self._running: dict[int, Dispatched] = {}
        self._micro_batches: int | None = None
        """Per device."""
        self.rounds = self.local_updates = 0
        self.workers: set[int] = set()

    @property
    def params(self) -> Tree:
        params: Tree = self._state.params
        return params

    def apply(self, event: Event) -> None:
        match event:
            case Dispatched():
                self._running[event.island] = event
                if event.island not in self._replicas:
                    self._replicas[event.island] = self._make_replica(event.island)
            case Arrived():
                self._arrive(event)
            case Refused() if self._is_running(event.island, event.round):
                self._release_version(self._running.pop(event.island))
                self._replicas[event.island] = self._make_replica(event.island)
            case Returned() if self._is_running(event.island, event.round):  # the link lost the update
                self._train(self._running.pop(event.island))
            case IslandLeft():
                if event.island in self._running:
                    self._release_version(self._running.pop(event.island))
                self._replicas.pop(event.island, None)
            case IslandJoined():
                self._replicas[event.island] = self._make_replica(event.island)
            case _:
                pass

    def _is_running(self, island: int, round: int) -> bool:
        return island in self._running and self._running[island].round == round

    def _arrive(self, event: Arrived) -> None:
        if not self._is_running(event.island, event.round):
            raise ConfigError(
                f"round {event.round} of worker {event.island} arrived, but the log has no dispatch of it. It was "
                f"written by another version, or is incomplete. Run it again."
            )
        task = self._running.pop(event.island)
        dispatched = self._versions[task.version]
        delta = self._train(task)
        workers = self._present.get(event.round, len(self._replicas))
        old = self._state
        self._state = self._algorithm.step(old, Arrival(delta, dispatched, self._version - task.version, workers))
        self._version += self._state is not old
        if self._version != event.version:
            raise ConfigError(
                f"after round {event.round} the hub is at version {self._version}, and the log says {event.version}: the update "
                f"was {'not ' if self._state is old else ''}applied here. The log is of another algorithm than run.json."
            )
        self._versions[self._version] = self.params
        self._drop_versions()
        self.rounds += 1
        self.local_updates += event.steps
        self.workers.add(event.island)

    def _train(self, task: Dispatched) -> Tree:
        """Computes a worker's round. Returns its update."""
        work = Work(shard=task.shard, start=task.start, schedule=task.schedule, examples=self._batches.examples(task.shard))
        local = self._replicas[task.island]
        if self._micro_batches is None:
            self._micro_batches = local.micro_batches
        # A worker with several devices has split its batches among them. One device that uses micro-batches of the same size gets
        # the same bits, unless a device had micro-batches of its own (the order of the sum differs), or modules draw random numbers
        # on GPUs (each GPU has its own generator).
        local.micro_batches = self._micro_batches * task.devices
        replica = ProcessReplica(local)
        delta = run_worker_round(self._algorithm, replica, Task(self._versions[task.version], task.steps, work))
        self._release_version(task)
        return Tree(delta.layout, delta.flat)  # a step may read it more than once

    def _release_version(self, task: Dispatched) -> None:
        self._needed[task.version] -= 1

    def _drop_versions(self) -> None:
        """Drops the weights that no further round of the log begins with."""
        for version in [v for v in self._versions if v != self._version and self._needed[v] <= 0]:
            del self._versions[version]
