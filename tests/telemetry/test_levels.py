"""Runs of two levels: devices are told apart, and nothing is counted twice."""

import json

from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.engines.sim.world import Away, Cluster, Lost
from atoll.events import CaughtUp, Computed, Exchanged, IslandJoined, RunFinished, RunStarted, UpdateSkipped
from atoll.optim.sgd import SGD
from atoll.telemetry.levels import by_device
from atoll.telemetry.overlap import Overlap
from atoll.telemetry.overlap_text import overlap_section
from atoll.telemetry.tally import Tally
from atoll.telemetry.trace import write_trace
from atoll.telemetry.wording import notice
from atoll.testing.simulate import simulate
from atoll.testing.workloads import Regression, RegressionBatches

CLUSTER = Cluster(
    islands=2,
    devices_per_island=2,
    step_time_s=(1.0, 2.0),
    lost=(Lost(island=1, round=1),),
    away=(Away(island=1, start=3, stop=4),),
)


def two_levels():
    """The log of a run in which an island is not heard, and leaves and comes back."""
    started = RunStarted(recipe="two", algorithm="DiLoCo over ACCO", islands=2, params=6, steps=10, seed=0, devices_per_island=2)
    done = simulate(
        DiLoCo(inner_steps=2),
        steps=10,
        inside=ACCO(optimizer=SGD(lr=0.05)),
        cluster=CLUSTER,
        workload=Regression(RegressionBatches(num_shards=4)),
    )
    return [started, *done.events], done.finished


def test_events_of_islands_are_told_of_each_device_and_bytes_stay_what_they_are():
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
    overlap, tally = Overlap(), Tally()
    for event in by_device(events):
        overlap.take(event)
    for event in events:
        tally.take(event)
    summary = overlap.summary()
    assert [times.island for times in summary.islands] == [0, 1, 2, 3]
    assert all(0 < times.computed_s <= times.present_s for times in summary.islands)
    assert any(times.hidden_s > 0 for times in summary.islands)
    assert 0 < tally.utilisation(finished.virtual_time_s) <= 1
    assert summary.to_dict()["devices_per_island"] == 2


def test_the_report_names_islands_and_devices():
    from rich.console import Console

    overlap = Overlap()
    for event in by_device(two_levels()[0]):
        overlap.take(event)
    console = Console(width=120)
    with console.capture() as text:
        console.print(overlap_section(overlap.summary()))
    assert all(name in text.get() for name in ("device", "0.0", "0.1", "1.0", "1.1"))


def test_each_device_has_rows_of_its_own_in_a_trace(tmp_path):
    (tmp_path / "events.jsonl").write_text("\n".join(event.to_json() for event in two_levels()[0] if event.recorded) + "\n")
    trace = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
    assert {"device 0", "device 1", "device 2", "device 3"} <= names


def test_a_skipped_update_says_whose_devices():
    event = UpdateSkipped(round=3, islands=[1], virtual_time_s=1.0, inside=2)
    assert notice(event) == "round 3: gradients of device 1 of island 2 are not finite, so its devices skip the update"


def test_a_finished_run_of_two_levels_tells_its_inner_bytes():
    events, _ = two_levels()
    finished = next(event for event in events if isinstance(event, RunFinished))
    inside = [event for event in events if isinstance(event, Exchanged) and event.inside is not None]
    assert finished.inside_bytes_per_device == sum(map(_sent, inside)) / 4
