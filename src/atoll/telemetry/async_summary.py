"""Figures of an asynchronous run: how stale the updates were, and how each worker spent its time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from atoll.core import events as ev
from atoll.telemetry.event_log import read_events
from atoll.telemetry.units import JsonRecord

_HUB_EVENTS = (
    ev.Dispatched | ev.Arrived | ev.WindowClosed | ev.Refused | ev.Returned | ev.IslandJoined | ev.IslandLeft | ev.RunFinished
)


@dataclass(frozen=True, kw_only=True)
class CountDistribution(JsonRecord):
    """How often each whole number occurred."""

    mean: float
    max: int
    counts: Mapping[int, int]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> CountDistribution:
        """
        >>> CountDistribution.of({3: 1, 0: 2})
        CountDistribution(mean=1.0, max=3, counts={0: 2, 3: 1})
        """
        total = sum(counts.values())
        mean = sum(number * times for number, times in counts.items()) / total if total else 0.0
        return cls(mean=mean, max=max(counts, default=0), counts=dict(sorted(counts.items())))


@dataclass(frozen=True, kw_only=True)
class WorkerTimes(JsonRecord):
    """One worker's rounds and times. `present_s` is the sum of the other four times."""

    derived = ("idle_s",)
    time_parts: ClassVar[Mapping[str, str]] = {
        "computing": "computed_s",
        "waiting": "waited_s",
        "communicating": "talked_s",
        "no result": "unfinished_s",
    }
    island: int
    rounds: int  # that arrived at the hub
    steps: int
    present_s: float
    computed_s: float
    waited_s: float  # for a dispatch, which is the cost of a grace window
    talked_s: float  # pulling weights and pushing updates
    unfinished_s: float
    """In rounds without a result: under way at the end, refused, or lost when the worker left. A worker mostly computes in them,
    but the log has the duration of that only with an arrival."""

    @property
    def idle_s(self) -> float:
        """Time in which the worker certainly did not compute."""
        return self.waited_s + self.talked_s


@dataclass(frozen=True, kw_only=True)
class AsynchronySummary(JsonRecord):
    arrivals: int  # updates that reached the hub and were not refused
    applied: int
    left_out: int  # arrivals that the hub did not apply because they were too stale
    refused: int
    returned: int  # rounds that ended without an update, so that the hub put the position of their shard back
    windows: int  # grace windows with an arrival; the last may still be open
    staleness: CountDistribution
    arrivals_per_window: CountDistribution
    workers: tuple[WorkerTimes, ...]
    steps_per_shard: Mapping[int, int]  # inner steps that arrived


@dataclass(frozen=True, kw_only=True)
class WorkerRound:
    """One round of a worker that is over."""

    island: int
    task: ev.Dispatched | None  # None where the log lacks the dispatch
    computed: tuple[ev.Computed, ...]
    end_s: float
    arrival: ev.Arrived | None
    outcome: str  # arrived, lost, or under way when the log ends


@dataclass(frozen=True, kw_only=True)
class WorkerWait:
    """A worker waited for a dispatch."""

    island: int
    start_s: float
    end_s: float


def worker_history(events: Iterable[ev.Event]) -> Iterator[ev.Event | WorkerRound | WorkerWait]:
    """Each event, followed by the rounds and waits that it ends. Those still open when the log ends come last."""
    tasks: dict[int, ev.Dispatched] = {}
    computed: dict[int, list[ev.Computed]] = {}
    waiting_since_s: dict[int, float] = {}
    now_s = 0.0

    def end_wait(island: int, end_s: float) -> Iterator[WorkerWait]:
        if island in waiting_since_s:
            yield WorkerWait(island=island, start_s=waiting_since_s.pop(island), end_s=end_s)

    def end_round(island: int, end_s: float, outcome: str, arrival: ev.Arrived | None = None) -> WorkerRound:
        spans = tuple(computed.pop(island, ()))
        waiting_since_s[island] = end_s
        return WorkerRound(
            island=island, task=tasks.pop(island, None), computed=spans, end_s=end_s, arrival=arrival, outcome=outcome
        )

    for event in events:
        yield event
        match event:
            case ev.Dispatched():
                yield from end_wait(event.island, event.time_s)
                tasks[event.island] = event
            case ev.Computed():
                computed.setdefault(event.island, []).append(event)
            case ev.Arrived():
                yield end_round(event.island, event.time_s, "arrived", event)
            case ev.Refused() | ev.Returned():
                # An update from an unknown worker, or one that arrives twice, ends no round.
                if event.island in tasks and tasks[event.island].round == event.round:
                    yield end_round(event.island, event.time_s, "lost")
            case ev.IslandJoined():
                waiting_since_s[event.island] = event.time_s
            case ev.IslandLeft():
                if event.island in tasks:
                    yield end_round(event.island, event.time_s, "lost")
                yield from end_wait(event.island, event.time_s)
            case _:
                pass
        now_s = max(now_s, event.time_s) if isinstance(event, _HUB_EVENTS) else now_s
    for island in list(waiting_since_s):
        yield from end_wait(island, now_s)
    for island in list(tasks):
        yield end_round(island, now_s, "under way")


def asynchrony_of(events: Iterable[ev.Event]) -> AsynchronySummary | None:
    """The figures up to the latest event; None for a run without a hub."""
    zeros: dict[str, Any] = {field.name: 0.0 if field.name.endswith("_s") else 0 for field in fields(WorkerTimes)}
    workers: defaultdict[int, dict[str, Any]] = defaultdict(zeros.copy)
    since_s: dict[int, float] = {}  # when each present worker joined
    staleness, windows, shards, counts = Counter[int](), Counter[int](), Counter[int](), Counter[str]()
    now_s = 0.0
    for item in worker_history(events):
        if isinstance(item, _HUB_EVENTS):
            now_s = max(now_s, item.time_s)
            counts[type(item).__name__] += 1
        match item:
            case ev.IslandJoined():
                since_s[item.island] = item.time_s
            case ev.Dispatched():
                since_s.setdefault(item.island, item.time_s)  # no event announces a worker that is present from the start
            case ev.IslandLeft():
                workers[item.island]["present_s"] += item.time_s - since_s.pop(item.island, item.time_s)
            case ev.Computed():
                workers[item.island]["computed_s"] += item.end_s - item.start_s
            case WorkerWait():
                workers[item.island]["waited_s"] += item.end_s - item.start_s
            case WorkerRound(arrival=None, task=ev.Dispatched() as task):
                computed_s = sum(event.end_s - event.start_s for event in item.computed)
                workers[item.island]["unfinished_s"] += item.end_s - task.time_s - computed_s
            case WorkerRound(arrival=ev.Arrived() as arrival):
                figures = workers[item.island]
                figures["rounds"] += 1
                figures["steps"] += arrival.steps
                figures["talked_s"] += arrival.time_s - arrival.pushed_s
                if item.task is not None:
                    figures["talked_s"] += item.task.begin_s - item.task.time_s
            case ev.Arrived():
                staleness[item.staleness] += 1
                windows[item.window] += 1
                shards[item.shard] += item.steps
                counts["left out"] += not item.applied
            case _:
                pass
    if not counts["Dispatched"]:
        return None
    for island, joined_s in since_s.items():
        workers[island]["present_s"] += now_s - joined_s
    return AsynchronySummary(
        arrivals=counts["Arrived"],
        applied=counts["Arrived"] - counts["left out"],
        left_out=counts["left out"],
        refused=counts["Refused"],
        returned=counts["Returned"],
        windows=len(windows),
        staleness=CountDistribution.of(staleness),
        arrivals_per_window=CountDistribution.of(Counter(windows.values())),
        workers=tuple(WorkerTimes(**{**figures, "island": island}) for island, figures in sorted(workers.items())),
        steps_per_shard=dict(sorted(shards.items())),
    )


def read_asynchrony(folder: str | Path) -> AsynchronySummary | None:
    """The figures of the asynchronous run in a folder, finished or not; None for a synchronous one."""
    return asynchrony_of(read_events(Path(folder) / "events.jsonl")) if is_asynchronous(folder) else None


def is_asynchronous(folder: str | Path) -> bool:
    """Whether the run in a folder has a hub. Only the names of the events are read: a log may have a million lines."""
    return next(read_events(Path(folder) / "events.jsonl", kinds=(ev.Dispatched,)), None) is not None
