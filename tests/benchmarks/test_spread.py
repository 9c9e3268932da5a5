"""Intervals and verdicts: what seeds share does not hide a difference, and one seed gives none."""

import pytest


@pytest.mark.parametrize("ours", [(2.3, 2.5, 2.35), (1.0, 1.5, 0.5, 2.0, 1.25, 1.75)])
def test_the_interval_is_the_paired_t_interval(b, ours):
    stats = pytest.importorskip("scipy.stats")
    theirs = tuple(value + 0.1 * (-1) ** at + 0.01 * at for at, value in enumerate(ours))
    found = b.spread.difference(b.spread.Sample(ours), b.spread.Sample(theirs))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=2e-3)


def test_what_all_seeds_share_does_not_hide_a_difference(b):
    ours, theirs = b.spread.Sample((1.0, 5.0, 9.0)), b.spread.Sample((1.1, 5.1, 9.11))
    assert b.spread.verdict(b.spread.difference(ours, theirs)) == "lower"
    assert b.spread.verdict(b.spread.difference(theirs, ours)) == "higher"
    assert b.spread.verdict(b.spread.difference(ours, ours)) == "none"


def test_one_seed_gives_no_verdict(b):
    one, two = b.spread.Sample((1.0,)), b.spread.Sample((2.0,))
    assert b.spread.verdict(b.spread.difference(one, two)) == "one seed"
