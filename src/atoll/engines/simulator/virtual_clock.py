"""The virtual clock: an event loop whose time jumps to the next moment as soon as every task waits.

A coroutine awaits a `Wait`, and the clock resumes it at the moment that the Wait names. The heap is ordered by time, then by the
order in which Waits were scheduled, so a run has the same order of events every time. Of events at one moment, background tasks
(flights) come first, so that a task that asks then whether its flight is done gets "yes".
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any


class Wait:
    """What a coroutine awaits: `start` is called with the task, and schedules when and with what value it resumes."""

    def __init__(self, start: Callable[[ClockTask], None]) -> None:
        self.start = start

    def __await__(self) -> Generator[Wait, Any, Any]:
        return (yield self)


@dataclass(eq=False)
class ClockTask:
    """A coroutine under the virtual clock."""

    clock: VirtualClock
    name: str
    coroutine: Coroutine[Any, Any, Any]
    now_s: float  # when it was last resumed
    on_done: Callable[[ClockTask], None]
    launched_by: ClockTask | None = None  # whose flight it is
    done: bool = False
    result: Any = None

    @property
    def flight(self) -> bool:
        return self.launched_by is not None

    def resume_at(self, time_s: float, value: Callable[[], Any]) -> None:
        """Resumes at that moment with `value()`, which is called only then."""
        self.clock.schedule(time_s, self, value)

    def step(self, time_s: float, value: Any) -> None:
        """Runs the coroutine up to its next Wait."""
        self.now_s = time_s
        outer, self.clock.current = self.clock.current, self
        self.clock.watch(self, value)
        try:
            wait = self.coroutine.send(value)
        except StopIteration as end:
            self.done, self.result = True, end.value
            self.clock.watch(self, end.value)
            self.on_done(self)
            return
        finally:
            self.clock.current = outer
        self.clock.watch(self, None)
        assert isinstance(wait, Wait), f"{self.name} awaited {wait!r}: await only what the engine's replica, peers and hub return"
        wait.start(self)

    def close(self) -> None:
        """Ends the task where it stands; what is scheduled for it does not happen."""
        self.done = True
        self.coroutine.close()


class VirtualClock:
    """Runs tasks until none can continue. `watch` is called whenever a task waits (with None) or resumes (with its value)."""

    def __init__(self, watch: Callable[[ClockTask, Any], None] = lambda task, value: None) -> None:
        self.watch = watch
        self.tasks: dict[ClockTask, None] = {}  # unfinished tasks, in the order in which they were spawned
        self.current: ClockTask | None = None  # the task that runs right now
        self._heap: list[tuple[float, bool, int, ClockTask, Callable[[], Any]]] = []
        self._scheduled = 0

    def spawn(
        self,
        name: str,
        coroutine: Coroutine[Any, Any, Any],
        start_s: float,
        on_done: Callable[[ClockTask], None] = lambda task: None,
    ) -> ClockTask:
        """Adds a task that begins at `start_s`. `on_done` is called at its end, before any other task resumes."""
        task = ClockTask(self, name, coroutine, start_s, on_done)
        self.tasks[task] = None
        self.schedule(start_s, task, lambda: None)
        return task

    def launch(self, name: str, coroutine: Coroutine[Any, Any, Any], on_done: Callable[[ClockTask], None]) -> ClockTask:
        """Starts a flight of the current task, and runs it up to its first Wait at once."""
        assert self.current is not None, "a flight is launched by a task"
        task = ClockTask(self, name, coroutine, self.current.now_s, on_done, self.current)
        self.tasks[task] = None
        task.step(task.now_s, None)
        if task.done:
            del self.tasks[task]
        return task

    def schedule(self, time_s: float, task: ClockTask, value: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (time_s, task.launched_by is None, self._scheduled, task, value))
        self._scheduled += 1

    def run(self, stop: Callable[[], bool] = lambda: False) -> list[ClockTask]:
        """Runs until nothing is scheduled, or until `stop()` is true after an event. Returns the unfinished tasks."""
        try:
            while self._heap and not stop():
                time_s, _, _, task, value = heapq.heappop(self._heap)
                if not task.done:
                    task.step(time_s, value())
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
