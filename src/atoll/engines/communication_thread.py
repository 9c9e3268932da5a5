"""Runs coroutines without an event loop: the calling thread computes, and a communication thread exchanges.

A coroutine awaits a `Request`: a call for the communication thread. `run` drives a coroutine in the calling thread. `launch` drives
one in the calling thread up to its first request, and from there in the communication thread.
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
    """A call that a coroutine awaits: for the communication thread, or for the calling thread if it only `waits`."""

    def __init__(self, call: Callable[[], T], *, waits: bool = False) -> None:
        self.call, self.waits = call, waits

    def __await__(self) -> Generator[Request[Any], Any, T]:
        result: T = yield self
        return result


class CommunicationThread:
    """The thread that owns a process's communication.

    Args:
        device: where the process computes. On a GPU the thread has a stream of its own. A request starts after the work that was
            queued on the GPU before it, and ends when its own work on the GPU is done.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self._closed = False
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: a process that ends does not wait for messages that may never come.
        self._thread = Thread(target=self._work, name="communication", daemon=True)
        # The thread sets one torch thread for itself. torch applies that to threads that start later too: set it back for them.
        threads = torch.get_num_threads()
        self._thread.start()
        self._put(torch.get_num_threads).result()  # which fixes the number for the communication thread
        torch.set_num_threads(threads)

    def _work(self) -> None:
        torch.set_num_threads(1)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
            torch.cuda.set_stream(torch.cuda.Stream(self._cuda))  # type: ignore[no-untyped-call]
        while (request := self._requests.get()) is not None:
            call, future = request
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future, request  # and the buffers that they hold

    def _put(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._requests.put((call, future))
        return future

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise RuntimeError("the communication thread is closed")
        if self._cuda is None:
            return self._put(call)
        queued = torch.cuda.current_stream(self._cuda).record_event()

        def after_queued_work() -> T:
            torch.cuda.current_stream().wait_event(queued)
            result = call()
            torch.cuda.current_stream().synchronize()
            return result

        return self._put(after_queued_work)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the communication thread, and wait for it."""
        return self._submit(function).result()

    def fulfil(self, request: Request[T]) -> T:
        """Answer the request of a coroutine that the calling thread drives."""
        return request.call() if request.waits else self.call(request.call)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in the calling thread. Its requests go to the communication thread."""
        return _drive(coroutine, self.fulfil)

    def launch(self, coroutine: Coroutine[Any, Any, T]) -> BackgroundTask[T]:
        """Run a coroutine up to its first request here and now, and from there on the communication thread."""
        try:
            request = coroutine.send(None)
        except StopIteration as end:
            done: Future[T] = Future()
            done.set_result(end.value)
            return BackgroundTask(done)
        return BackgroundTask(self._submit(lambda: _drive(coroutine, lambda request: request.call(), request)))

    def close(self, *, wait: bool = True) -> None:
        """Accept no further request; with `wait`, return when all queued requests are done."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
        if wait:
            self._thread.join()


def _drive(coroutine: Coroutine[Any, Any, T], fulfil: Callable[[Request[Any]], Any], request: Request[Any] | None = None) -> T:
    """Run a coroutine to its end: from the start, or from the request that it awaits."""
    try:
        while True:
            request = coroutine.send(None if request is None else fulfil(request))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        coroutine.close()


class BackgroundTask(Generic[T]):
    """A coroutine on the communication thread. A protocols.PendingExchange."""

    def __init__(self, future: Future[T]) -> None:
        self._future: Future[T] | None = future

    def done(self) -> bool:
        return self._future is None or self._future.done()

    def __await__(self) -> Generator[Request[Any], Any, T]:
        """The result is kept no longer: it may be as large as the model."""
        assert self._future is not None, "a background exchange is awaited once"
        future, self._future = self._future, None
        return Request(future.result, waits=True).__await__()
