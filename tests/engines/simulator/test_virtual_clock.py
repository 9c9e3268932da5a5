"""Virtual time: deterministic, and never idle."""

import pytest

from atoll.engines.simulator.virtual_clock import VirtualClock, Wait


def after(seconds, value=None):
    return Wait(lambda task: task.resume_at(task.now_s + seconds, lambda: value))


def test_tasks_resume_in_order_of_time_then_of_scheduling():
    seen, clock = [], VirtualClock()

    async def walk(name, *seconds):
        for pause in seconds:
            await after(pause)
            seen.append(name)

    clock.spawn("a", walk("a", 3.0, 1.0), 0.0)
    clock.spawn("b", walk("b", 1.0, 2.0, 1.0), 0.0)
    assert clock.run() == []
    assert seen == ["b", "a", "b", "a", "b"]  # at 3 both are due: a filed first; at 4 a filed first again


def test_a_long_wait_costs_no_time_and_the_clock_shows_it():
    clock = VirtualClock()

    async def sleeper():
        return await after(1e9, "rested")

    task = clock.spawn("sleeper", sleeper(), 5.0)
    clock.run()
    assert (task.result, task.now_s) == ("rested", 5.0 + 1e9)


def test_a_task_that_never_resumes_is_named():
    clock = VirtualClock()

    async def forlorn():
        await Wait(lambda task: None)

    clock.spawn("forlorn", forlorn(), 0.0)
    assert [task.name for task in clock.run()] == ["forlorn"]


def test_an_error_in_one_task_closes_the_others_and_is_raised():
    clock, closed = VirtualClock(), []

    async def patient():
        try:
            await after(10)
        finally:
            closed.append(True)

    async def failing():
        await after(1)
        raise ZeroDivisionError

    clock.spawn("patient", patient(), 0.0)
    clock.spawn("failing", failing(), 0.0)
    with pytest.raises(ZeroDivisionError):
        clock.run()
    assert closed == [True]


def test_only_waits_of_the_engine_can_be_awaited():
    class Foreign:
        def __await__(self):
            yield "something else"

    async def lost():
        await Foreign()

    clock = VirtualClock()
    clock.spawn("lost", lost(), 0.0)
    with pytest.raises(AssertionError, match="await only what the engine"):
        clock.run()


def test_a_stopped_clock_continues_from_the_same_event():
    seen, clock = [], VirtualClock()

    async def count(name):
        for number in range(3):
            await after(1.0)
            seen.append((name, number))

    clock.spawn("a", count("a"), 0.0)
    clock.spawn("b", count("b"), 0.5)
    assert [task.name for task in clock.run(stop=lambda: len(seen) == 3)] == ["a", "b"]
    assert seen == [("a", 0), ("b", 0), ("a", 1)]
    assert clock.run() == []
    assert seen[3:] == [("b", 1), ("a", 2), ("b", 2)]


def test_a_closed_task_is_not_resumed():
    seen, clock = [], VirtualClock()

    async def worker():
        try:
            await Wait(lambda task: task.resume_at(10.0, lambda: seen.append("asked")))
        finally:
            seen.append("closed")

    async def reaper(task):
        await after(5.0)
        task.close()

    clock.spawn("reaper", reaper(clock.spawn("worker", worker(), 0.0)), 0.0)
    assert clock.run() == []
    assert seen == ["closed"]
    assert not clock.tasks


def test_a_value_is_computed_only_at_its_moment():
    seen, clock = [], VirtualClock()

    async def early():
        await Wait(lambda task: task.resume_at(2.0, lambda: seen.append("value")))

    async def other():
        await after(1.0)
        seen.append("other")

    clock.spawn("early", early(), 0.0)
    clock.spawn("other", other(), 0.0)
    clock.run()
    assert seen == ["other", "value"]


def test_on_done_is_called_before_other_tasks_resume():
    seen, clock = [], VirtualClock()

    async def worker():
        return await after(1.0, "done")

    async def other():
        await after(1.0)
        seen.append("other")

    clock.spawn("worker", worker(), 0.0, on_done=lambda task: seen.append((task.name, task.result)))
    clock.spawn("other", other(), 0.0)
    clock.run()
    assert seen == [("worker", "done"), "other"]


def test_closing_a_clock_that_never_ran_closes_its_coroutines():
    clock = VirtualClock()

    async def never():
        raise AssertionError

    task = clock.spawn("never", never(), 0.0)
    clock.close()
    assert task.done
    assert clock.run() == []
