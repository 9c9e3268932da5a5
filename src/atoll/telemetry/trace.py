"""The timeline of a run for ui.perfetto.dev and chrome://tracing.

Each island is a process with two rows: `computing`, and `network` for waiting, exchanges, catching up and joining. Exchanges in the
background of computing have a third row, `background`, because one may begin during another. In a run of two levels each device is
such a process: `2.1` is device 1 of island 2. In an asynchronous run the network row of a worker has `pull`, `push` and `wait`.
A further process, the cluster, has the rounds or the grace windows, the evaluations and counters.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core import events as ev
from atoll.core.errors import AtollError
from atoll.core.verified_files import replacing
from atoll.telemetry.async_summary import WorkerRound, WorkerWait, is_asynchronous, worker_history
from atoll.telemetry.event_log import clock_of, read_events
from atoll.telemetry.sync_summary import by_device, device_name
from atoll.telemetry.units import json_value


def write_trace(folder: str | Path, path: str | Path) -> Path:
    """Writes the timeline of the run in `folder`, finished or not, as JSON. Times are microseconds on the run's clock."""
    path, events = Path(path), read_events(Path(folder) / "events.jsonl")
    asynchronous = is_asynchronous(folder)
    trace = _Trace(asynchronous=asynchronous)
    for item in worker_history(events) if asynchronous else by_device(events):
        trace.draw(item)
    if not trace.spans and not trace.instants:
        raise AtollError(f"the run in {folder} has nothing on its timeline yet. Let it run on, then write the trace again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, AtollError) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, record in enumerate(trace.records()):
            file.write(((",\n" if number else "") + json.dumps(json_value(record), allow_nan=False)).encode())
        file.write(b"\n]}\n")
    return path


class TraceRow(NamedTuple):
    """Where a span is drawn: a row (`tid`) of a process (`pid`)."""

    process: int
    row: int


_CLUSTER = 1  # the process of the whole cluster; island i is process i + 2
_ROUNDS, _EVALUATIONS = TraceRow(_CLUSTER, 1), TraceRow(_CLUSTER, 2)
_ISLAND_ROWS = {"computing": 1, "network": 2, "background": 3}


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """An activity, in whole nanoseconds, so that no rounding error makes two overlap. A filler, such as waiting, takes only the
    time that nothing else on its row takes."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any]
    filler: bool = False


class _Trace:
    """Collects spans, instants and counters in any order."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.spans: dict[TraceRow, list[TraceSpan]] = {}
        self.instants: list[dict[str, Any]] = []
        self._synchronous = not asynchronous
        self._devices: int | None = None
        self._boundary_s = 0.0  # the end of the last finished round
        self._process_names = {_CLUSTER: "cluster"}
        self._row_names = {_ROUNDS: "windows" if asynchronous else "rounds", _EVALUATIONS: "evaluations"}
        self._sent_bytes: list[tuple[int, int]] = []
        self._counters: list[dict[str, Any]] = []

    def records(self) -> Iterator[dict[str, Any]]:
        """In the format of chrome://tracing."""
        for process, name in self._process_names.items():
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        for row, name in self._row_names.items():
            yield {"ph": "M", "pid": row.process, "tid": row.row, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": row.process, "tid": row.row, "name": "thread_sort_index", "args": {"sort_index": row.row}}
        for row, spans in self.spans.items():
            for span in without_overlaps(spans):
                when = {"ts": span.start_ns / 1000, "dur": (span.end_ns - span.start_ns) / 1000}
                what = {"name": span.name, "cat": span.category, "args": span.args}
                yield {"ph": "X", "pid": row.process, "tid": row.row, **when, **what}
        yield from self.instants
        total = 0
        for at_ns, num_bytes in sorted(self._sent_bytes):
            total += num_bytes
            yield _counter(at_ns, "bytes sent", {"bytes": total})
        yield from self._counters

    def draw(self, item: ev.Event | WorkerRound | WorkerWait) -> None:
        match item:
            case ev.RunStarted():
                wall = ", wall time" if clock_of(item.engine) == "wall" else ""
                self._process_names[_CLUSTER] = f"{item.recipe} ({item.algorithm}){wall}"
                self._devices = item.devices_per_island
            case ev.Computed() if self._synchronous:
                row, args = self._row(item.island, "computing"), _args(item, "steps", "batches", "tokens", "loss")
                self._span(row, (item.start_s, item.end_s), f"compute, round {item.round}", "computing", args)
            case ev.Exchanged():
                self._draw_exchange(item)
            case ev.CaughtUp():
                self._draw_transfer(item, "catch up", "catching up", (item.start_s, item.end_s))
            case ev.IslandJoined() if self._synchronous:
                # The event has only the end. Islands join between rounds, so the transfer began at the last boundary.
                self._draw_transfer(item, "join", "joining", (min(self._boundary_s, item.time_s), item.time_s))
            case ev.Recut():
                for island, sent_bytes in zip(item.islands, item.sent_bytes, strict=True):
                    args = {"round": item.round, "bytes": sent_bytes}
                    self._span(self._row(island), (item.start_s, item.end_s), "reshard", "communicating", args)
                self._sent(item.end_s, sum(item.sent_bytes))
            case ev.UpdateSkipped():
                names = [device_name(number, self._devices if item.inside is not None else None) for number in item.islands]
                self._instant(_ROUNDS, item, "update skipped", "round", scope="g", **{"not finite on": ", ".join(names)})
            case ev.RoundFailed():
                missing = {"missed by": ", ".join(map(str, item.islands))}
                self._instant(_ROUNDS, item, "round failed", "round", "what", scope="g", **missing)
            case ev.RoundFinished() if self._synchronous:
                args = _args(item, "loss", "tokens", "islands")
                self._span(_ROUNDS, (self._boundary_s, item.time_s), f"round {item.round}", "round", args)
                self._boundary_s = item.time_s
            case ev.Evaluated():
                self._instant(_EVALUATIONS, item, "evaluation", "round", scope="g", **item.metrics)
            case ev.IslandJoined() | ev.IslandLeft():
                self._instant(self._row(item.island), item, "left" if isinstance(item, ev.IslandLeft) else "joined", "round")
            case ev.Refused() if not self._synchronous:
                self._instant(self._row(item.island), item, "refused", "round", "reason")
            case ev.Returned():
                self._instant(self._row(item.island), item, "returned", "round", "shard", "steps")
            case ev.Dispatched() | ev.Arrived():
                self._sent(item.time_s, item.sent_bytes)
                for name in ("version", "staleness") if isinstance(item, ev.Arrived) else ():
                    self._counters.append(_counter(_ns(item.time_s), name, _args(item, name)))
            case ev.WindowClosed():
                args = {"islands": ", ".join(map(str, item.islands)), "arrivals": len(item.islands)}
                self._span(_ROUNDS, (item.opened_s, item.time_s), f"window {item.window}", "window", args)
            case WorkerRound():
                self._draw_worker_round(item)
            case WorkerWait() if item.end_s > item.start_s:
                self._span(self._row(item.island), (item.start_s, item.end_s), "wait", "waiting", {}, filler=True)
            case _:
                pass

    def _draw_exchange(self, event: ev.Exchanged) -> None:
        members = zip(event.islands, event.heard, event.arrived_s, event.sent_bytes, event.control_bytes, strict=True)
        for island, heard, arrived_s, sent_bytes, control_bytes in members:
            row = self._row(island, "background" if event.background else "network")
            wait = {"round": event.round, "for": event.what}
            self._span(row, (arrived_s, event.start_s), "wait", "waiting", wait, filler=True)
            name = event.what if heard else f"{event.what} (missed)"
            args = {"round": event.round, "bytes": sent_bytes, "control_bytes": control_bytes, "heard": heard}
            # An island that missed the exchange may arrive after its start.
            self._span(row, (max(arrived_s, event.start_s), event.end_s), name, "communicating", args)
        self._sent(event.end_s, sum(event.sent_bytes))

    def _draw_transfer(self, event: ev.CaughtUp | ev.IslandJoined, name: str, category: str, times_s: tuple[float, float]) -> None:
        """An island receives the shared state. The donor sends it while it trains, so the rows of the donor do not show it."""
        donor = event.donor if self._devices is None or event.donor is None else device_name(event.donor, self._devices)
        args = {"round": event.round, "donor": donor, "bytes": event.sent_bytes}
        self._span(self._row(event.island), times_s, name, category, args)
        self._sent(times_s[1], event.sent_bytes)

    def _draw_worker_round(self, item: WorkerRound) -> None:
        """Pull, computing and push. A round without a result and without reported steps is one span up to its end."""
        task, arrival, outcome = item.task, item.arrival, dict[str, Any]()
        computing = self._row(item.island, "computing")
        if task is not None:
            # A worker that leaves during the pull never has the weights.
            times_s = (task.time_s, min(task.begin_s, item.end_s))
            args = {**_args(task, "round", "version", "shard"), "bytes": task.sent_bytes}
            self._span(self._row(item.island), times_s, "pull", "communicating", args)
            outcome = {"shard": task.shard, "outcome": item.outcome}
        if arrival is not None:
            outcome = _args(arrival, "shard", "staleness", "applied")
            args = {**_args(arrival, "round", "norm"), "bytes": arrival.sent_bytes, **outcome}
            self._span(self._row(item.island), (arrival.pushed_s, arrival.time_s), "push", "communicating", args)
        for event in item.computed:
            args = {**_args(event, "steps", "tokens", "loss"), **outcome}
            self._span(computing, (event.start_s, event.end_s), f"round {event.round}", "computing", args)
        if task is not None and arrival is None and not item.computed and item.end_s > task.begin_s:
            name = f"round {task.round} ({item.outcome})"
            self._span(computing, (task.begin_s, item.end_s), name, "unfinished", {"steps": task.steps, **outcome})

    def _row(self, island: int, name: str = "network") -> TraceRow:
        """A row of an island. Its process and its rows get their names."""
        process, kind = _CLUSTER + 1 + island, "island" if self._devices is None else "device"
        self._process_names[process] = f"{kind} {device_name(island, self._devices)}"
        for shown in ("computing", "network", name):
            self._row_names[TraceRow(process, _ISLAND_ROWS[shown])] = shown
        return TraceRow(process, _ISLAND_ROWS[name])

    def _span(
        self, row: TraceRow, times_s: tuple[float, float], name: str, category: str, args: dict[str, Any], *, filler: bool = False
    ) -> None:
        start_ns, end_ns = map(_ns, times_s)
        span = TraceSpan(start_ns=start_ns, end_ns=end_ns, name=name, category=category, args=args, filler=filler)
        self.spans.setdefault(row, []).append(span)

    def _instant(self, row: TraceRow, event: Any, name: str, *fields: str, scope: str = "t", **more: Any) -> None:
        """An event without duration, with these fields of it, on its own row (scope t) or across all rows (scope g)."""
        where = {"ph": "i", "pid": row.process, "tid": row.row, "ts": _ns(event.time_s) / 1000}
        self.instants.append({**where, "name": name, "s": scope, "args": {**_args(event, *fields), **more}})

    def _sent(self, at_s: float, num_bytes: int) -> None:
        self._sent_bytes.append((_ns(at_s), num_bytes))


_bounds = attrgetter("start_ns", "end_ns")


def without_overlaps(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """The spans in order, each cut to begin where the one before it ends; fillers lose the time that another span takes.

    An island may wait for an exchange while the one before is still under way: then it waits only from the end of that one.
    """
    ordered = sorted(spans, key=_bounds)
    solid = _cut([span for span in ordered if not span.filler])
    starts = [span.start_ns for span in solid]
    pieces = [piece for span in ordered if span.filler for piece in _gaps(span, solid, starts)]
    return _cut(sorted([*solid, *pieces], key=_bounds))


def _cut(ordered: Sequence[TraceSpan]) -> list[TraceSpan]:
    kept: list[TraceSpan] = []
    free_ns = 0
    for span in ordered:
        start_ns = max(span.start_ns, free_ns)
        if start_ns < span.end_ns or start_ns == span.start_ns == span.end_ns:
            kept.append(span if start_ns == span.start_ns else replace(span, start_ns=start_ns))
            free_ns = span.end_ns
    return kept


def _gaps(span: TraceSpan, solid: Sequence[TraceSpan], starts: Sequence[int]) -> Iterator[TraceSpan]:
    """The pieces of a filler between the other spans."""
    free_ns = span.start_ns
    for other in solid[max(0, bisect_right(starts, span.start_ns) - 1) :]:
        if other.start_ns >= span.end_ns:
            break
        if other.start_ns > free_ns:
            yield replace(span, start_ns=free_ns, end_ns=other.start_ns)
        free_ns = max(free_ns, other.end_ns)
    if free_ns < span.end_ns:
        yield replace(span, start_ns=free_ns)


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _args(event: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


def _counter(at_ns: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "pid": _CLUSTER, "ts": at_ns / 1000, "name": name, "args": args}
