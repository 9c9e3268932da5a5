"""Driving coroutines without an event loop: this thread computes, and another one owns the communication.

A coroutine awaits a `Request`, which says what is to be done and by whom. The thread that drives it computes by itself, and has the
communication's thread exchange. A flight is driven by that thread alone, after its first request has been reached.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Request(Generic[T]):
    """What a coroutine awaits: something to be called, by the communication's thread unless it is only to be waited for."""

    def __init__(self, call: Callable[[], T], *, waits: bool = False) -> None:
        self.call, self.waits = call, waits

    def __await__(self) -> Generator[Request[Any], Any, T]:
        result: T = yield self
        return result


class CommunicationThread:
    """The thread that owns an island's communication.

    Args:
        device: where the island computes. On a GPU the thread has a stream of its own, which begins each request after what was
            asked of the GPU before it, and is through with it when the request is over.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self._closed = False
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: a process that is to end does not wait for messages that may never come.
        self._thread = Thread(target=self._work, name="line", daemon=True)
        # A number of threads that one thread sets is also that of threads which come to torch later. Set it back for them.
        threads = torch.get_num_threads()
        self._thread.start()
        self._put(torch.get_num_threads).result()  # asking fixes it for the line
        torch.set_num_threads(threads)

    def _work(self) -> None:
        torch.set_num_threads(1)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
            torch.cuda.set_stream(torch.cuda.Stream(self._cuda))  # type: ignore[no-untyped-call]
        while (asked := self._asked.get()) is not None:
            call, future = asked
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future, asked  # and the buffers that they hold

    def _put(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._asked.put((call, future))
        return future

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise RuntimeError("the line is closed")
        if self._cuda is None:
            return self._put(call)
        asked = torch.cuda.current_stream(self._cuda).record_event()

        def behind() -> T:
            torch.cuda.current_stream().wait_event(asked)
            result = call()
            torch.cuda.current_stream().synchronize()
            return result

        return self._put(behind)

    def call(self, function: Callable[[], T]) -> T:
        """Have the line do something, and wait for it."""
        return self._submit(function).result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in this thread; what it exchanges is exchanged by the line."""
        try:
            request = coroutine.send(None)
            while True:
                value = request.call() if request.waits else self.call(request.call)
                request = coroutine.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            coroutine.close()

    def launch(self, coroutine: Coroutine[Any, Any, T]) -> Flight[T]:
        """Go on with a coroutine in the background: up to its first request here and now, and from there on the line."""
        try:
            request = coroutine.send(None)
        except StopIteration as end:
            done: Future[T] = Future()
            done.set_result(end.value)
            return Flight(done)
        return Flight(self._submit(lambda: _fly(coroutine, request)))

    def close(self, *, wait: bool = True) -> None:
        """Accept no further request; with `wait`, return when all queued requests are done."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
        if wait:
            self._thread.join()


def _fly(coroutine: Coroutine[Any, Any, T], request: Request[Any]) -> T:
    try:
        while True:
            request = coroutine.send(request.call())
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        coroutine.close()


class Flight(Generic[T]):
    """A coroutine on the line. A protocols.Flight."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Request[Any], Any, T]:
        return Request(self._future.result, waits=True).__await__()
