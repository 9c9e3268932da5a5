"""Virtual time: deterministic, and never idle."""

import pytest

from atoll.engines.sim.clock import Loop, Wait


def after(seconds, value=None):
    return Wait(lambda task: task.resume_at(task.now_s + seconds, lambda: value))


def test_tasks_go_on_in_order_of_time_and_then_of_filing():
    seen, loop = [], Loop()

    async def walk(name, *seconds):
        for pause in seconds:
            await after(pause)
            seen.append(name)

    loop.spawn("a", walk("a", 3.0, 1.0), 0.0)
    loop.spawn("b", walk("b", 1.0, 2.0, 1.0), 0.0)
    assert loop.run() == []
    assert seen == ["b", "a", "b", "a", "b"]  # at 3 both are due: a filed first; at 4 a filed first again


def test_a_long_wait_costs_no_time_and_the_clock_shows_it():
    loop = Loop()

    async def sleeper():
        return await after(1e9, "rested")

    task = loop.spawn("sleeper", sleeper(), 5.0)
    loop.run()
    assert (task.result, task.now_s) == ("rested", 5.0 + 1e9)


def test_a_task_that_waits_for_nothing_is_named():
    loop = Loop()

    async def forlorn():
        await Wait(lambda task: None)

    loop.spawn("forlorn", forlorn(), 0.0)
    assert [task.name for task in loop.run()] == ["forlorn"]


def test_an_error_in_one_task_closes_the_others_and_comes_out():
    loop, closed = Loop(), []

    async def patient():
        try:
            await after(10)
        finally:
            closed.append(True)

    async def failing():
        await after(1)
        raise ZeroDivisionError

    loop.spawn("patient", patient(), 0.0)
    loop.spawn("failing", failing(), 0.0)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert closed == [True]


def test_only_what_the_engine_hands_out_can_be_awaited():
    class Foreign:
        def __await__(self):
            yield "something else"

    async def lost():
        await Foreign()

    loop = Loop()
    loop.spawn("lost", lost(), 0.0)
    with pytest.raises(AssertionError, match="only what the engine hands out"):
        loop.run()
