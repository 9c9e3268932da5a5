"""Intervals and verdicts over seeds."""

import pytest


@pytest.mark.parametrize("ours", [(2.3, 2.5, 2.35), (1.0, 1.5, 0.5, 2.0, 1.25, 1.75)])
def test_the_interval_is_the_paired_t_interval(b, ours):
    stats = pytest.importorskip("scipy.stats")
    theirs = tuple(value + 0.1 * (-1) ** at + 0.01 * at for at, value in enumerate(ours))
    found = b.seed_statistics.difference(b.seed_statistics.Sample(ours), b.seed_statistics.Sample(theirs))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=2e-3)


def test_a_seed_effect_does_not_hide_a_difference(b):
    ours, theirs = b.seed_statistics.Sample((1.0, 5.0, 9.0)), b.seed_statistics.Sample((1.1, 5.1, 9.11))
    assert b.seed_statistics.verdict(b.seed_statistics.difference(ours, theirs)) == "lower"
    assert b.seed_statistics.verdict(b.seed_statistics.difference(theirs, ours)) == "higher"
    assert b.seed_statistics.verdict(b.seed_statistics.difference(ours, ours)) == "none"


def test_one_seed_gives_no_verdict(b):
    one, two = b.seed_statistics.Sample((1.0,)), b.seed_statistics.Sample((2.0,))
    assert b.seed_statistics.verdict(b.seed_statistics.difference(one, two)) == "one seed"


def test_rows_with_one_seed_are_judged_by_the_scatter_of_rows_with_several(b):
    spread = b.seed_statistics
    figures = [spread.Sample((1.0, 2.0, 3.0)), spread.Sample((2.0, 3.0, 4.0))]
    assert spread.scatter(figures).std == pytest.approx(0.0), "rows with the same difference in every seed have no scatter"
    assert spread.scatter(figures[:1]) is None
    found = spread.Scatter(0.1, 2).about([(1.0, 5.0), (-1.0, 4.0)])
    assert (found.value, found.high) == (1.0, pytest.approx(1.0 + 4.303 * 0.1 * 2**0.5))
    assert spread.Scatter(0.1, 2).resolution == pytest.approx(4.303 * 0.1 * 2**0.5)


def test_the_scatter_is_of_rows_with_the_same_model_and_text_and_counts_a_run_once(b, small):
    def row(*settings):
        return b.cells.Row(recipe="demo-ddp", base=tuple(small), settings=settings)

    losses = {
        b.ablations.DEFAULT: ((), (1.0, 2.0, 3.0)),
        "the default's own name": (("train.steps=20",), (1.0, 2.0, 3.0)),
        "of a later group": (("train.steps=30",), (2.0, 3.1, 3.9)),
        "one seed": (("train.steps=40",), (7.0,)),
        "another text": (("data.limit_bytes=50000",), (9.0, 2.0, 5.0)),
        "another model": (("model.width=16", "model.heads=2"), (3.0, 8.0, 1.0)),
    }
    outcomes = {
        label: b.cells.Outcome(row(*settings), tuple({"val_loss": loss} for loss in found))
        for label, (settings, found) in losses.items()
    }
    both = [b.seed_statistics.Sample((1.0, 2.0, 3.0)), b.seed_statistics.Sample((2.0, 3.1, 3.9))]
    assert b.evidence.common_scatter(outcomes) == b.seed_statistics.scatter(both)
