"""The trace of an asynchronous run: a span for every round, no overlap on a row, all time and all bytes accounted for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

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
    WindowClosed,
)
from atoll.telemetry.async_summary import read_asynchrony
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.trace import write_trace
from tests.samples import arrived


def records(folder: Path) -> list[dict[str, Any]]:
    return json.loads(write_trace(folder, folder / "trace.json").read_text())["traceEvents"]


def log(folder: Path, *events: Event) -> Path:
    with JsonlSink(folder / "events.jsonl") as sink:
        for event in events:
            sink.emit(event)
    return folder


def rows(trace: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Spans by the names of their process and row, in order of time."""
    processes = {r["pid"]: r["args"]["name"] for r in trace if r["name"] == "process_name"}
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in trace if r["name"] == "thread_name"}
    result: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in sorted((r for r in trace if r["ph"] == "X"), key=lambda r: r["ts"]):
        result.setdefault((processes[record["pid"]], names[record["pid"], record["tid"]]), []).append(record)
    return result


def bounds_s(spans: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(span["name"], span["ts"] / 1e6, span["dur"] / 1e6) for span in spans]


def total_s(spans: list[dict[str, Any]], category: str) -> float:
    return sum(span["dur"] for span in spans if span["cat"] == category) / 1e6


def dispatched(number: int, at_s: float, island: int = 0) -> Dispatched:
    numbers = {"island": island, "round": number, "version": 0, "shard": 3, "start": 0, "schedule": 0, "steps": 4}
    return Dispatched(virtual_time_s=at_s, begin_s=at_s + 1.0, sent_bytes=8, **numbers)


@pytest.mark.parametrize("finished", [True, False])
def test_the_rows_of_a_worker_agree_with_its_times(tmp_path, async_script, finished: bool) -> None:
    folder = async_script(rounds=20, transfer_s=1 / 3, finished=finished).write(tmp_path / "run")
    found = rows(records(folder))
    for spans in found.values():
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-6 for one, two in pairwise(spans))
    for worker in read_asynchrony(folder).workers:
        rounds, network = found[f"island {worker.island}", "computing"], found[f"island {worker.island}", "network"]
        assert total_s(rounds, "computing") == pytest.approx(worker.computed_s)
        assert sum(span["cat"] == "computing" for span in rounds) == worker.rounds
        assert total_s(network, "waiting") == pytest.approx(worker.waited_s)
        # The pull of a round that is still under way is drawn, and is no part of what arrived.
        assert total_s(network, "communicating") + total_s(rounds, "unfinished") == pytest.approx(
            worker.talked_s + worker.unfinished_s
        )


def test_a_round_shows_its_shard_its_steps_and_how_late_it_was(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    found = rows(records(run.write(tmp_path / "run")))
    shown = {
        span["name"]: (span["args"]["shard"], span["args"]["steps"], span["args"]["staleness"])
        for (_, row), spans in found.items()
        for span in spans
        if row == "computing" and span["cat"] == "computing"
    }
    assert shown == {f"round {e.round}": (e.shard, e.steps, e.staleness) for e in run.events() if isinstance(e, Arrived)}


def test_the_network_row_has_pull_push_and_wait(tmp_path) -> None:
    numbers = {"island": 0, "round": 7, "steps": 4}
    computed = Computed(start_s=1.0, end_s=5.0, batches=4, tokens=8, loss=2.0, **numbers)
    late = arrived(pushed_s=5.0, virtual_time_s=5.5, shard=3, version=9, staleness=2, sent_bytes=8, **numbers)
    found = rows(records(log(tmp_path, dispatched(7, 0.0), computed, late, dispatched(8, 7.0))))
    assert bounds_s(found["island 0", "network"]) == [
        ("pull", 0.0, 1.0),
        ("push", 5.0, 0.5),
        ("wait", 5.5, 1.5),
        ("pull", 7.0, 0.0),
    ]
    assert bounds_s(found["island 0", "computing"]) == [("round 7", 1.0, 4.0)]


def test_the_cluster_has_windows_and_evaluations_and_no_rounds(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    trace = records(run.write(tmp_path / "run"))
    found = rows(trace)
    cluster = {row: spans for (process, row), spans in found.items() if process == "demo-async (AsyncLocalSGD)"}
    windows = [event for event in run.events() if isinstance(event, WindowClosed)]
    assert bounds_s(cluster.pop("windows")) == [
        (f"window {e.window}", pytest.approx(e.opened_s), pytest.approx(e.virtual_time_s - e.opened_s)) for e in windows
    ]
    assert not cluster
    evaluations = [event.virtual_time_s for event in run.events() if isinstance(event, Evaluated)]
    assert [r["ts"] / 1e6 for r in trace if r["ph"] == "i"] == pytest.approx(evaluations)


def test_the_counters_follow_version_staleness_and_bytes(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    trace = records(run.write(tmp_path / "run"))
    arrivals = [event for event in run.events() if isinstance(event, Arrived)]
    sent = sum(event.sent_bytes for event in run.events() if isinstance(event, Arrived | Dispatched))

    def counter(name: str) -> list[float]:
        return [value for r in trace if r["ph"] == "C" and r["name"] == name for value in r["args"].values()]

    assert counter("version") == [event.version for event in arrivals]
    assert counter("staleness") == [event.staleness for event in arrivals]
    assert counter("bytes sent")[-1] == sent


def test_a_worker_that_dies_in_mid_round_leaves_a_lost_round_and_instants(tmp_path) -> None:
    trace = records(
        log(
            tmp_path,
            dispatched(0, 0.0),
            IslandLeft(island=0, round=0, virtual_time_s=3.0),
            Returned(island=0, round=0, shard=3, steps=4, virtual_time_s=3.0),
            IslandJoined(island=0, round=0, virtual_time_s=8.0, donor=None, sent_bytes=0),
            dispatched(1, 8.5),
            Refused(island=0, round=0, virtual_time_s=9.0, reason="delivered twice"),
            Refused(island=0, round=1, virtual_time_s=12.0, reason="not finite"),
        )
    )
    found = rows(trace)
    assert bounds_s(found["island 0", "computing"]) == [("round 0 (lost)", 1.0, 2.0), ("round 1 (lost)", 9.5, 2.5)]
    assert bounds_s(found["island 0", "network"]) == [("pull", 0.0, 1.0), ("wait", 8.0, 0.5), ("pull", 8.5, 1.0)]
    moments = [(r["name"], r["ts"] / 1e6) for r in trace if r["ph"] == "i"]
    assert moments == [("left", 3.0), ("returned", 3.0), ("joined", 8.0), ("refused", 9.0), ("refused", 12.0)]


def test_a_worker_that_leaves_before_it_has_the_weights_never_has_them(tmp_path) -> None:
    found = rows(records(log(tmp_path, dispatched(0, 0.0), IslandLeft(island=0, round=0, virtual_time_s=0.25))))
    assert bounds_s(found["island 0", "network"]) == [("pull", 0.0, 0.25)]
    assert ("island 0", "computing") not in found
