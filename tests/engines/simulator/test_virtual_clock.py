"""Virtual time: deterministic, and never idle."""

import pytest

from atoll.engines.simulator.virtual_clock import VirtualClock, Wait


def after(seconds, value=None):
    return Wait(lambda task: task.resume_at(task.now_s + seconds, lambda: value))


def test_tasks_go_on_in_order_of_time_and_then_of_filing():
    seen, loop = [], VirtualClock()

    async def walk(name, *seconds):
        for pause in seconds:
            await after(pause)
            seen.append(name)

    loop.spawn("a", walk("a", 3.0, 1.0), 0.0)
    loop.spawn("b", walk("b", 1.0, 2.0, 1.0), 0.0)
    assert loop.run() == []
    assert seen == ["b", "a", "b", "a", "b"]  # at 3 both are due: a filed first; at 4 a filed first again


def test_a_long_wait_costs_no_time_and_the_clock_shows_it():
    loop = VirtualClock()

    async def sleeper():
        return await after(1e9, "rested")

    task = loop.spawn("sleeper", sleeper(), 5.0)
    loop.run()
    assert (task.result, task.now_s) == ("rested", 5.0 + 1e9)


def test_a_task_that_waits_for_nothing_is_named():
    loop = VirtualClock()

    async def forlorn():
        await Wait(lambda task: None)

    loop.spawn("forlorn", forlorn(), 0.0)
    assert [task.name for task in loop.run()] == ["forlorn"]


def test_an_error_in_one_task_closes_the_others_and_comes_out():
    loop, closed = VirtualClock(), []

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

    loop = VirtualClock()
    loop.spawn("lost", lost(), 0.0)
    with pytest.raises(AssertionError, match="only what the engine hands out"):
        loop.run()


def test_a_run_can_be_stopped_after_anything_that_happened_and_goes_on_from_there():
    seen, loop = [], VirtualClock()

    async def count(name):
        for number in range(3):
            await after(1.0)
            seen.append((name, number))

    loop.spawn("a", count("a"), 0.0)
    loop.spawn("b", count("b"), 0.5)
    assert [task.name for task in loop.run(stop=lambda: len(seen) == 3)] == ["a", "b"]
    assert seen == [("a", 0), ("b", 0), ("a", 1)]
    assert loop.run() == []
    assert seen[3:] == [("b", 1), ("a", 2), ("b", 2)]


def test_what_is_filed_for_a_task_that_was_closed_no_longer_happens():
    seen, loop = [], VirtualClock()

    async def worker():
        try:
            await Wait(lambda task: task.resume_at(10.0, lambda: seen.append("asked")))
        finally:
            seen.append("closed")

    async def reaper(task):
        await after(5.0)
        task.close()

    loop.spawn("reaper", reaper(loop.spawn("worker", worker(), 0.0)), 0.0)
    assert loop.run() == []
    assert seen == ["closed"]
    assert not loop.tasks


def test_a_value_is_asked_for_only_when_its_time_has_come():
    seen, loop = [], VirtualClock()

    async def early():
        await Wait(lambda task: task.resume_at(2.0, lambda: seen.append("value")))

    async def other():
        await after(1.0)
        seen.append("other")

    loop.spawn("early", early(), 0.0)
    loop.spawn("other", other(), 0.0)
    loop.run()
    assert seen == ["other", "value"]


def test_whoever_waits_for_a_task_is_told_before_anybody_else_goes_on():
    seen, loop = [], VirtualClock()

    async def worker():
        return await after(1.0, "done")

    async def other():
        await after(1.0)
        seen.append("other")

    loop.spawn("worker", worker(), 0.0, on_done=lambda task: seen.append((task.name, task.result)))
    loop.spawn("other", other(), 0.0)
    loop.run()
    assert seen == [("worker", "done"), "other"]


def test_a_loop_that_is_closed_before_it_ran_leaves_no_coroutine_behind():
    loop = VirtualClock()

    async def never():
        raise AssertionError

    task = loop.spawn("never", never(), 0.0)
    loop.close()
    assert task.done
    assert loop.run() == []
