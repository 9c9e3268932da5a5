"""The time limit of exchanges: derived from what was seen and from what is going on, or given."""

import pytest

from atoll.engines.processes.wall_clock import FIRST_LIMIT_S, LEAST_LIMIT_S, PATIENCE, Limit, WallClock


class Hands:
    """A clock that is set by hand."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def exchange(limit, hands, computed_s, took_s=0.0):
    """An exchange after so long: its limit."""
    hands.now_s += computed_s
    limit_s = limit.begin()
    hands.now_s += took_s
    limit.end()
    return limit_s


def test_before_anything_was_seen_the_limit_is_long_and_says_what_it_will_become():
    limit = Limit()
    assert limit.begin() == FIRST_LIMIT_S
    assert "before the first exchange" in limit.why
    assert f"{LEAST_LIMIT_S:g} s" in limit.why


@pytest.mark.parametrize(("seen_s", "limit_s"), [([0.01], LEAST_LIMIT_S), ([7.0], 70.0), ([7.0, 30.0, 2.0], 30.0 * PATIENCE)])
def test_the_limit_is_ten_times_the_longest_interval_and_a_minute_at_least(seen_s, limit_s):
    hands = Hands()
    limit = Limit(now=hands)
    for interval_s in seen_s:
        exchange(limit, hands, interval_s)
    assert limit.begin() == pytest.approx(limit_s)
    assert f"{max(seen_s):.3g} s" in limit.why


def test_islands_with_long_rounds_are_waited_for_in_the_first_round_and_in_the_second():
    """Rounds of 20 minutes here and of 40 elsewhere: each exchange takes 20 minutes of waiting."""
    hands = Hands()
    limit = Limit(now=hands)
    assert [exchange(limit, hands, 1200.0, 1200.0) for _ in range(3)] == [12000.0, 24000.0, 24000.0]


def test_waiting_for_others_is_part_of_the_interval():
    hands = Hands()
    limit = Limit(now=hands)
    exchange(limit, hands, 1.0, 99.0)
    assert exchange(limit, hands, 1.0) == 1000.0


def test_a_limit_that_was_given_stays_whatever_is_seen():
    hands = Hands()
    limit = Limit(2.5, now=hands)
    exchange(limit, hands, 100.0)
    assert (limit.begin(), limit.limit_s, limit.why) == (2.5, 2.5, "as given")


def test_a_clock_goes_on_from_where_it_is_set():
    clock = WallClock()
    assert 0 <= clock.now_s() < 60
    clock.set(1000.0)
    assert 1000 <= clock.now_s() < 1060
    assert clock.now_s() <= clock.now_s()
