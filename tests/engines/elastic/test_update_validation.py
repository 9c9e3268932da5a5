"""Whose delta is refused."""

import math

from atoll.engines.elastic.update_validation import Brought, Judge

SOUND = Brought(1.0, True, 2.0)


def test_what_is_not_finite_is_refused_from_the_first_round_on():
    assert Judge(10).refused([SOUND, Brought(1.0, False, 0.0)]) == {1: "its delta is not finite"}


def test_nobody_is_absurd_before_anything_is_usual():
    judge = Judge(10)
    for _ in range(2):
        assert judge.refused([SOUND, Brought(1.0, True, 1e9)]) == {}
        judge.remember([SOUND], refused={})
    judge.remember([SOUND], refused={})
    assert list(judge.refused([SOUND, Brought(1.0, True, 20.1)])) == [1]
    assert judge.refused([SOUND, Brought(1.0, True, 19.9)]) == {}


def test_in_the_first_rounds_three_islands_tell_which_of_them_is_absurd():
    assert list(Judge(10).refused([SOUND, Brought(1.0, True, 1e9), SOUND])) == [1]
    assert Judge(10).refused([SOUND, Brought(1.0, True, 1e9), Brought(0.0, True, 0.0)]) == {}, "two cannot tell"


def test_deltas_of_nothing_make_nothing_absurd():
    judge = Judge(10)
    for _ in range(3):
        judge.remember([Brought(1.0, True, 0.0)], refused={})
    assert judge.refused([SOUND]) == {}


def test_what_was_refused_does_not_make_the_next_one_usual():
    judge, absurd = Judge(10), Brought(1.0, True, 1e6)
    for _ in range(3):
        judge.remember([SOUND], refused={})
    for _ in range(40):
        refused = judge.refused([SOUND, absurd])
        assert list(refused) == [1]
        judge.remember([SOUND, absurd], refused)


def test_an_island_without_work_is_neither_refused_nor_remembered():
    judge, idle = Judge(10), Brought(0.0, True, 0.0)
    for _ in range(5):
        judge.remember([SOUND, idle], refused={})
    assert judge.refused([idle, SOUND]) == {}
    judge.remember([idle], refused={})
    assert judge.to_parts() == {"norms": [2.0] * 5}


def test_infinity_refuses_only_what_is_not_finite():
    judge = Judge(math.inf)
    for _ in range(5):
        judge.remember([SOUND], refused={})
    assert judge.refused([Brought(1.0, True, 1e300)]) == {}


def test_a_judge_goes_on_from_its_parts():
    judge, other = Judge(10), Judge(10)
    for norm in (1.0, 2.0, 3.0):
        judge.remember([Brought(1.0, True, norm)], refused={})
    other.from_parts(judge.to_parts())
    assert other.refused([Brought(1.0, True, 21.0)]) == judge.refused([Brought(1.0, True, 21.0)]) != {}
