import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from atoll.core.errors import ConfigError
from atoll.optim.schedules import WSD, Constant, Cosine, at

COSINE = Cosine(lr=4e-4, steps=1000, warmup=100, floor=4e-5)
STABLE = WSD(lr=4e-4, steps=1000, warmup=100, decay=200, floor=4e-5)


def test_a_number_is_its_own_schedule():
    assert at(0.7, 0) == at(0.7, 10**9) == 0.7


def test_a_schedule_is_asked_for_its_step():
    assert at(COSINE, 17) == COSINE(17)
    assert at(Constant(lr=0.3), 17) == 0.3


@pytest.mark.parametrize("schedule", [COSINE, STABLE])
def test_warm_up_wastes_no_step_and_ends_at_the_peak(schedule):
    assert schedule(0) == schedule.lr / schedule.warmup
    assert schedule(49) == schedule.lr / 2
    assert schedule(99) == schedule(100) == schedule.lr


def test_cosine_is_half_way_down_at_half_time_and_at_the_floor_at_the_end():
    assert COSINE(550) == pytest.approx((COSINE.lr + COSINE.floor) / 2)
    assert COSINE(1000) == COSINE.floor
    assert COSINE(999) > COSINE.floor


def test_cosine_after_the_warm_up_is_equation_3_of_the_asynchronous_paper():
    for t in range(100, 1000):
        wave = 0.5 * (COSINE.lr - COSINE.floor) * (1 + math.cos(math.pi * (t - 100) / (1000 - 100)))
        assert COSINE(t) == pytest.approx(COSINE.floor + wave, rel=1e-12)


@pytest.mark.parametrize("schedule", [COSINE, STABLE])
def test_beyond_its_end_a_schedule_stays_at_the_floor(schedule):
    assert schedule(1000) == schedule(1001) == schedule(10**9) == schedule.floor


def test_stable_part_does_not_depend_on_the_length():
    longer = replace(STABLE, steps=2000)
    assert [STABLE(step) for step in range(800)] == [longer(step) for step in range(800)]
    assert longer(900) == longer.lr > STABLE(900)


def test_decay_is_a_straight_line():
    drops = [STABLE(step) - STABLE(step + 1) for step in range(800, 1000)]
    assert drops == pytest.approx([(STABLE.lr - STABLE.floor) / 200] * 200)


def test_without_decay_the_rate_stays_for_ever():
    assert WSD(lr=0.3, steps=10, warmup=2, decay=0)(10**9) == 0.3


def test_a_warm_up_as_long_as_the_training_is_followed_by_the_floor():
    schedule = Cosine(lr=1.0, steps=5, warmup=5, floor=0.1)
    assert [schedule(step) for step in (3, 4, 5)] == [0.8, 1.0, 0.1]


@given(st.floats(1e-9, 10), st.integers(1, 500), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_no_schedule_leaves_its_bounds(lr, steps, warm, late, low, step):
    warmup = int(warm * steps)
    decay = int(late * (steps - warmup))
    schedules = (
        Cosine(lr=lr, steps=steps, warmup=warmup, floor=low * lr),
        WSD(lr=lr, steps=steps, warmup=warmup, decay=decay, floor=low * lr),
    )
    for schedule in schedules:
        lowest = 0 if step < warmup else schedule.floor
        assert lowest <= schedule(step) <= lr or math.isclose(schedule(step), lr, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(lr=-1.0), r"lr=-1.0 must be"),
        (lambda: Cosine(lr=math.nan, steps=5), r"lr=nan must be"),
        (lambda: Cosine(lr=1.0, steps=0), r"steps=0: a schedule needs at least 1 step"),
        (lambda: Cosine(lr=1.0, steps=5, warmup=6), r"warmup=6 is outside \[0, steps=5\]"),
        (lambda: Cosine(lr=1.0, steps=5, warmup=-1), r"warmup=-1 is outside"),
        (lambda: Cosine(lr=1.0, steps=5, floor=2.0), r"floor=2.0 is outside \[0, lr=1.0\]"),
        (lambda: WSD(lr=1.0, steps=5, warmup=3, decay=3), r"warmup=3 and decay=3 do not fit into steps=5"),
        (lambda: WSD(lr=1.0, steps=5, decay=-1), r"decay=-1 do not fit"),
        (lambda: WSD(lr=1.0, steps=5, decay=1, floor=-0.1), r"floor=-0.1 is outside"),
    ],
)
def test_impossible_settings_are_refused_with_advice(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("schedule", [Cosine(lr=1.0, warmup=2), WSD(lr=1.0, warmup=2, decay=3)])
def test_a_schedule_of_open_length_says_so_when_it_is_asked_beyond_its_warm_up(schedule):
    assert schedule(1) == 1.0
    with pytest.raises(ConfigError, match=r"steps=None.*Give it steps"):
        schedule(5)
