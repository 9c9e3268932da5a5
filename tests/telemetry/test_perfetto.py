"""Spans on a row are cut so that none overlaps another, and nothing but waiting gives way."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.telemetry.perfetto import Span, without_overlaps


def span(start_ns: int, end_ns: int, *, filler: bool = False) -> Span:
    return Span(start_ns=start_ns, end_ns=end_ns, name="s", category="c", args={}, filler=filler)


def bounds(spans: list[Span]) -> list[tuple[int, int, bool]]:
    return [(one.start_ns, one.end_ns, one.filler) for one in spans]


spans = st.builds(
    lambda start_ns, length_ns, filler: span(start_ns, start_ns + length_ns, filler=filler),
    st.integers(0, 60),
    st.integers(0, 20),
    st.booleans(),
)


@given(st.lists(spans, max_size=12))
def test_no_two_spans_overlap_and_no_covered_time_is_lost(given_spans: list[Span]) -> None:
    kept = without_overlaps(given_spans)
    assert all(one.end_ns <= two.start_ns for one, two in pairwise(kept))
    assert {ns for one in kept for ns in range(one.start_ns, one.end_ns)} == {
        ns for one in given_spans for ns in range(one.start_ns, one.end_ns)
    }


def test_waiting_fills_only_what_nothing_else_takes() -> None:
    kept = without_overlaps([span(0, 10, filler=True), span(2, 4), span(6, 7)])
    assert bounds(kept) == [(0, 2, True), (2, 4, False), (4, 6, True), (6, 7, False), (7, 10, True)]


def test_a_span_that_begins_early_begins_where_the_one_before_it_ends() -> None:
    assert bounds(without_overlaps([span(3, 9), span(0, 5)])) == [(0, 5, False), (5, 9, False)]


def test_spans_that_do_not_overlap_are_left_as_they_are() -> None:
    apart = [span(0, 2), span(2, 2), span(2, 5, filler=True), span(5, 6)]
    assert without_overlaps(apart) == apart
