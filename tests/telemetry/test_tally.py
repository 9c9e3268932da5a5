"""The running account agrees with what an engine reports at the end."""

from __future__ import annotations

import pytest

from atoll.events import Computed, IslandJoined, IslandLeft, RunStarted
from atoll.telemetry.tally import Tally


def started(islands: int) -> RunStarted:
    return RunStarted(recipe="demo", algorithm="DDP", islands=islands, params=1, steps=10, seed=0)


def computed(island: int, start_s: float, end_s: float) -> Computed:
    return Computed(island=island, round=1, start_s=start_s, end_s=end_s, steps=1, batches=1, tokens=1, loss=1.0)


def test_utilisation_equals_the_engines_at_the_end(script) -> None:
    tally = Tally()
    for event in script(islands=3).events():
        tally.take(event)
    assert tally.utilisation(tally.finished.virtual_time_s) == pytest.approx(tally.finished.utilisation)


def test_an_island_counts_only_while_it_is_there() -> None:
    tally = Tally()
    for event in (
        started(2),
        computed(0, 0.0, 10.0),
        computed(1, 0.0, 1.0),
        IslandLeft(island=1, round=1, virtual_time_s=2.0),
        IslandJoined(island=1, round=2, virtual_time_s=8.0, donor=0, sent_bytes=4),
        computed(1, 8.0, 9.0),
    ):
        tally.take(event)
    assert tally.utilisation(10.0) == pytest.approx((10 / 10 + 2 / 4) / 2)


def test_nothing_is_claimed_where_the_beginning_was_not_seen() -> None:
    tally = Tally()
    tally.take(computed(0, 50.0, 60.0))
    assert tally.utilisation(60.0) is None


def test_nothing_is_claimed_where_no_island_reports_its_work() -> None:
    tally = Tally()
    tally.take(started(2))
    assert tally.utilisation(60.0) is None


def test_work_reported_ahead_of_time_does_not_exceed_the_whole() -> None:
    tally = Tally()
    tally.take(started(1))
    tally.take(computed(0, 0.0, 10.0))
    assert tally.utilisation(4.0) == 1.0
