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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.config.json_records import type_name
from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Dispatched, Event, IslandJoined, IslandLeft, Progress, Refused, Returned, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, AsyncAlgorithm, Batches, Sink, Task, Work, Workload
from atoll.core.serialization import load_tree
from atoll.engines.processes.replica import ProcessReplica, run_worker_round
from atoll.engines.training_setup import loss_of, replica_of
from atoll.engines.warm_start import Cache, get_warm_start, load_data
from atoll.replica.local_replica import LocalReplica, torch_threads
from atoll.runs.folder import RunFolder
from atoll.runs.run import device_of
from atoll.runs.workloads import sharded_workload, single_shard_workload
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sinks import Fanout


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


TOLERANCE = 1e-5
"""Largest difference over largest weight. On the machine of the run, with the same number of threads, the difference is 0."""


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a replay with the run.

    Attributes:
        folder: of the run.
        rounds: that arrived.
        local_updates: in these rounds.
        workers: number of workers with an arrival.
        largest: difference between a weight of the replay and of the run.
        relative: `largest` over the largest weight of the run.
        tolerance: upper limit of `relative`.
        same_bits: whether all weights are equal bit for bit.
    """

    folder: str
    rounds: int
    local_updates: int
    workers: int
    largest: float
    relative: float
    tolerance: float
    same_bits: bool

    @property
    def agrees(self) -> bool:
        return self.relative <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}

    def __str__(self) -> str:
        found = "the same bits" if self.same_bits else f"{self.relative:.2g} of the largest weight"
        return (
            f"replayed {self.rounds} rounds ({self.local_updates} local updates) of {self.workers} workers in the log's order: "
            f"largest difference {self.largest:.3g} ({found}); tolerance {self.tolerance:g}: "
            f"{'agrees' if self.agrees else 'DOES NOT AGREE'}"
        )


def replay_run(folder: str | Path, *, workload: Workload | None = None, sink: Sink | None = None) -> ReplayResult:
    """Replays a finished asynchronous run from its log, and compares the weights.

    Args:
        folder: of the run.
        workload: as it was given to the run, if one was.
        sink: takes progress.
    """
    opened = RunFolder.open(Path(folder).expanduser())
    opened.check_workload(None if workload is None else type_name(type(workload)))
    run, out = opened.run.resolved, sink or Fanout([])
    if not isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(f"{folder} ran {type(run.algorithm).__name__}: only runs with a hub have a schedule to replay.")
    if not opened.finished:
        raise ConfigError(f"{folder} is not finished: it has no final weights. Finish it: atoll run --resume {folder}")
    cache = Cache()
    plain = workload or single_shard_workload(run, load_data(run, cache))
    warm = get_warm_start(run, plain, file=opened.warm_start, cache=None, sink=out)
    mine = workload or sharded_workload(run, load_data(run, cache), warm.params)
    loss = loss_of(run, mine)
    with torch_threads(run.cluster.threads_per_island):
        found = replay(
            read_events(opened.events),
            algorithm=run.algorithm,
            params=warm.params,
            batches=mine.batches,
            make_replica=lambda number: replica_of(run, mine, loss, number),
            progress=lambda done, total: out.emit(Progress(phase="replay", done=done, total=total)),
        )
    final = load_tree(opened.final).to(device_of(run))
    largest, greatest = (found.params - final).flat.abs().max().item(), final.flat.abs().max().item()
    return ReplayResult(
        folder=str(opened.path),
        rounds=found.rounds,
        local_updates=found.local_updates,
        workers=found.workers,
        largest=largest,
        relative=largest / greatest if greatest else largest,
        tolerance=TOLERANCE,
        same_bits=found.params.same_bits(final),
    )
