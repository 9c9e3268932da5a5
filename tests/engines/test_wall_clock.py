"""The timeout of exchanges: derived from the intervals so far and the one under way, or fixed."""

import pytest

from atoll.engines.wall_clock import FIRST_TIMEOUT_S, INTERVALS, LEAST_TIMEOUT_S, ExchangeTimeout, WallClock


class ManualClock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def exchange(timeout, clock, computed_s, took_s=0.0):
    """The timeout of an exchange of `took_s` seconds after `computed_s` seconds of computing."""
    clock.now_s += computed_s
    timeout_s = timeout.start()
    clock.now_s += took_s
    timeout.finish()
    return timeout_s


def test_the_first_timeout_is_long_and_its_reason_tells_the_rule():
    timeout = ExchangeTimeout()
    assert timeout.start() == FIRST_TIMEOUT_S
    assert "before the first exchange" in timeout.reason
    assert f"{LEAST_TIMEOUT_S:g} s" in timeout.reason


@pytest.mark.parametrize(
    ("intervals_s", "timeout_s"), [([0.01], LEAST_TIMEOUT_S), ([7.0], 70.0), ([7.0, 30.0, 2.0], 30.0 * INTERVALS)]
)
def test_the_timeout_is_ten_times_the_longest_interval_and_at_least_a_minute(intervals_s, timeout_s):
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    for interval_s in intervals_s:
        exchange(timeout, clock, interval_s)
    assert timeout.start() == pytest.approx(timeout_s)
    assert f"{max(intervals_s):.3g} s" in timeout.reason


def test_the_interval_under_way_counts():
    """Rounds of 20 minutes here and of 40 minutes elsewhere: each exchange takes 20 minutes of waiting."""
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    assert [exchange(timeout, clock, 1200.0, 1200.0) for _ in range(3)] == [12000.0, 24000.0, 24000.0]


def test_waiting_for_peers_is_part_of_the_interval():
    clock = ManualClock()
    timeout = ExchangeTimeout(now=clock)
    exchange(timeout, clock, 1.0, 99.0)
    assert exchange(timeout, clock, 1.0) == 1000.0


def test_a_fixed_timeout_never_changes():
    clock = ManualClock()
    timeout = ExchangeTimeout(2.5, now=clock)
    exchange(timeout, clock, 100.0)
    assert (timeout.start(), timeout.timeout_s, timeout.reason) == (2.5, 2.5, "as given")


def test_a_clock_continues_from_where_it_is_set():
    clock = WallClock()
    assert 0 <= clock.now_s() < 60
    clock.set(1000.0)
    assert 1000 <= clock.now_s() < 1060
    assert clock.now_s() <= clock.now_s()
