"""The rows of a trace, and what is drawn alike for synchronous and asynchronous runs."""

from __future__ import annotations

from atoll.core.events import Evaluated, IslandLeft, RunStarted
from atoll.telemetry.clocks import clock_of
from atoll.telemetry.device_events import device_name
from atoll.telemetry.perfetto import Row, Timeline

CLUSTER = 1
"""The process for what concerns all islands; the islands' own come after it."""
ROUNDS, EVALUATIONS = Row(CLUSTER, 1), Row(CLUSTER, 2)


def computing(timeline: Timeline, island: int) -> Row:
    """The row for what an island computes."""
    return _island(timeline, island, 1)


def network(timeline: Timeline, island: int) -> Row:
    """The row for what an island sends, receives and waits for."""
    return _island(timeline, island, 2)


def background(timeline: Timeline, island: int) -> Row:
    """The row for exchanges that go on while the island computes."""
    row = _island(timeline, island, 3)
    timeline.row_names[row] = "background"
    return row


def name_devices(timeline: Timeline, devices_per_island: int) -> None:
    """Of a run of two levels: every process but the cluster's is a device's."""
    for process in timeline.process_names.keys() - {CLUSTER}:
        timeline.process_names[process] = f"device {device_name(process - CLUSTER - 1, devices_per_island)}"


def draw_common(timeline: Timeline, event: RunStarted | Evaluated | IslandLeft) -> None:
    match event:
        case RunStarted():
            timeline.process_names[CLUSTER] = f"{event.recipe} ({event.algorithm})" + (
                ", wall time" if clock_of(event.engine) == "wall" else ""
            )
        case Evaluated():
            timeline.moment(EVALUATIONS, event.time_s, "evaluation", {"round": event.round, **event.metrics}, across=True)
        case IslandLeft():
            timeline.moment(network(timeline, event.island), event.time_s, "left", {"round": event.round})


def _island(timeline: Timeline, island: int, row: int) -> Row:
    process = CLUSTER + 1 + island
    timeline.process_names.setdefault(process, f"island {island}")
    timeline.row_names[Row(process, 1)] = "computing"
    timeline.row_names[Row(process, 2)] = "network"
    return Row(process, row)
