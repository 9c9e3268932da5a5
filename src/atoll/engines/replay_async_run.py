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
from atoll.core.events import (
    Arrived,
    Dispatched,
    Event,
    IslandJoined,
    IslandLeft,
    LogDamaged,
    Progress,
    Refused,
    Returned,
    RoundFinished,
)
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, AsyncAlgorithm, Sink, Task, Work, Workload
from atoll.core.serialization import load_tree
from atoll.core.verified_files import expanded
from atoll.engines.hub_encoding import decode_weights, encode_update, encode_weights
from atoll.engines.timed_replica import ProcessReplica, run_worker_round
from atoll.engines.training_setup import loss_of, matrix_products, replica_of
from atoll.engines.warm_start_training import RunPreparation
from atoll.replica.local_replica import LocalReplica, torch_threads
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run, device_of
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sinks import Fanout

TOLERANCE = 1e-5
"""Largest difference over largest weight. On the machine of the run, with the same number of threads, the difference is 0."""

_KINDS = (Dispatched, Arrived, Refused, Returned, IslandJoined, IslandLeft, RoundFinished)


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
    def __init__(self, run: Run, workload: Workload, params: Tree, schedule: Sequence[Event]) -> None:
        assert isinstance(run.algorithm, AsyncAlgorithm)
        self._algorithm, self._batches, self._micro_batches = run.algorithm, workload.batches, run.train.micro_batches
        loss = loss_of(run, workload)
        self._make_replica: Callable[[int], LocalReplica] = lambda island: replica_of(run, workload, loss, island)
        self._schedule, self._present = schedule, _workers_at_arrivals(schedule)
        self._needed = Counter(event.version for event in schedule if isinstance(event, Dispatched))
        """Rounds that will still begin from each version of the weights."""
        self._state = run.algorithm.init(params)
        self._version = 0
        self._versions = {0: params}
        self._replicas: dict[int, LocalReplica] = {}
        self._plan = run.algorithm.plan
        self._held: dict[int, Tree] = {}
        """The weights that each worker was last dispatched with."""
        self._unsent: dict[int, Tree | None] = {}
        """What the codec has left out of each worker's updates that arrived."""
        self._running: dict[int, Dispatched] = {}
        self.rounds = self.local_updates = 0
        self.workers: set[int] = set()

    @property
    def params(self) -> Tree:
        params: Tree = self._state.params
        return params

    def run(self, sink: Sink) -> None:
        total = sum(isinstance(event, Arrived) for event in self._schedule)
        for event in self._schedule:
            self._apply(event)
            if isinstance(event, Arrived):
                sink.emit(Progress(phase="replay", done=self.rounds, total=total))
        if not self.rounds:
            raise ConfigError("the log has no arrival at a hub: only asynchronous runs can be replayed. Give the folder of one.")

    def _apply(self, event: Event) -> None:
        match event:
            case Dispatched():
                self._running[event.island] = event
                self._held[event.island] = self._weights_of(event)
                if event.island not in self._replicas:
                    self._new_replica(event.island)
            case Arrived():
                self._arrive(event)
            case Refused() if self._is_running(event.island, event.round):
                self._release_version(self._running.pop(event.island))
                self._new_replica(event.island)
            case Returned() if self._is_running(event.island, event.round):  # the link lost the update
                unsent = self._unsent[event.island]
                self._train(self._running.pop(event.island))
                self._unsent[event.island] = unsent
            case IslandLeft():
                if event.island in self._running:
                    self._release_version(self._running.pop(event.island))
                self._replicas.pop(event.island, None)
                self._held.pop(event.island, None)
            case IslandJoined():
                self._new_replica(event.island)
            case _:
                pass

    def _new_replica(self, island: int) -> None:
        self._replicas[island], self._unsent[island] = self._make_replica(island), None

    def _weights_of(self, event: Dispatched) -> Tree:
        """The weights that a worker is dispatched with, as it decodes them: see `engines.hub_encoding`."""
        weights, held, codec = self._versions[event.version], self._held.get(event.island), self._plan.codec
        if codec is None or held is None:
            return weights
        return decode_weights(codec, held, encode_weights(codec, weights, held, event.round))

    def _is_running(self, island: int, round: int) -> bool:
        return island in self._running and self._running[island].round == round

    def _arrive(self, event: Arrived) -> None:
        if not self._is_running(event.island, event.round):
            raise ConfigError(
                f"round {event.round} of worker {event.island} arrived, but the log has no dispatch of it. It was "
                f"written by another version, or is incomplete. Run it again."
            )
        task = self._running.pop(event.island)
        delta = self._train(task)
        workers = self._present.get(event.round, len(self._replicas))
        old = self._state
        self._state = self._algorithm.step(old, Arrival(delta, self._held[event.island], self._version - task.version, workers))
        self._version += self._state is not old
        if self._version != event.version:
            raise ConfigError(
                f"after round {event.round} the hub is at version {self._version}, and the log says {event.version}: the update "
                f"was {'not ' if self._state is old else ''}applied here. The log is of another algorithm than run.json."
            )
        self._versions[self._version] = self.params
        for version in [v for v in self._versions if v != self._version and self._needed[v] <= 0]:
            del self._versions[version]  # no further round of the log begins with these weights
        self.rounds += 1
        self.local_updates += event.steps
        self.workers.add(event.island)

    def _train(self, task: Dispatched) -> Tree:
        """Computes a worker's round. Returns its update."""
        work = Work(shard=task.shard, start=task.start, schedule=task.schedule, examples=self._batches.examples(task.shard))
        local = self._replicas[task.island]
        # A worker with several devices has split its batches among them. One device that uses micro-batches of the same size gets
        # the same bits, unless a device had micro-batches of its own (the order of the sum differs), or modules draw random numbers
        # on GPUs (each GPU has its own generator).
        local.micro_batches = self._micro_batches * task.devices
        delta = run_worker_round(self._algorithm, ProcessReplica(local), Task(self._held[task.island], task.steps, work))
        self._release_version(task)
        sent = encode_update(self._plan, delta, self._unsent[task.island], task.round)
        self._unsent[task.island] = sent.unsent
        return Tree(sent.delta.layout, sent.delta.flat)  # a step may read it more than once

    def _release_version(self, task: Dispatched) -> None:
        self._needed[task.version] -= 1


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a replay with the run."""

    folder: str
    rounds: int
    local_updates: int
    workers: int  # with an arrival
    largest: float  # difference between a weight of the replay and of the run
    relative: float  # `largest` over the largest weight of the run
    tolerance: float  # upper limit of `relative`
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
    """Replays a finished asynchronous run from its log, and compares the weights. `workload` is the one that the user gave to the
    run, if any; `sink` gets the progress."""
    opened = RunFolder.open(expanded(folder))
    opened.check_workload(None if workload is None else type_name(type(workload)))
    run, out = opened.run.resolved, sink or Fanout([])
    if not isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(f"{folder} ran {type(run.algorithm).__name__}: only runs with a hub have a schedule to replay.")
    if not opened.finished:
        raise ConfigError(f"{folder} is not finished: it has no final weights. Finish it: atoll run --resume {folder}")
    preparation = RunPreparation(run, workload)
    warm = preparation.warm_start(opened.warm_start, out)
    events = [*read_events(opened.events)]
    damage = next((event for event in events if isinstance(event, LogDamaged)), None)
    if damage is not None:
        raise ConfigError(f"{opened.events} is damaged: {damage.what}. A replay needs every line. Restore the file from a copy.")
    schedule = [event for event in events if isinstance(event, _KINDS)]
    replay = _Replay(run, preparation.sharded(warm.params), warm.params.copy(), schedule)
    with torch_threads(run.cluster.threads_per_island), matrix_products(run):
        replay.run(out)
    final = load_tree(opened.final).to(device_of(run))
    largest, greatest = (replay.params - final).flat.abs().max().item(), final.flat.abs().max().item()
    return ReplayResult(
        folder=str(opened.path),
        rounds=replay.rounds,
        local_updates=replay.local_updates,
        workers=len(replay.workers),
        largest=largest,
        relative=largest / greatest if greatest else largest,
        tolerance=TOLERANCE,
        same_bits=replay.params.same_bits(final),
    )
