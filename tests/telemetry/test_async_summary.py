"""The figures of an asynchronous run follow from its events, and every second of a worker counts in one part."""

from __future__ import annotations

import json

import pytest

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
from atoll.telemetry.async_summary import AsynchronySummary, asynchrony_of, read_asynchrony
from tests import samples


def dispatched(island: int, number: int, at_s: float, *, version: int = 0, shard: int = 0) -> Dispatched:
    """The weights take half a second to reach the worker."""
    return Dispatched(
        island=island,
        round=number,
        version=version,
        shard=shard,
        start=0,
        schedule=0,
        steps=4,
        virtual_time_s=at_s,
        begin_s=at_s + 0.5,
        sent_bytes=8,
    )


def computed(island: int, number: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=number, start_s=start_s, end_s=end_s, steps=4, batches=4, tokens=8, loss=2.0)


def arrived(
    island: int, number: int, at_s: float, *, window: int = 0, staleness: int = 0, shard: int = 0, applied: bool = True
) -> Arrived:
    """The update took a quarter of a second to reach the hub."""
    return samples.arrived(
        island=island,
        round=number,
        window=window,
        shard=shard,
        steps=4,
        pushed_s=at_s - 0.25,
        virtual_time_s=at_s,
        staleness=staleness,
        applied=applied,
        sent_bytes=8,
    )


def summarize(*events: Event) -> AsynchronySummary:
    summary = asynchrony_of(events)
    assert summary is not None
    return summary


def parts(summary: AsynchronySummary, number: int = 0) -> tuple[float, ...]:
    """Where a worker's time went: computing, talking, waiting, unfinished; and how long it was there."""
    worker = summary.workers[number]
    return worker.computed_s, worker.talked_s, worker.waited_s, worker.unfinished_s, worker.present_s


@pytest.mark.parametrize("grace_s", [0.0, 2.0, 100.0])
@pytest.mark.parametrize("finished", [True, False])
def test_every_second_of_a_worker_counts_in_one_part(tmp_path, async_script, grace_s: float, finished: bool) -> None:
    run = async_script(grace_s=grace_s, rounds=20, finished=finished)
    summary = read_asynchrony(run.write(tmp_path / "run"))
    for worker in summary.workers:
        assert worker.computed_s + worker.talked_s + worker.waited_s + worker.unfinished_s == pytest.approx(worker.present_s)
        assert worker.computed_s == worker.steps * run.step_s[worker.island]
        assert worker.talked_s == worker.rounds * 2 * run.transfer_s
        assert worker.idle_s == worker.waited_s + worker.talked_s
    assert sum(worker.rounds for worker in summary.workers) == summary.arrivals == run.rounds


def test_waiting_agrees_with_the_windows(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    summary = read_asynchrony(run.write(tmp_path / "run"))
    said = dict.fromkeys(range(run.islands), 0.0)
    for event in run.events():
        if isinstance(event, WindowClosed):
            for island, idle_s in zip(event.islands, event.idle_s, strict=True):
                said[island] += idle_s
    assert sum(said.values()) > 0
    assert {worker.island: worker.waited_s for worker in summary.workers} == pytest.approx(said)


def test_staleness_and_windows_are_counted_from_the_arrivals(tmp_path, async_script) -> None:
    run = async_script(rounds=20)
    summary = read_asynchrony(run.write(tmp_path / "run"))
    arrivals = [event for event in run.events() if isinstance(event, Arrived)]
    windows = [event for event in run.events() if isinstance(event, WindowClosed)]
    assert summary.staleness.mean == pytest.approx(sum(event.staleness for event in arrivals) / len(arrivals))
    assert summary.staleness.max == max(event.staleness for event in arrivals)
    assert sum(summary.staleness.counts.values()) == len(arrivals)
    assert summary.windows == len(windows) == sum(summary.arrivals_per_window.counts.values())
    assert sum(size * times for size, times in summary.arrivals_per_window.counts.items()) == len(arrivals)
    assert summary.arrivals_per_window.max == max(len(event.islands) for event in windows)


def test_steps_per_shard_are_those_that_arrived() -> None:
    summary = summarize(
        dispatched(0, 0, 0.0, shard=5), dispatched(1, 1, 0.0, shard=2), arrived(1, 1, 3.0, shard=2), dispatched(1, 2, 3.0, shard=2)
    )
    assert summary.steps_per_shard == {2: 4}


def test_an_update_that_was_left_out_arrived_but_was_not_applied() -> None:
    summary = summarize(
        dispatched(0, 0, 0.0), arrived(0, 0, 3.0, staleness=9, applied=False), dispatched(0, 1, 3.0), arrived(0, 1, 6.0)
    )
    assert (summary.arrivals, summary.applied, summary.left_out) == (2, 1, 1)
    assert summary.staleness.counts == {0: 1, 9: 1}


def test_the_time_of_a_worker_that_dies_in_mid_round_is_unfinished() -> None:
    summary = summarize(
        dispatched(0, 0, 0.0),
        dispatched(1, 1, 0.0),
        IslandLeft(island=0, round=0, virtual_time_s=2.0),
        Returned(island=0, round=0, shard=0, steps=4, virtual_time_s=2.0),
        IslandJoined(island=0, round=1, virtual_time_s=10.0, donor=None, sent_bytes=0),
        dispatched(0, 2, 10.5),
        computed(0, 2, 11.0, 12.0),
        arrived(0, 2, 12.25, window=1),
    )
    assert parts(summary, 0) == (1.0, 0.75, 0.5, 2.0, 4.25)
    assert parts(summary, 1) == (0.0, 0.0, 0.0, 12.25, 12.25)
    assert (summary.returned, summary.refused, summary.arrivals) == (1, 0, 1)


def test_it_does_not_matter_whether_the_round_or_the_worker_is_reported_lost_first() -> None:
    left, returned = (
        IslandLeft(island=0, round=0, virtual_time_s=2.0),
        Returned(island=0, round=0, shard=0, steps=4, virtual_time_s=2.0),
    )
    assert summarize(dispatched(0, 0, 0.0), left, returned) == summarize(dispatched(0, 0, 0.0), returned, left)


def test_a_worker_that_leaves_while_it_waits_in_a_window_has_waited() -> None:
    events = (
        dispatched(0, 0, 0.0),
        computed(0, 0, 0.5, 2.0),
        arrived(0, 0, 2.25),
        IslandLeft(island=0, round=1, virtual_time_s=4.0),
    )
    assert parts(summarize(*events)) == (1.5, 0.75, 1.75, 0.0, 4.0)


def test_a_refused_round_is_lost_once_and_a_second_delivery_ends_no_round() -> None:
    first = (dispatched(0, 0, 0.0), computed(0, 0, 0.5, 2.0), Refused(island=0, round=0, virtual_time_s=2.25, reason="NaN"))
    again = (dispatched(0, 1, 3.0), Refused(island=0, round=0, virtual_time_s=3.5, reason="delivered twice"))
    stranger = Refused(island=77, round=9, virtual_time_s=4.0, reason="unknown")
    summary = summarize(*first, *again, stranger, computed(0, 1, 3.5, 5.0), arrived(0, 1, 5.25))
    assert summary.refused == 3
    assert [worker.island for worker in summary.workers] == [0]
    assert parts(summary) == (3.0, 0.75, 0.75, 0.75, 5.25)


def test_a_round_under_way_at_the_end_is_neither_computing_nor_idle() -> None:
    end = RunFinished(
        rounds=0,
        outer_steps=0,
        steps=0,
        tokens=0,
        warm_start_tokens=0,
        local_updates=0,
        virtual_time_s=8.0,
        utilisation=None,
        sent_bytes_per_island=0.0,
        control_bytes_per_island=0.0,
        val_loss=1.0,
        digest="",
    )
    assert parts(summarize(dispatched(0, 0, 0.0), end)) == (0.0, 0.0, 0.0, 8.0, 8.0)


def test_a_synchronous_run_has_no_asynchrony(tmp_path, script) -> None:
    assert read_asynchrony(script().write(tmp_path / "run")) is None


def test_the_figures_read_back_from_json_as_they_were(tmp_path, async_script) -> None:
    record = read_asynchrony(async_script().write(tmp_path / "run")).to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["workers"][0].keys() >= {"computed_s", "waited_s", "talked_s", "present_s", "idle_s", "rounds", "steps"}
