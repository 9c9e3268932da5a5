"""The timeline of a run for a trace viewer: who computed, waited and talked when.

Each island is a process with two rows: `computing`, and `network` for waiting, exchanges, catching up and joining, since an
island may talk while it computes. Exchanges that go on in the background have a third, `background`: one of them may begin while
the island is in another. Where devices have an algorithm of their own, each device is such a process: `2.1` is device 1 of island
2. A further process, the cluster, has the rounds, the evaluations and a counter of bytes sent.
What a hub and its workers do is drawn by `trace_async`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.events import (
    CaughtUp,
    Computed,
    Evaluated,
    Event,
    Exchanged,
    IslandJoined,
    IslandLeft,
    Recut,
    RoundFailed,
    RoundFinished,
    RunStarted,
    UpdateSkipped,
)
from atoll.telemetry.async_summary import is_asynchronous
from atoll.telemetry.device_events import by_device, device_name
from atoll.telemetry.event_log import read_events
from atoll.telemetry.perfetto import Timeline
from atoll.telemetry.trace_async import draw_hub
from atoll.telemetry.trace_rows import CLUSTER, EVALUATIONS, ROUNDS, background, computing, draw_common, name_devices, network


def write_trace(folder: str | Path, path: str | Path) -> Path:
    """Writes the timeline of the run in `folder` as JSON, to be opened in ui.perfetto.dev or chrome://tracing.

    A run that is not finished gives what it has so far. Times are microseconds on the run's clock.
    """
    path = Path(path)
    timeline = Timeline(process_names={CLUSTER: "cluster"}, row_names={ROUNDS: "rounds", EVALUATIONS: "evaluations"})
    log = Path(folder) / "events.jsonl"
    if is_asynchronous(folder):
        draw_hub(timeline, read_events(log))
    else:
        _draw_all(timeline, by_device(read_events(log)))
    if timeline.empty:
        raise AtollError(f"the run in {folder} has nothing on its timeline yet. Let it run on, then write the trace again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline.write(path)
    return path


def _draw_all(timeline: Timeline, events: Iterable[Event]) -> None:
    boundary_s, devices = 0.0, None
    for event in events:
        devices = event.devices_per_island if isinstance(event, RunStarted) else devices
        _draw(timeline, event, boundary_s, devices)
        boundary_s = event.time_s if isinstance(event, RoundFinished) else boundary_s
    if devices is not None:
        name_devices(timeline, devices)


def _draw(timeline: Timeline, event: Event, boundary_s: float, devices: int | None) -> None:
    """Puts one event on the timeline. `boundary_s` is when the last finished round ended."""
    match event:
        case RunStarted() | Evaluated() | IslandLeft():
            draw_common(timeline, event)
        case Computed():
            args = {"steps": event.steps, "batches": event.batches, "tokens": event.tokens, "loss": event.loss}
            row = computing(timeline, event.island)
            timeline.span(row, event.start_s, event.end_s, f"compute, round {event.round}", "computing", args)
        case Exchanged():
            _exchanged(timeline, event)
        case CaughtUp() | IslandJoined():
            _received(timeline, event, boundary_s, devices)
        case Recut():
            for island, sent_bytes in zip(event.islands, event.sent_bytes, strict=True):
                args = {"round": event.round, "bytes": sent_bytes}
                timeline.span(network(timeline, island), event.start_s, event.end_s, "cut anew", "talking", args)
            timeline.count(CLUSTER, event.end_s, sum(event.sent_bytes))
        case UpdateSkipped():
            names = [device_name(number, devices if event.inside is not None else None) for number in event.islands]
            where = {"round": event.round, "not finite on": ", ".join(names)}
            timeline.moment(ROUNDS, event.time_s, "update skipped", where, across=True)
        case RoundFailed():
            where = {"round": event.round, "what": event.what, "not heard": ", ".join(map(str, event.islands))}
            timeline.moment(ROUNDS, event.time_s, "round void", where, across=True)
        case RoundFinished():
            counts = {"loss": event.loss, "tokens": event.tokens, "islands": event.islands}
            timeline.span(ROUNDS, boundary_s, event.time_s, f"round {event.round}", "round", counts)
        case _:
            pass


def _exchanged(timeline: Timeline, event: Exchanged) -> None:
    everyone = zip(event.islands, event.heard, event.arrived_s, event.sent_bytes, event.control_bytes, strict=True)
    for island, heard, arrived_s, sent_bytes, control_bytes in everyone:
        row = background(timeline, island) if event.background else network(timeline, island)
        why = {"round": event.round, "for": event.what}
        timeline.span(row, arrived_s, event.start_s, "wait", "waiting", why, filler=True)
        name = event.what if heard else f"{event.what} (not heard)"
        args = {"round": event.round, "bytes": sent_bytes, "control_bytes": control_bytes, "heard": heard}
        # One that comes too late to be heard is not there at the start.
        timeline.span(row, max(arrived_s, event.start_s), event.end_s, name, "talking", args)
    timeline.count(CLUSTER, event.end_s, sum(event.sent_bytes))


def _received(timeline: Timeline, event: CaughtUp | IslandJoined, boundary_s: float, devices: int | None) -> None:
    """An island is given the shared fields. The donor serves them while it trains, so its own rows do not show it."""
    if isinstance(event, CaughtUp):
        name, category, start_s, end_s = "catch up", "catching up", event.start_s, event.end_s
    else:
        # This event has only the end. Islands are admitted between rounds, so the transfer began at the last boundary.
        name, category, start_s, end_s = "join", "joining", min(boundary_s, event.time_s), event.time_s
    donor = event.donor if devices is None or event.donor is None else device_name(event.donor, devices)
    args = {"round": event.round, "donor": donor, "bytes": event.sent_bytes}
    timeline.span(network(timeline, event.island), start_s, end_s, name, category, args)
    timeline.count(CLUSTER, end_s, event.sent_bytes)
