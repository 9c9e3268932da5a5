"""Virtual time: coroutines that wait for moments which arrive as soon as everybody waits.

A coroutine awaits a `Wait`, and the loop resumes it when the clock has come to the moment that the Wait names. The heap is ordered
by time and then by the order in which Waits were filed, so the same run gives the same order of events every time. Of what happens
at the same moment, flights come first: who asks then whether one is over is told that it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Wait:
    """What a coroutine awaits: `start` is called with the task, and files when and with what value the task goes on."""

    def __init__(self, start: Callable[[ClockTask], None]) -> None:
        self.start = start

    def __await__(self) -> Generator[Wait, Any, Any]:
        return (yield self)


class ClockTask:
    """A coroutine under the virtual clock. `now_s` is the moment at which it was last resumed."""

    def __init__(
        self,
        loop: VirtualClock,
        name: str,
        coroutine: Coroutine[Any, Any, Any],
        start_s: float,
        on_done: Callable[[ClockTask], None],
        flight: bool = False,
    ) -> None:
        self.name = name
        self.flight = flight
        self.now_s = start_s
        self.done = False
        self.result: Any = None
        self.launched_by = loop.current if flight else None
        """Whose flight it is."""
        self.coroutine = coroutine
        self._loop = loop
        self._on_done = on_done

    def resume_at(self, time_s: float, value: Callable[[], Any]) -> None:
        """Go on at that moment with `value()`, which is asked for only then."""
        self._loop.file(time_s, self, value)

    def _step(self, time_s: float, value: Any) -> None:
        self.now_s = time_s
        outer, self._loop.current = self._loop.current, self
        self._loop.watch(self, value)
        try:
            wait = self.coroutine.send(value)
        except StopIteration as end:
            self.done, self.result = True, end.value
            self._loop.watch(self, end.value)
            self._on_done(self)
            return
        finally:
            self._loop.current = outer
        self._loop.watch(self, None)
        assert isinstance(wait, Wait), f"{self.name} awaited {wait!r}: only what the engine hands out can be awaited"
        wait.start(self)

    def close(self) -> None:
        """Ends it where it stands; what was filed for it no longer happens."""
        self.done = True
        self.coroutine.close()


class VirtualClock:
    """Drives tasks until none can go on. `watch` is called with every task that waits or goes on, and what it is handed."""

    def __init__(self, watch: Callable[[ClockTask, Any], None] = lambda task, value: None) -> None:
        self.watch = watch
        self.tasks: dict[ClockTask, None] = {}
        """Those that are not through, in the order in which they were spawned."""
        self.current: ClockTask | None = None
        """The one that is going on right now."""
        self._heap: list[tuple[float, bool, int, ClockTask, Callable[[], Any]]] = []
        self._filed = 0

    def spawn(
        self,
        name: str,
        coroutine: Coroutine[Any, Any, Any],
        start_s: float,
        on_done: Callable[[ClockTask], None] = lambda task: None,
    ) -> ClockTask:
        """A task that begins at `start_s`; `on_done` is called when it is through, before anybody else goes on."""
        task = ClockTask(self, name, coroutine, start_s, on_done)
        self.tasks[task] = None
        self.file(start_s, task, lambda: None)
        return task

    def launch(self, name: str, coroutine: Coroutine[Any, Any, Any], on_done: Callable[[ClockTask], None]) -> ClockTask:
        """A flight that begins now, up to its first wait at once."""
        assert self.current is not None, "a flight is launched by a task"
        task = ClockTask(self, name, coroutine, self.current.now_s, on_done, flight=True)
        self.tasks[task] = None
        task._step(task.now_s, None)
        if task.done:
            del self.tasks[task]
        return task

    def file(self, time_s: float, task: ClockTask, value: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (time_s, not task.flight, self._filed, task, value))
        self._filed += 1

    def run(self, stop: Callable[[], bool] = lambda: False) -> list[ClockTask]:
        """Until nothing is left to happen, or until `stop()` after something did. Returns the tasks that are not through."""
        try:
            while self._heap and not stop():
                time_s, _, _, task, value = heapq.heappop(self._heap)
                if not task.done:
                    task._step(time_s, value())
                if task.done:
                    self.tasks.pop(task, None)
            return [task for task in self.tasks if not task.done]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all tasks where they stand."""
        for task in self.tasks:
            task.close()
        self.tasks.clear()
        self._heap.clear()
