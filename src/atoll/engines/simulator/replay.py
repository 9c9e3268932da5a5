"""An asynchronous run once more, from its log: the same rounds, in the order in which they arrived.

The log of a run with a hub, simulated or real, says of every round from which version of the weights it was begun, on which shard,
where in it, for how many steps, and when it arrived. That is all that decides the weights. Here each round is computed when it
arrives, one after the other, and the hub's step is taken; no clock is involved. On the machine that made the log, with as many
threads, this gives the same bits.

What a worker's inner optimizer has seen counts too. A worker that joins begins with a fresh one, and so does one whose update was
refused; an update that was lost on its way was trained all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Dispatched, Event, IslandJoined, IslandLeft, Refused, Returned, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, AsyncAlgorithm, Batches, Task, Work
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.worker_round import run_worker_round
from atoll.replica.local_replica import LocalReplica


@dataclass(frozen=True)
class ReplayOutcome:
    """What came of it.

    Attributes:
        params: the hub's weights after the last arrival.
        rounds: that arrived.
        local_updates: in them.
        workers: that brought some.
    """

    params: Tree
    rounds: int
    local_updates: int
    workers: int


def replay(
    events: Iterable[Event],
    *,
    algorithm: AsyncAlgorithm[Any],
    params: Tree,
    batches: Batches,
    make_replica: Callable[[int], LocalReplica],
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ReplayOutcome:
    """Carry out what a log says.

    Args:
        events: of the log, in order.
        algorithm: that was run.
        params: the weights that the run began with.
        batches: its data.
        make_replica: makes a worker's replica, with a fresh optimizer.
        progress: told how many rounds have arrived, and how many will.

    Raises:
        ConfigError: the log is not one of such a run, or not a whole one.
    """
    schedule = [event for event in events if isinstance(event, _KINDS)]
    again = _Replay(algorithm, params.copy(), batches, make_replica, _present(schedule), _needed(schedule))
    total = sum(isinstance(event, Arrived) for event in schedule)
    for event in schedule:
        again.take(event)
        if isinstance(event, Arrived):
            progress(again.rounds, total)
    if not again.rounds:
        raise ConfigError("the log has no arrival at a hub: only asynchronous runs can be replayed. Give the folder of one.")
    return ReplayOutcome(again.params, again.rounds, again.local_updates, len(again.workers))


_KINDS = (Dispatched, Arrived, Refused, Returned, IslandJoined, IslandLeft, RoundFinished)


def _present(schedule: Iterable[Event]) -> dict[int, int]:
    """How many workers there were when each round arrived: the totals that follow it say so."""
    present, arrived = {}, None
    for event in schedule:
        if isinstance(event, Arrived):
            arrived = event.round
        elif isinstance(event, RoundFinished) and arrived is not None:
            present[arrived], arrived = event.islands, None
    return present


def _needed(schedule: Iterable[Event]) -> Counter[int]:
    """How many rounds were begun from each version of the weights."""
    return Counter(event.version for event in schedule if isinstance(event, Dispatched))


class _Replay:
    def __init__(
        self,
        algorithm: AsyncAlgorithm[Any],
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        present: Mapping[int, int],
        needed: Counter[int],
    ) -> None:
        self._algorithm, self._batches, self._make_replica = algorithm, batches, make_replica
        self._present, self._needed = present, needed
        self._state = algorithm.init(params)
        self._version = 0
        self._versions = {0: params}
        self._replicas: dict[int, LocalReplica] = {}
        self._out: dict[int, Dispatched] = {}
        self._micro_batches: int | None = None
        """Into how many pieces a device cuts a batch."""
        self.rounds = self.local_updates = 0
        self.workers: set[int] = set()

    @property
    def params(self) -> Tree:
        params: Tree = self._state.params
        return params

    def take(self, event: Event) -> None:
        match event:
            case Dispatched():
                self._out[event.island] = event
                if event.island not in self._replicas:
                    self._replicas[event.island] = self._make_replica(event.island)
            case Arrived():
                self._arrive(event)
            case Refused() if self._is_out(event.island, event.round):
                self._done_with(self._out.pop(event.island))
                self._replicas[event.island] = self._make_replica(event.island)
            case Returned() if self._is_out(event.island, event.round):  # lost on its way
                self._trained(self._out.pop(event.island))
            case IslandLeft():
                if event.island in self._out:
                    self._done_with(self._out.pop(event.island))
                self._replicas.pop(event.island, None)
            case IslandJoined():
                self._replicas[event.island] = self._make_replica(event.island)
            case _:
                pass

    def _is_out(self, island: int, round: int) -> bool:
        return island in self._out and self._out[island].round == round

    def _arrive(self, event: Arrived) -> None:
        if not self._is_out(event.island, event.round):
            raise ConfigError(
                f"round {event.round} of worker {event.island} arrived, but the log does not say with what it was begun. It was "
                f"written by another version, or is not whole. Run it again."
            )
        task = self._out.pop(event.island)
        dispatched = self._versions[task.version]
        delta = self._trained(task)
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
        self._forget_versions()
        self.rounds += 1
        self.local_updates += event.steps
        self.workers.add(event.island)

    def _trained(self, task: Dispatched) -> Tree:
        """A worker's round: how far it moved."""
        work = Work(shard=task.shard, start=task.start, schedule=task.schedule, examples=self._batches.examples(task.shard))
        local = self._replicas[task.island]
        if self._micro_batches is None:
            self._micro_batches = local.micro_batches
        # Several devices of a worker have cut its batches. One that cuts them as small comes to the same bits, unless a device cut
        # its share once more (they are added up in another order), or modules draw random numbers on GPUs (each has its own).
        local.micro_batches = self._micro_batches * task.devices
        replica = ProcessReplica(local)
        delta = run_worker_round(self._algorithm, replica, Task(self._versions[task.version], task.steps, work))
        self._done_with(task)
        return Tree(delta.layout, delta.flat)  # a step may read it more than once

    def _done_with(self, task: Dispatched) -> None:
        self._needed[task.version] -= 1

    def _forget_versions(self) -> None:
        """Weights that no round of the log will begin with."""
        for version in [v for v in self._versions if v != self._version and self._needed[v] <= 0]:
            del self._versions[version]
