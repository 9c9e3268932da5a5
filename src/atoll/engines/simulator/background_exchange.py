"""Flights under the virtual clock: a coroutine of an island that goes on beside its main one, which may wait for it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from atoll.engines.simulator.virtual_clock import Task, Wait


class SimFlight:
    """A coroutine of an island beside its main one. A protocols.Flight."""

    def __init__(self) -> None:
        self._over = False
        self._result: Any = None
        self._waiting: Task | None = None

    def done(self) -> bool:
        return self._over

    def __await__(self) -> Generator[Wait, Any, Any]:
        return Wait(self._wait).__await__()

    def _wait(self, task: Task) -> None:
        self._waiting = task
        if self._over:
            self._resume(task.now_s)

    def land(self, task: Task) -> None:
        """The coroutine is through."""
        self._over, self._result = True, task.result
        if self._waiting is not None:
            self._resume(task.now_s)

    def _resume(self, time_s: float) -> None:
        assert self._waiting is not None
        self._waiting.resume_at(time_s, lambda: self._result)
