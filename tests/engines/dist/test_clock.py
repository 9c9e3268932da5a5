"""How long an exchange may take: derived from what was seen, unless it is given."""

import pytest

from atoll.engines.dist.clock import FIRST_LIMIT_S, LEAST_LIMIT_S, PATIENCE, Limit, WallClock


def test_before_anything_was_seen_the_limit_is_long_and_says_what_it_will_become():
    limit = Limit()
    assert limit.limit_s == FIRST_LIMIT_S
    assert "before the first exchange" in limit.why
    assert f"{LEAST_LIMIT_S:g} s" in limit.why


@pytest.mark.parametrize(("seen_s", "limit_s"), [([0.01], LEAST_LIMIT_S), ([7.0], 70.0), ([7.0, 30.0, 2.0], 30.0 * PATIENCE)])
def test_the_limit_is_ten_times_the_longest_interval_and_a_minute_at_least(seen_s, limit_s):
    limit = Limit()
    for interval_s in seen_s:
        limit.saw(interval_s)
    assert limit.limit_s == limit_s
    assert f"{max(seen_s):.3g} s" in limit.why


def test_a_limit_that_was_given_stays_whatever_is_seen():
    limit = Limit(2.5)
    limit.saw(100.0)
    assert (limit.limit_s, limit.why) == (2.5, "as given")


def test_a_clock_goes_on_from_where_it_is_set():
    clock = WallClock()
    assert 0 <= clock.now_s() < 60
    clock.set(1000.0)
    assert 1000 <= clock.now_s() < 1060
    assert clock.now_s() <= clock.now_s()
