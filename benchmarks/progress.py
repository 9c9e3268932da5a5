"""Progress of a benchmark on standard error, and the time that a function takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from atoll.telemetry.console import new_display


class Watch:
    """Shows how many cells are done and how far the present one is. Use it in a `with`, so that the terminal gets its cursor back.

    Args:
        title: of the benchmark.
        total: how many cells there are to do.
        quiet: show nothing at all.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._total, self._done, self._name = total, 0, ""
        self._display = None if quiet else new_display(title)

    def begin(self, name: str) -> None:
        """A cell begins."""
        self._name = name
        self.advance(0.0)

    def advance(self, fraction: float, note: str = "") -> None:
        """The present cell is this far."""
        if self._display is not None:
            text = f"{self._done} of {self._total}; now {self._name}" + (f": {note}" if note else "")
            self._display.advance("cells", (self._done + fraction) / max(self._total, 1), text)

    def end(self, line: str) -> None:
        """The present cell is finished, and this came of it."""
        self._done += 1
        self.say(line)

    def say(self, line: str) -> None:
        if self._display is not None:
            self._display.log(line)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._display is not None:
            if kind is None:
                self._display.finish("cells")
            self._display.close()


T = TypeVar("T")


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result
