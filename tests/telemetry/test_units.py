"""Units for display, to three digits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from atoll.telemetry.units import human_bytes, human_count, human_fraction, human_loss, human_percent, human_time, human_times

SCALES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


@given(st.integers(min_value=1, max_value=10**17))
def test_bytes_read_back_to_within_half_a_percent(size_bytes: int) -> None:
    number, unit = human_bytes(size_bytes).split()
    assert math.isclose(float(number) * SCALES[unit], size_bytes, rel_tol=0.0051)


@given(st.integers(min_value=0, max_value=10**17))
def test_no_number_before_a_unit_reaches_a_thousand(size_bytes: int) -> None:
    assert float(human_bytes(size_bytes).split()[0]) < 1000


@given(st.floats(min_value=0, max_value=1e7))
def test_times_read_back_to_within_their_last_digit(time_s: float) -> None:
    hours, minutes, seconds = human_time(time_s).split(":")
    assert int(minutes) < 60
    assert float(seconds) < 60
    shown_s = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    assert abs(shown_s - time_s) <= (0.000501 if time_s < 9.9995 else 0.0501 if time_s < 59.95 else 0.501)


@given(st.floats(min_value=1e-6, max_value=1.0, exclude_max=True))
def test_a_fraction_is_within_two_percent_or_half_a_hundredth_of_the_ratio(ratio: float) -> None:
    text = human_fraction(ratio)
    value = 1 / float(text.removeprefix("1/")) if text.startswith("1/") else float(text)
    assert math.isclose(value, ratio, rel_tol=0.021, abs_tol=0.0051)


@pytest.mark.parametrize("show", [human_bytes, human_count, human_time, human_percent, human_times, human_loss])
def test_what_is_not_finite_is_shown_and_does_not_raise(show) -> None:
    assert show(math.nan) == "NaN"
    assert show(math.inf) == "infinite"
    assert show(-math.inf) == "-infinite"


def test_a_negative_time_keeps_its_sign() -> None:
    assert human_time(-61.0) == "-0:01:01"
