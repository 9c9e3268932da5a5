"""What a hub tells is heard, also where an answer was lost."""

from atoll.core.events import Evaluated, Saved
from atoll.engines.ray.outbox import Tidings
from atoll.telemetry.sinks import Remembered


def saved(round):
    return Saved(round=round, name=f"{round:08d}")


def due(round):
    return Evaluated(
        round=round,
        steps=0,
        virtual_time_s=None,
        wall_time_s=1.0,
        tokens=0,
        local_updates=0,
        sent_bytes_per_island=0.0,
        metrics={},
    )


def test_an_answer_that_was_lost_is_given_again():
    tidings = Tidings(Remembered())
    for round in (1, 2):
        tidings.emit(saved(round))
    assert tidings.since(0) == tidings.since(0) == ([saved(1), saved(2)], 2)
    tidings.emit(saved(3))
    assert tidings.is_new(2, 0)
    assert tidings.since(2) == ([saved(3)], 3)
    assert not tidings.is_new(3, 0)


def test_what_is_to_be_judged_is_handed_out_until_somebody_has_it_and_answered_once():
    tidings = Tidings(Remembered())
    tidings.file(due(1), "weights", {})
    tidings.file(due(2), "weights", {})
    assert [one.number for one in tidings.to_judge(0)] == [one.number for one in tidings.to_judge(0)] == [1, 2]
    assert [one.number for one in tidings.to_judge(1)] == [2]
    assert tidings.take_back(1) == due(1)
    assert tidings.take_back(1) is None
    assert tidings.waiting == 1
    tidings.take_back(2)
    assert tidings.waiting == 0
