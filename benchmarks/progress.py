"""Progress of a benchmark on standard error, and timers."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from atoll.telemetry.console_progress import ProgressDisplay

T = TypeVar("T")


class CellProgress:
    """Shows how many cells are finished, and the progress of the current one. A context, so that the terminal gets its cursor back.

    Args:
        title: of the benchmark.
        total: number of cells to measure.
        quiet: show nothing.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._total, self._done, self._name = total, 0, ""
        self._display = None if quiet else ProgressDisplay(title)

    def expect(self, total: int) -> None:
        """The number of cells has become another: what one finds can ask for more."""
        self._total = total

    def begin(self, name: str) -> None:
        """A cell begins."""
        self._name = name
        self.advance(0.0)

    def advance(self, fraction: float, note: str = "") -> None:
        """This fraction of the current cell is done."""
        if self._display is not None:
            text = f"{self._done} of {self._total}; now {self._name}" + (f": {note}" if note else "")
            self._display.advance("cells", (self._done + fraction) / max(self._total, 1), text)

    def end(self, line: str) -> None:
        """The current cell is finished, with this result."""
        self._done += 1
        self.log(line)

    def log(self, line: str) -> None:
        if self._display is not None:
            self._display.log(line)

    def __enter__(self) -> CellProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._display is not None:
            if kind is None:
                self._display.finish("cells")
            self._display.close()


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds that a call takes, and its result."""
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


class Stopwatch:
    """Adds up the seconds of calls, by name. The time of a call does not include calls within it that are timed too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within_s: list[float] = []

    def add(self, name: str, time_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time_s

    def around(self, name: str, call: Callable[[], T]) -> T:
        self._within_s.append(0.0)
        taken_s, result = timed(call)
        self.add(name, taken_s - self._within_s.pop())
        if self._within_s:
            self._within_s[-1] += taken_s
        return result
