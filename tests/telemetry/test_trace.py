"""The trace agrees with the events: no overlap on a row, all computing time, all bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from atoll.algorithms.acco import ACCO
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
    UpdateSkipped,
)
from atoll.runs.cluster import Cluster, Link
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.trace import TraceSpan, without_overlaps, write_trace
from atoll.testing.simulated_runs import simulate


def records(folder: Path) -> list[dict[str, Any]]:
    return json.loads(write_trace(folder, folder / "out" / "trace.json").read_text())["traceEvents"]


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


def total_s(spans: list[dict[str, Any]], category: str) -> float:
    return sum(span["dur"] for span in spans if span["cat"] == category) / 1e6


def exchange(start_s: float, end_s: float, arrived_s: list[float], heard: list[bool], what: str = "mean") -> Exchanged:
    islands = list(range(len(heard)))
    return Exchanged(
        round=1,
        what=what,
        islands=islands,
        heard=heard,
        arrived_s=arrived_s,
        start_s=start_s,
        end_s=end_s,
        sent_bytes=[100 if one else 0 for one in heard],
        control_bytes=[8] * len(heard),
        weight=float(sum(heard)),
    )


def computed(island: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=1, start_s=start_s, end_s=end_s, steps=1, batches=1, tokens=8, loss=math.nan)


def test_spans_on_one_row_never_overlap(tmp_path, script) -> None:
    found = rows(records(script(islands=3, step_s=0.1, exchange_s=1 / 3, rounds=50).write(tmp_path / "run")))
    assert len(found) == 7
    for spans in found.values():
        for one, two in pairwise(spans):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6


def test_computing_waiting_and_communicating_add_up_to_the_run(tmp_path, script) -> None:
    run = script(islands=3, step_s=0.7)
    found = rows(records(run.write(tmp_path / "run")))
    for island, computed_s in enumerate(run.computed_s):
        network = found[f"island {island}", "network"]
        assert total_s(found[f"island {island}", "computing"], "computing") == pytest.approx(computed_s)
        assert total_s(network, "communicating") == pytest.approx(run.rounds * run.exchange_s)
        waited_s, talked_s = total_s(network, "waiting"), total_s(network, "communicating")
        assert computed_s + waited_s + talked_s == pytest.approx(run.rounds * run.round_s)


def test_the_counter_ends_at_all_bytes_sent(tmp_path, script) -> None:
    run = script(islands=3)
    counts = [r["args"]["bytes"] for r in records(run.write(tmp_path / "run")) if r["ph"] == "C"]
    assert counts == [number * run.islands * run.payload_bytes for number in range(1, run.rounds + 1)]


def test_evaluations_are_instants_with_their_metrics(tmp_path, script) -> None:
    run = script()
    moments = [r for r in records(run.write(tmp_path / "run")) if r["ph"] == "i"]
    evaluations = [event for event in run.events() if isinstance(event, Evaluated)]
    assert [(m["ts"], m["args"]["loss"]) for m in moments] == [(1e6 * e.virtual_time_s, e.metrics["loss"]) for e in evaluations]


def test_an_island_may_communicate_while_it_computes(tmp_path) -> None:
    folder = log(
        tmp_path, computed(0, 0.0, 10.0), exchange(2.0, 5.0, [1.0], [True]), exchange(5.0, 6.0, [3.0], [True], "all_gather")
    )
    found = rows(records(folder))
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 0", "computing"]] == [("compute, round 1", 0.0, 10.0)]
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 0", "network"]] == [
        ("wait", 1.0, 1.0),
        ("mean", 2.0, 3.0),
        ("all_gather", 5.0, 1.0),
    ]


def test_an_island_that_arrives_too_late_has_missed_the_exchange(tmp_path) -> None:
    found = rows(records(log(tmp_path, exchange(2.0, 5.0, [2.0, 4.0, 9.0], [True, False, False]))))
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 1", "network"]] == [("mean (missed)", 4.0, 1.0)]
    assert ("island 2", "network") not in found


def test_catching_up_and_joining_are_spans_and_their_bytes_count(tmp_path) -> None:
    boundary = RoundFinished(
        round=1, islands=1, steps=1, virtual_time_s=4.0, tokens=8, local_updates=1, loss=1.0, sent_bytes_per_island=0.0
    )
    joined = IslandJoined(island=2, round=2, virtual_time_s=7.0, donor=0, sent_bytes=50)
    caught_up = CaughtUp(island=1, donor=0, round=2, start_s=4.0, end_s=6.0, sent_bytes=30)
    trace = records(log(tmp_path, boundary, joined, caught_up, IslandLeft(island=1, round=3, virtual_time_s=8.0)))
    found = rows(trace)
    assert [(s["cat"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 2", "network"]] == [("joining", 4.0, 3.0)]
    assert [(s["cat"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 1", "network"]] == [("catching up", 4.0, 2.0)]
    assert [r["args"]["bytes"] for r in trace if r["ph"] == "C"] == [30, 80]
    assert [(r["name"], r["ts"]) for r in trace if r["ph"] == "i"] == [("left", 8e6)]


def test_a_trace_is_valid_json_even_if_a_loss_is_not_a_number(tmp_path) -> None:
    (span,) = rows(records(log(tmp_path, computed(0, 0.0, 1.0))))["island 0", "computing"]
    assert span["args"]["loss"] == "NaN"


def test_an_empty_log_has_no_trace(tmp_path) -> None:
    with pytest.raises(AtollError, match="nothing on its timeline"):
        write_trace(log(tmp_path), tmp_path / "trace.json")


def test_exchanges_in_the_background_have_a_row_of_their_own(tmp_path) -> None:
    hidden, plain = replace(exchange(2.0, 5.0, [1.0], [True]), background=True), exchange(4.0, 6.0, [4.0], [True], "total")
    found = rows(records(log(tmp_path, computed(0, 0.0, 10.0), hidden, plain)))
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 0", "background"]] == [
        ("wait", 1.0, 1.0),
        ("mean", 2.0, 3.0),
    ]
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found["island 0", "network"]] == [("total", 4.0, 2.0)]


def test_a_run_that_hides_nothing_has_no_such_row(tmp_path, script) -> None:
    assert {row for _, row in rows(records(script().write(tmp_path / "run")))} == {"computing", "network", "rounds"}


@pytest.mark.parametrize("algorithm", [ACCO(), ACCO(batch="free", clock="samples")], ids=["fixed", "free"])
def test_no_row_of_a_run_that_hides_its_exchanges_overlaps_itself(tmp_path, algorithm) -> None:
    cluster = Cluster(islands=3, step_time_s=(1.0, 1.3, 3.0), link=Link(latency_s=0.2))
    found = rows(records(log(tmp_path, *simulate(algorithm, steps=5, cluster=cluster).events)))
    assert ("island 2", "background") in found
    for spans in found.values():
        for one, two in pairwise(spans):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-3


def test_failures_and_resharding_are_on_the_timeline(tmp_path) -> None:
    skipped = UpdateSkipped(round=3, islands=[0, 2], virtual_time_s=1.0)
    failed = RoundFailed(round=4, what="all_gather", islands=[1], virtual_time_s=2.0)
    trace = records(log(tmp_path, skipped, failed, Recut(round=5, islands=[0, 1], start_s=2.0, end_s=3.0, sent_bytes=[30, 40])))
    moments = [(r["name"], r["ts"] / 1e6, r["args"]) for r in trace if r["ph"] == "i"]
    assert moments[0] == ("update skipped", 1.0, {"round": 3, "not finite on": "0, 2"})
    assert moments[1][:2] == ("round failed", 2.0)
    assert [s["args"]["bytes"] for island in (0, 1) for s in rows(trace)[f"island {island}", "network"]] == [30, 40]
    assert [r["args"]["bytes"] for r in trace if r["ph"] == "C"] == [70]


def span(start_ns: int, end_ns: int, *, filler: bool = False) -> TraceSpan:
    return TraceSpan(start_ns=start_ns, end_ns=end_ns, name="s", category="c", args={}, filler=filler)


def bounds(spans: list[TraceSpan]) -> list[tuple[int, int, bool]]:
    return [(one.start_ns, one.end_ns, one.filler) for one in spans]


spans = st.builds(
    lambda start_ns, length_ns, filler: span(start_ns, start_ns + length_ns, filler=filler),
    st.integers(0, 60),
    st.integers(0, 20),
    st.booleans(),
)


@given(st.lists(spans, max_size=12))
def test_no_two_spans_overlap_and_no_covered_time_is_lost(given_spans: list[TraceSpan]) -> None:
    kept = without_overlaps(given_spans)
    assert all(one.end_ns <= two.start_ns for one, two in pairwise(kept))
    assert {ns for one in kept for ns in range(one.start_ns, one.end_ns)} == {
        ns for one in given_spans for ns in range(one.start_ns, one.end_ns)
    }


def test_waiting_fills_only_what_nothing_else_takes() -> None:
    kept = without_overlaps([span(0, 10, filler=True), span(2, 4), span(6, 7)])
    assert bounds(kept) == [(0, 2, True), (2, 4, False), (4, 6, True), (6, 7, False), (7, 10, True)]


def test_a_span_that_begins_early_begins_where_the_one_before_it_ends() -> None:
    assert bounds(without_overlaps([span(3, 9), span(0, 5)])) == [(0, 5, False), (5, 9, False)]


def test_spans_that_do_not_overlap_are_left_as_they_are() -> None:
    apart = [span(0, 2), span(2, 2), span(2, 5, filler=True), span(5, 6)]
    assert without_overlaps(apart) == apart
