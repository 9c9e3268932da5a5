"""The running totals agree with what an engine reports at the end."""

from __future__ import annotations

import pytest

from atoll.core.events import Arrived, Computed, Dispatched, IslandJoined, IslandLeft, Refused, Returned, RoundFinished, RunStarted
from atoll.telemetry.run_progress import RunningTotals


def started(islands: int) -> RunStarted:
    return RunStarted(recipe="demo", algorithm="DDP", islands=islands, params=1, steps=10, seed=0)


def computed(island: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=1, start_s=start_s, end_s=end_s, steps=1, batches=1, tokens=1, loss=1.0)


def test_utilisation_equals_the_engines_at_the_end(script) -> None:
    totals = RunningTotals()
    for event in script(islands=3).events():
        totals.take(event)
    assert totals.utilisation(totals.finished.virtual_time_s) == pytest.approx(totals.finished.utilisation)


def test_an_island_counts_only_while_it_is_present() -> None:
    totals = RunningTotals()
    for event in (
        started(2),
        computed(0, 0.0, 10.0),
        computed(1, 0.0, 1.0),
        IslandLeft(island=1, round=1, virtual_time_s=2.0),
        IslandJoined(island=1, round=2, virtual_time_s=8.0, donor=0, sent_bytes=4),
        computed(1, 8.0, 9.0),
    ):
        totals.take(event)
    assert totals.utilisation(10.0) == pytest.approx((10 / 10 + 2 / 4) / 2)


def test_utilisation_is_unknown_without_the_beginning_of_the_log() -> None:
    totals = RunningTotals()
    totals.take(computed(0, 50.0, 60.0))
    assert totals.utilisation(60.0) is None


def test_utilisation_is_unknown_without_reported_work() -> None:
    totals = RunningTotals()
    totals.take(started(2))
    assert totals.utilisation(60.0) is None


def test_work_reported_ahead_of_time_does_not_exceed_the_whole() -> None:
    totals = RunningTotals()
    totals.take(started(1))
    totals.take(computed(0, 0.0, 10.0))
    assert totals.utilisation(4.0) == 1.0


def sent_off(island: int, begin_s: float, number: int = 1) -> Dispatched:
    places = {"version": 0, "shard": 0, "start": 0, "schedule": 0}
    return Dispatched(island=island, round=number, steps=4, virtual_time_s=begin_s - 1.0, begin_s=begin_s, sent_bytes=8, **places)


def four_steps(island: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=1, start_s=start_s, end_s=end_s, steps=4, batches=4, tokens=1, loss=1.0)


def utilisation(now_s: float, *events) -> float | None:
    totals = RunningTotals()
    for event in events:
        totals.take(event)
    return totals.utilisation(now_s)


def test_utilisation_of_a_run_with_a_hub_is_what_its_workers_really_computed(async_script) -> None:
    """A worker computes for steps * step_s, beginning when it has the weights, whether or not it has arrived yet."""
    run = async_script(rounds=40, transfer_s=0.25)
    events = list(run.events())
    for until in (event for event in events if isinstance(event, RoundFinished) and event.round > 8):
        seen = events[: events.index(until) + 1]
        now_s, really = until.virtual_time_s, dict.fromkeys(range(run.islands), 0.0)
        for event in seen:
            if isinstance(event, Dispatched):
                length_s = run.steps_per_round * run.step_s[event.island]
                really[event.island] += min(length_s, max(0.0, now_s - event.begin_s))
        assert utilisation(now_s, *seen) == pytest.approx(sum(really.values()) / run.islands / now_s)


def test_a_round_under_way_counts_at_the_speed_of_the_last() -> None:
    first = (started(1), sent_off(0, 1.0), four_steps(0, 1.0, 3.0), sent_off(0, 5.0, number=2))
    assert utilisation(6.0, *first) == pytest.approx((2 + 1) / 6)
    assert utilisation(10.0, *first) == pytest.approx((2 + 2) / 10), "it has been sending its update since 7.0"


def test_a_worker_that_has_not_arrived_yet_is_busy_since_it_has_the_weights() -> None:
    assert utilisation(8.0, started(2), sent_off(0, 1.0), sent_off(1, 1.0), four_steps(0, 1.0, 5.0)) == pytest.approx(
        (4 / 8 + 7 / 8) / 2
    )


@pytest.mark.parametrize(
    "end",
    [
        Returned(island=0, round=1, shard=0, steps=4, virtual_time_s=4.0),
        Refused(island=0, round=1, virtual_time_s=4.0, reason="not finite"),
    ],
)
def test_a_lost_round_has_taken_its_time_and_takes_no_more(end) -> None:
    other = four_steps(1, 1.0, 1.0)
    assert utilisation(10.0, started(1), sent_off(0, 1.0), other, end) == pytest.approx(3 / 10)


def test_a_second_delivery_does_not_end_the_round_under_way() -> None:
    twice = Refused(island=0, round=1, virtual_time_s=6.0, reason="delivered twice")
    begun = (started(1), sent_off(0, 1.0), four_steps(0, 1.0, 5.0), sent_off(0, 6.0, number=2))
    assert utilisation(8.0, *begun, twice) == utilisation(8.0, *begun) == pytest.approx((4 + 2) / 8)


def test_an_island_that_is_to_join_later_is_not_idle_before() -> None:
    joined = IslandJoined(island=1, round=3, virtual_time_s=7.0, donor=None, sent_bytes=0)
    alone = (started(2), sent_off(0, 1.0), four_steps(0, 1.0, 5.0))
    assert utilisation(8.0, *alone) == pytest.approx(4 / 8)
    assert utilisation(8.0, *alone, joined) == pytest.approx((4 / 8 + 0) / 2)


def test_staleness_is_that_of_the_last_arrivals(async_script) -> None:
    totals = RunningTotals()
    assert totals.staleness() is None
    events = list(async_script(rounds=50).events())
    for event in events:
        totals.take(event)
    last = [event.staleness for event in events if isinstance(event, Arrived)][-20:]
    assert totals.staleness() == pytest.approx(sum(last) / 20)
