"""Coroutines without an event loop: one thread computes, another one owns the line."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atoll.engines.processes.communication_thread import CommunicationThread, Request


@pytest.fixture
def line():
    line = CommunicationThread()
    yield line
    line.close()


def who():
    return threading.current_thread().name


def test_exchanges_happen_on_the_line_and_all_else_where_it_is_driven(line):
    async def main():
        return who(), await Request(who), who()

    here, there, again = line.run(main())
    assert (here, again) == (who(), who())
    assert there == "communication"


def test_a_flight_begins_here_and_goes_on_beside(line):
    """What it copies before its first exchange is copied when `launch` returns; the rest waits for nobody."""
    gate, steps = threading.Event(), []

    async def flight():
        steps.append(who())
        await Request(gate.wait)
        steps.append(who())
        return "there"

    async def main():
        flying = line.launch(flight())
        assert steps == [who()]
        assert not flying.done()
        gate.set()
        return await flying, flying.done()

    assert line.run(main()) == ("there", True)
    assert steps[1] == "communication"


def test_a_flight_without_an_exchange_is_over_at_once(line):
    async def flight():
        return 7

    async def main():
        flying = line.launch(flight())
        return flying.done(), await flying

    assert line.run(main()) == (True, 7)


def test_what_goes_wrong_in_a_flight_is_raised_where_it_is_awaited(line):
    def fail():
        raise ConnectionError("the other end is gone")

    async def flight():
        await Request(fail)

    async def main():
        await line.launch(flight())

    with pytest.raises(ConnectionError, match="the other end is gone"):
        line.run(main())


def test_a_line_takes_one_torch_thread_and_leaves_the_others_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        line = CommunicationThread()
        assert line.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 3
        line.close()
    finally:
        torch.set_num_threads(before)
