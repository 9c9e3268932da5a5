"""Coroutines without an event loop: one thread computes, another one communicates."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atoll.engines.communication_thread import CommunicationThread, Request


@pytest.fixture
def thread():
    thread = CommunicationThread()
    yield thread
    thread.close()


def current():
    return threading.current_thread().name


def test_requests_run_on_the_communication_thread_and_the_rest_on_the_callers(thread):
    async def main():
        return current(), await Request(current), current()

    here, there, again = thread.run(main())
    assert (here, again) == (current(), current())
    assert there == "communication"


def test_a_launched_coroutine_starts_here_and_continues_in_the_background(thread):
    """What it copies before its first request is copied when `launch` returns."""
    gate, steps = threading.Event(), []

    async def background():
        steps.append(current())
        await Request(gate.wait)
        steps.append(current())
        return "there"

    async def main():
        task = thread.launch(background())
        assert steps == [current()]
        assert not task.done()
        gate.set()
        return await task, task.done()

    assert thread.run(main()) == ("there", True)
    assert steps[1] == "communication"


def test_a_launched_coroutine_without_a_request_is_done_at_once(thread):
    async def background():
        return 7

    async def main():
        task = thread.launch(background())
        return task.done(), await task

    assert thread.run(main()) == (True, 7)


def test_an_error_in_the_background_is_raised_where_the_task_is_awaited(thread):
    def fail():
        raise ConnectionError("the other end is gone")

    async def background():
        await Request(fail)

    async def main():
        await thread.launch(background())

    with pytest.raises(ConnectionError, match="the other end is gone"):
        thread.run(main())


def test_the_communication_thread_takes_one_torch_thread_and_leaves_the_others_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = CommunicationThread()
        assert thread.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 3
        thread.close()
    finally:
        torch.set_num_threads(before)
