"""The timeline of an asynchronous run: each worker's rounds, and the hub's windows.

A worker's row `computing` has a span per round. Its row `network` has `pull` (the weights on their way to it), `push` (its update
on its way to the hub) and `wait` (until it is sent off again), and moments where it came, left, or lost a round. The cluster has
the grace windows and the evaluations, and counters of the hub's version, of staleness and of bytes sent by hub and workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.core.events import (
    Arrived,
    Computed,
    Dispatched,
    Evaluated,
    Event,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    RunFinished,
    RunStarted,
    WindowClosed,
)
from atoll.telemetry.perfetto import Timeline
from atoll.telemetry.trace_rows import CLUSTER, ROUNDS, computing, draw_common, network


def draw_hub(timeline: Timeline, events: Iterable[Event]) -> None:
    """Puts a whole asynchronous run on the timeline."""
    timeline.row_names[ROUNDS] = "windows"
    drawing = _Drawing(timeline)
    for event in events:
        drawing.take(event)
    drawing.finish()


class _Drawing:
    """What must be remembered while drawing: who is away on what, and who waits since when."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._now_s = 0.0
        self._tasks: dict[int, Dispatched] = {}
        self._stretches: dict[int, list[Computed]] = {}
        self._waiting_since_s: dict[int, float] = {}

    def take(self, event: Event) -> None:
        match event:
            case RunStarted() | Evaluated():
                draw_common(self._timeline, event)
            case Dispatched():
                self._dispatched(event)
            case Computed():
                # Drawn with the arrival, which knows how late it was.
                self._stretches.setdefault(event.island, []).append(event)
            case Arrived():
                self._arrived(event)
            case WindowClosed():
                args = {"islands": ", ".join(map(str, event.islands)), "arrivals": len(event.islands)}
                self._timeline.span(ROUNDS, event.opened_s, event.time_s, f"window {event.window}", "window", args)
            case Refused():
                self._moment(event.island, event.time_s, "refused", {"round": event.round, "reason": event.reason})
                self._lose(event.island, event.round, event.time_s)
            case Returned():
                args = {"round": event.round, "shard": event.shard, "steps": event.steps}
                self._moment(event.island, event.time_s, "returned", args)
                self._lose(event.island, event.round, event.time_s)
            case IslandJoined() | IslandLeft():
                self._came_or_left(event)
            case _:
                pass
        if isinstance(event, Dispatched | Arrived | WindowClosed | Refused | Returned | IslandJoined | IslandLeft | RunFinished):
            self._now_s = max(self._now_s, event.time_s)

    def finish(self) -> None:
        """What is not over when the log ends is drawn up to there."""
        for island, task in list(self._tasks.items()):
            self._lose(island, task.round, self._now_s, "under way")
        for island in list(self._waiting_since_s):
            self._stop_waiting(island, self._now_s)

    def _dispatched(self, event: Dispatched) -> None:
        self._stop_waiting(event.island, event.time_s)
        self._tasks[event.island] = event
        self._timeline.count(CLUSTER, event.time_s, event.sent_bytes)

    def _arrived(self, event: Arrived) -> None:
        args = {"shard": event.shard, "staleness": event.staleness, "applied": event.applied}
        self._draw_stretches(event.island, args)
        task = self._tasks.pop(event.island, None)
        if task is not None:
            self._pulled(task, event.time_s)
        row = network(self._timeline, event.island)
        more = {"round": event.round, "bytes": event.sent_bytes, "norm": event.norm}
        self._timeline.span(row, event.pushed_s, event.time_s, "push", "talking", {**more, **args})
        self._timeline.count(CLUSTER, event.time_s, event.sent_bytes)
        self._timeline.gauge(CLUSTER, event.time_s, "version", event.version)
        self._timeline.gauge(CLUSTER, event.time_s, "staleness", event.staleness)
        self._waiting_since_s[event.island] = event.time_s

    def _pulled(self, task: Dispatched, now_s: float) -> None:
        """Drawn when the round is over: who leaves while the weights are on their way never has them."""
        args = {"round": task.round, "version": task.version, "shard": task.shard, "bytes": task.sent_bytes}
        row = network(self._timeline, task.island)
        self._timeline.span(row, task.time_s, min(task.begin_s, now_s), "pull", "talking", args)

    def _came_or_left(self, event: IslandJoined | IslandLeft) -> None:
        if isinstance(event, IslandLeft):
            task = self._tasks.get(event.island)
            if task is not None:
                self._lose(event.island, task.round, event.time_s)
            self._stop_waiting(event.island, event.time_s)
            draw_common(self._timeline, event)
        else:
            self._waiting_since_s[event.island] = event.time_s
            self._moment(event.island, event.time_s, "joined", {"round": event.round})

    def _lose(self, island: int, number: int, now_s: float, why: str = "lost") -> None:
        """A round that brings nothing: its computing is drawn as far as it is known, else as one span up to now."""
        task = self._tasks.get(island)
        if task is None or task.round != number:
            return
        del self._tasks[island]
        self._pulled(task, now_s)
        if not self._draw_stretches(island, {"shard": task.shard, "outcome": why}) and now_s > task.begin_s:
            args = {"shard": task.shard, "steps": task.steps, "outcome": why}
            self._timeline.span(
                computing(self._timeline, island), task.begin_s, now_s, f"round {number} ({why})", "unfinished", args
            )
        if why == "lost":
            self._waiting_since_s[island] = now_s

    def _draw_stretches(self, island: int, args: dict[str, Any]) -> bool:
        """What the worker computed for the round that is over; whether there was any."""
        stretches = self._stretches.pop(island, [])
        for event in stretches:
            more = {"steps": event.steps, "tokens": event.tokens, "loss": event.loss, **args}
            row = computing(self._timeline, island)
            self._timeline.span(row, event.start_s, event.end_s, f"round {event.round}", "computing", more)
        return bool(stretches)

    def _stop_waiting(self, island: int, now_s: float) -> None:
        since_s = self._waiting_since_s.pop(island, now_s)
        if now_s > since_s:
            self._timeline.span(network(self._timeline, island), since_s, now_s, "wait", "waiting", {}, filler=True)

    def _moment(self, island: int, at_s: float, name: str, args: dict[str, Any]) -> None:
        self._timeline.moment(network(self._timeline, island), at_s, name, args)
