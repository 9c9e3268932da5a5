"""Driving coroutines without an event loop: this thread computes, and another one owns the communication.

A coroutine awaits a `Request`, which says what is to be done and by whom. The thread that drives it computes by itself, and has the
communication's thread exchange. A flight is driven by that thread alone, after its first request has been reached.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Request:
    """What a coroutine awaits: something to be called, by the communication's thread unless it is only to be waited for."""

    def __init__(self, call: Callable[[], Any], *, waits: bool = False) -> None:
        self.call, self.waits = call, waits

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


class Line:
    """The thread that owns an island's communication."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "line", initializer=torch.set_num_threads, initargs=(1,))

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in this thread; what it exchanges is exchanged by the line."""
        try:
            request = coroutine.send(None)
            while True:
                value = request.call() if request.waits else self._pool.submit(request.call).result()
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
        return Flight(self._pool.submit(_fly, coroutine, request))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _fly(coroutine: Coroutine[Any, Any, T], request: Request) -> T:
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

    def __await__(self) -> Generator[Request, Any, T]:
        return Request(self._future.result, waits=True).__await__()
