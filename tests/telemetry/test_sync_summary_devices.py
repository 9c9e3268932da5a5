"""Runs of two levels: each device has its own figures, and nothing is counted twice."""

import json
import re

import pytest
from rich.console import Console

from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.core.events import CaughtUp, Computed, Exchanged, IslandJoined, RunFinished, RunStarted, UpdateSkipped
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Lost
from atoll.telemetry.console_progress import event_text
from atoll.telemetry.plots import run_figure
from atoll.telemetry.report import OVERLAP, render, section_lines
from atoll.telemetry.run_progress import RunningTotals
from atoll.telemetry.sync_summary import by_device, overlap_of, reports_overlap
from atoll.telemetry.trace import write_trace
from atoll.telemetry.units import human_bytes, human_count
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate

CLUSTER = Cluster(
    islands=2,
    devices_per_island=2,
    step_time_s=(1.0, 2.0),
    lost=(Lost(island=1, round=1),),
    away=(Away(island=1, start=3, stop=4),),
)


def two_levels():
    """The log of a run in which an island misses an exchange, leaves and rejoins."""
    started = RunStarted(recipe="two", algorithm="DiLoCo over ACCO", islands=2, params=6, steps=10, seed=0, devices_per_island=2)
    done = simulate(
        DiLoCo(inner_steps=2),
        steps=10,
        inside=ACCO(optimizer=SGD(lr=0.05)),
        cluster=CLUSTER,
        workload=Regression(RegressionBatches(num_shards=4)),
    )
    return [started, *done.events], done.finished


def test_events_of_islands_become_events_of_devices_with_the_same_bytes():
    events, _ = two_levels()
    spread = list(by_device(events))
    for kind in (Exchanged, CaughtUp, IslandJoined):
        sent = [sum(_sent(event) for event in log if isinstance(event, kind)) for log in (events, spread)]
        assert sent[0] == sent[1] > 0
    assert {event.island for event in spread if isinstance(event, Computed)} == {0, 1, 2, 3}
    inside = [event.islands for event in spread if isinstance(event, Exchanged) and event.inside == 1]
    assert set(map(tuple, inside)) == {(2, 3)}
    assert {event.island for event in spread if isinstance(event, CaughtUp)} == {2, 3}


def _sent(event):
    return sum(event.sent_bytes) if isinstance(event.sent_bytes, list) else event.sent_bytes


def test_a_run_without_devices_stays_as_it_is():
    started = RunStarted(recipe="one", algorithm="DiLoCo", islands=4, params=6, steps=4, seed=0)
    events = [started, *simulate(DiLoCo(inner_steps=2), steps=4).events]
    assert list(by_device(events)) == events


def test_no_device_computes_longer_than_it_is_there_and_utilisation_is_the_runs():
    events, finished = two_levels()
    summary, totals = overlap_of(events), RunningTotals()
    for event in events:
        totals.take(event)
    assert [times.island for times in summary.islands] == [0, 1, 2, 3]
    assert all(0 < times.computed_s <= times.present_s for times in summary.islands)
    assert any(times.hidden_s > 0 for times in summary.islands)
    assert 0 < totals.utilisation(finished.virtual_time_s) <= 1
    assert summary.to_dict()["devices_per_island"] == 2


def section(summary):
    console = Console(width=120)
    with console.capture() as text:
        console.print(render(OVERLAP, summary))
    return text.get()


def test_the_report_names_islands_and_devices():
    assert all(name in section(overlap_of(two_levels()[0])) for name in ("device", "0.0", "0.1", "1.0", "1.1"))


def test_a_report_counts_the_devices_that_it_does_not_list():
    started = RunStarted(recipe="two", algorithm="DiLoCo over ACCO", islands=9, params=6, steps=1, seed=0, devices_per_island=2)
    work = {"round": 0, "start_s": 0.0, "end_s": 1.0, "steps": 1, "batches": 1, "tokens": 8, "loss": 1.0}
    some = [Computed(island=island, device=device, **work) for island in range(9) for device in range(2)]
    assert "and 2 more devices; " in section(overlap_of([started, *some]))


def test_the_two_levels_add_up_to_all_exchanges():
    events, finished = two_levels()
    summary = overlap_of(events)
    inside, between = summary.inside, summary.between
    assert (inside.exchanges + between.exchanges, inside.background + between.background) == (summary.exchanges, summary.background)
    assert inside.exchanged_s + between.exchanged_s == pytest.approx(sum(times.exchanged_s for times in summary.islands))
    assert inside.hidden_s + between.hidden_s == pytest.approx(sum(times.hidden_s for times in summary.islands))
    assert inside.sent_bytes == finished.inside_bytes_per_device
    assert inside.dropped_tokens == finished.inside_dropped_tokens > 0
    assert between.sent_bytes == finished.sent_bytes_per_island
    assert between.hidden == 0.0 < inside.hidden
    assert all(times.hidden == times.inside_hidden_s / times.inside_exchanged_s for times in summary.islands)
    assert json.loads(json.dumps(summary.to_dict()))["inside"]["hidden"] == inside.hidden


def test_the_report_has_a_line_for_each_level():
    inside, between = section_lines(OVERLAP, overlap_of(two_levels()[0]))
    found = re.fullmatch(r"inside     \d+ exchanges, (.+) per device, (.+) hidden, (.+) tokens dropped", inside)
    _, finished = two_levels()
    assert found[1] == human_bytes(finished.inside_bytes_per_device)
    assert found[3] == human_count(finished.inside_dropped_tokens)
    assert re.fullmatch(rf"between    \d exchanges, {human_bytes(finished.sent_bytes_per_island)} per island, none hidden", between)


def test_two_levels_are_reported_even_if_nothing_is_hidden(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text(RunStarted(recipe="one", algorithm="DiLoCo", islands=2, params=6, steps=1, seed=0).to_json() + "\n")
    assert not reports_overlap(tmp_path)
    log.write_text(two_levels()[0][0].to_json() + "\n")
    assert reports_overlap(tmp_path)


def test_figures_name_devices_too(tmp_path):
    (tmp_path / "events.jsonl").write_text("\n".join(event.to_json() for event in two_levels()[0] if event.recorded) + "\n")
    figure = run_figure(tmp_path, "overlap")
    timeline, *others = figure.axes
    assert [tick.get_text() for tick in timeline.get_yticklabels()] == ["0.0", "0.1", "1.0", "1.1"]
    assert "hidden share of exchanges inside" in [text.get_text() for text in figure.legends[0].get_texts()]
    for panel in others:
        assert panel.get_xlabel() == "island.device"
        assert panel.xaxis.get_major_formatter()(3.0, None) == "1.1"
        assert panel.xaxis.get_major_formatter()(2.0, None) == "1.0"


def test_each_device_has_rows_of_its_own_in_a_trace(tmp_path):
    (tmp_path / "events.jsonl").write_text("\n".join(event.to_json() for event in two_levels()[0] if event.recorded) + "\n")
    trace = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
    assert names == {"two (DiLoCo over ACCO)", "device 0.0", "device 0.1", "device 1.0", "device 1.1"}


def test_a_trace_names_devices_that_skipped_and_donors(tmp_path):
    skipped = UpdateSkipped(round=3, islands=[1], virtual_time_s=1.0, inside=1)
    events = two_levels()[0]
    log = [*events, skipped]
    (tmp_path / "events.jsonl").write_text("\n".join(event.to_json() for event in log if event.recorded) + "\n")
    trace = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["not finite on"] for e in trace if e["name"] == "update skipped"] == ["1.1"]
    assert {e["args"]["donor"] for e in trace if e["name"] in ("catch up", "join")} == {"0.0"}


def test_the_line_of_a_skipped_update_names_the_devices():
    event = UpdateSkipped(round=3, islands=[1], virtual_time_s=1.0, inside=2)
    assert event_text(event) == "round 3: gradients of device 2.1 are not finite, so all devices of island 2 skip the update"


def test_a_finished_run_of_two_levels_has_its_inner_bytes():
    events, _ = two_levels()
    finished = next(event for event in events if isinstance(event, RunFinished))
    inside = [event for event in events if isinstance(event, Exchanged) and event.inside is not None]
    assert finished.inside_bytes_per_device == sum(map(_sent, inside)) / 4
