"""How busy a hub is: it measures itself, so that one which has become the bottleneck is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

from atoll.core.events import HubLoad


class Load:
    """Counts pushes from when they are there to when they are applied. A hub is `busy` while one is being applied, and while a
    checkpoint is being gathered at its desk (`occupied`): writing it, beside the desk, does not count.

    >>> seconds = iter([0.0, 1.0, 1.0, 3.0, 4.0])
    >>> load = Load(now=lambda: next(seconds))
    >>> with load.received() as applying:
    ...     with applying():
    ...         pass
    >>> report = load.report(4.0)
    >>> report.pushes, report.busy, report.apply_s, report.waited_s
    (1, 0.5, 2.0, 0.0)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = Lock()
        self._waiting = 0
        self._begin(now())

    def begin(self) -> None:
        """Count from now on."""
        with self._lock:
            self._begin(self._now())

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._pushes, self._applied_s, self._else_s, self._waited_s, self._most = 0, 0.0, 0.0, 0.0, 0

    @contextmanager
    def received(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """A push is there; what it yields is entered when its turn has come."""
        came_s = self._now()
        with self._lock:
            self._waiting += 1
            self._most = max(self._most, self._waiting)

        @contextmanager
        def applying() -> Iterator[None]:
            turn_s = self._now()
            try:
                yield
            finally:
                applied_s = self._now()
                with self._lock:
                    self._pushes += 1
                    self._applied_s += applied_s - turn_s
                    self._waited_s += turn_s - came_s

        try:
            yield applying
        finally:
            with self._lock:
                self._waiting -= 1

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Meanwhile no update can be applied, for another reason than one that is."""
        began_s = self._now()
        try:
            yield
        finally:
            ended_s = self._now()
            with self._lock:
                self._else_s += ended_s - began_s

    def report(self, wall_time_s: float) -> HubLoad:
        """The figures since the last report."""
        with self._lock:
            now_s = self._now()
            passed_s, pushes = now_s - self._since_s, self._pushes
            event = HubLoad(
                virtual_time_s=None,
                wall_time_s=wall_time_s,
                seconds=passed_s,
                pushes=pushes,
                busy=(self._applied_s + self._else_s) / passed_s if passed_s > 0 else 0.0,
                apply_s=self._applied_s / pushes if pushes else 0.0,
                waited_s=self._waited_s / pushes if pushes else 0.0,
                most_waiting=self._most,
            )
            self._begin(now_s)
        return event
