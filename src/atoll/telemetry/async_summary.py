"""What an asynchronous run's events say about its hub and its workers: how late updates came, and where the workers' time went.

A worker's time at hand is split into four parts that add up to it: computing; talking (the weights on their way to it, its update
on its way to the hub); waiting to be sent off, which is what a grace window costs; and what it spent on rounds that brought the hub
nothing, because they were still under way at the end or were lost. The last part is no idleness: the worker computed, most of it,
but how long is not known before it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.events import (
    Arrived,
    Computed,
    Dispatched,
    Event,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    RunFinished,
    WindowClosed,
)
from atoll.telemetry.event_log import read_events


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How often whole numbers came up: `counts` by number, their mean and the largest."""

    mean: float
    max: int
    counts: Mapping[int, int]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Spread:
        """
        >>> Spread.of({3: 1, 0: 2})
        Spread(mean=1.0, max=3, counts={0: 2, 3: 1})
        """
        total = sum(counts.values())
        mean = sum(number * times for number, times in counts.items()) / total if total else 0.0
        return cls(mean=mean, max=max(counts, default=0), counts=dict(sorted(counts.items())))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; counts by the number as text, as JSON has it."""
        return {"mean": self.mean, "max": self.max, "counts": {str(number): times for number, times in self.counts.items()}}


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """One worker's share of a run. `present_s` is the sum of the other four times.

    Attributes:
        rounds: that arrived at the hub; `steps` are those taken in them.
        computed_s: as reported, which is what arrived.
        waited_s: to be sent off, in grace windows above all.
        talked_s: pulling weights and pushing updates.
        unfinished_s: on rounds that brought nothing: still under way at the end, refused, or lost when it left.
    """

    island: int
    rounds: int
    steps: int
    present_s: float
    computed_s: float
    waited_s: float
    talked_s: float
    unfinished_s: float

    @property
    def idle_s(self) -> float:
        """Time in which it certainly did not compute: waiting and talking."""
        return self.waited_s + self.talked_s

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "idle_s": self.idle_s}


@dataclass(frozen=True, kw_only=True)
class AsynchronySummary:
    """An asynchronous run in figures.

    Attributes:
        arrivals: updates that reached the hub and were not refused: `applied` and `left_out` (for being too late) together.
        refused: updates that the hub did not take at all.
        returned: rounds that ended without an update, so that their shard's count was put back.
        windows: grace windows with an arrival in them; the last may be open still.
        staleness: of every arrival.
        workers: in order of their numbers.
        steps_per_shard: inner steps that arrived, by shard.
    """

    arrivals: int
    applied: int
    left_out: int
    refused: int
    returned: int
    windows: int
    staleness: Spread
    arrivals_per_window: Spread
    workers: tuple[WorkerTimes, ...]
    steps_per_shard: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the attributes' names, for JSON."""
        return {
            "arrivals": self.arrivals,
            "applied": self.applied,
            "left_out": self.left_out,
            "refused": self.refused,
            "returned": self.returned,
            "windows": self.windows,
            "staleness": self.staleness.to_dict(),
            "arrivals_per_window": self.arrivals_per_window.to_dict(),
            "workers": [worker.to_dict() for worker in self.workers],
            "steps_per_shard": {str(shard): steps for shard, steps in self.steps_per_shard.items()},
        }


class Asynchrony:
    """Takes a run's events one by one, in order, and can be asked at any time.

    >>> asynchrony = Asynchrony()
    >>> asynchrony.summary() is None        # as long as no worker was sent off: a synchronous run has no hub
    True
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._workers: dict[int, _Worker] = {}
        self._staleness: Counter[int] = Counter()
        self._windows: Counter[int] = Counter()
        self._steps_per_shard: Counter[int] = Counter()
        self._left_out = self._refused = self._returned = 0
        self._asynchronous = False

    def take(self, event: Event) -> None:
        match event:
            case Dispatched():
                self._asynchronous = True
                self._worker(event.island).sent_off(event)
            case Computed():
                self._worker(event.island).computed(event)
            case Arrived():
                self._arrived(event)
            case Refused():
                self._refused += 1
                # An update from a stranger, or one that comes a second time, ends nobody's round.
                if event.island in self._workers:
                    self._workers[event.island].lost(event.round, event.time_s)
            case Returned():
                self._returned += 1
                self._worker(event.island).lost(event.round, event.time_s)
            case IslandJoined():
                self._worker(event.island).joined(event.time_s)
            case IslandLeft():
                self._worker(event.island).left(event.time_s)
            case _:
                pass
        if isinstance(event, Dispatched | Arrived | WindowClosed | Refused | Returned | IslandJoined | IslandLeft | RunFinished):
            self._now_s = max(self._now_s, event.time_s)

    def summary(self) -> AsynchronySummary | None:
        """The figures up to the latest event; None for a run that is not asynchronous."""
        if not self._asynchronous:
            return None
        arrivals = self._staleness.total()
        return AsynchronySummary(
            arrivals=arrivals,
            applied=arrivals - self._left_out,
            left_out=self._left_out,
            refused=self._refused,
            returned=self._returned,
            windows=len(self._windows),
            staleness=Spread.of(self._staleness),
            arrivals_per_window=Spread.of(Counter(self._windows.values())),
            workers=tuple(worker.times(island, self._now_s) for island, worker in sorted(self._workers.items())),
            steps_per_shard=dict(sorted(self._steps_per_shard.items())),
        )

    def _arrived(self, event: Arrived) -> None:
        self._staleness[event.staleness] += 1
        self._windows[event.window] += 1
        self._steps_per_shard[event.shard] += event.steps
        self._left_out += not event.applied
        self._worker(event.island).arrived(event)

    def _worker(self, island: int) -> _Worker:
        return self._workers.setdefault(island, _Worker())


def read_asynchrony(folder: str | Path) -> AsynchronySummary | None:
    """The figures of the asynchronous run in a folder, as far as it is; None for a synchronous one."""
    if not is_asynchronous(folder):
        return None
    asynchrony = Asynchrony()
    for event in read_events(Path(folder) / "events.jsonl"):
        asynchrony.take(event)
    return asynchrony.summary()


def is_asynchronous(folder: str | Path) -> bool:
    """Whether the run in a folder has a hub. The log is skimmed, not parsed: it may have a million lines of no interest here."""
    return next(read_events(Path(folder) / "events.jsonl", kinds=(Dispatched,)), None) is not None


@dataclass
class _Worker:
    """One worker's account. It is away on `task`, or waits since `waiting_since_s`, or is not there."""

    rounds: int = 0
    steps: int = 0
    computed_s: float = 0.0
    waited_s: float = 0.0
    talked_s: float = 0.0
    unfinished_s: float = 0.0
    past_s: float = 0.0
    here_since_s: float | None = None
    waiting_since_s: float | None = None
    task: Dispatched | None = None
    task_computed_s: float = 0.0

    def joined(self, now_s: float) -> None:
        self.here_since_s = self.waiting_since_s = now_s

    def sent_off(self, task: Dispatched) -> None:
        if self.here_since_s is None:  # there from the start: nobody announced it
            self.joined(task.time_s)
        self._stop_waiting(task.time_s)
        self.task, self.task_computed_s = task, 0.0

    def computed(self, event: Computed) -> None:
        self.computed_s += event.end_s - event.start_s
        self.task_computed_s += event.end_s - event.start_s

    def arrived(self, event: Arrived) -> None:
        self.rounds += 1
        self.steps += event.steps
        self.talked_s += event.time_s - event.pushed_s
        if self.task is not None:
            self.talked_s += self.task.begin_s - self.task.time_s
        self.task, self.waiting_since_s = None, event.time_s

    def lost(self, number: int, now_s: float) -> None:
        if self.task is not None and self.task.round == number:
            self.unfinished_s += now_s - self.task.time_s - self.task_computed_s
            self.task, self.waiting_since_s = None, now_s

    def left(self, now_s: float) -> None:
        if self.task is not None:
            self.lost(self.task.round, now_s)
        self._stop_waiting(now_s)
        self.past_s += now_s - (self.here_since_s if self.here_since_s is not None else now_s)
        self.here_since_s = None

    def times(self, island: int, now_s: float) -> WorkerTimes:
        here_s = now_s - self.here_since_s if self.here_since_s is not None else 0.0
        waiting_s = now_s - self.waiting_since_s if self.waiting_since_s is not None else 0.0
        away_s = now_s - self.task.time_s - self.task_computed_s if self.task is not None else 0.0
        return WorkerTimes(
            island=island,
            rounds=self.rounds,
            steps=self.steps,
            present_s=self.past_s + here_s,
            computed_s=self.computed_s,
            waited_s=self.waited_s + waiting_s,
            talked_s=self.talked_s,
            unfinished_s=self.unfinished_s + away_s,
        )

    def _stop_waiting(self, now_s: float) -> None:
        if self.waiting_since_s is not None:
            self.waited_s += now_s - self.waiting_since_s
            self.waiting_since_s = None
