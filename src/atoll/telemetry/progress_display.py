"""Two ways to show progress: bars that are redrawn in place, and plain lines at a bearable pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from atoll.telemetry.units import human_percent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

Clock = Callable[[], float]


class Display(Protocol):
    """Shows how far a phase is, and lines in between."""

    def advance(self, phase: str, fraction: float | None, text: str) -> None:
        """The phase is this far (None: not known) and this is what can be said about it."""

    def finish(self, phase: str) -> None:
        """The phase is complete; nothing happens if it was never shown."""

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class Pace:
    """Says when it is time for another line: freely at first, then every few seconds, then every fiftieth of the time passed.

    >>> times_s = iter([0.0, 1.0, 2.0, 6.0, 1000.0, 1015.0, 1021.0])
    >>> pace = Pace(lambda: next(times_s), free=1, apart_s=5.0)        # reads 0.0
    >>> [pace.due() for _ in range(6)]
    [True, False, True, True, False, True]
    """

    def __init__(self, clock: Clock, *, free: int, apart_s: float) -> None:
        self._clock = clock
        self._free = free
        self._apart_s = apart_s
        self._begin_s = self._last_s = clock()

    def due(self) -> bool:
        """Whether a line may be written now; if so, it counts as written."""
        now_s = self._clock()
        # Growing pauses keep the number of lines logarithmic in the length of the run.
        if self._free <= 0 and now_s - self._last_s < max(self._apart_s, 0.02 * (now_s - self._begin_s)):
            return False
        self._free, self._last_s = self._free - 1, now_s
        return True


class PlainLines:
    """For files and pipes: a line every tenth of a phase, and in between when the pace allows."""

    def __init__(self, console: Console, title: str, clock: Clock) -> None:
        self._console = console
        self._title = title
        self._pace = Pace(clock, free=1, apart_s=5.0)
        self._tenths: dict[str, int] = {}

    def advance(self, phase: str, fraction: float | None, text: str) -> None:
        tenth = int(10 * fraction + 1e-9) if fraction is not None else 0
        passed = tenth > self._tenths.get(phase, 0)
        self._tenths[phase] = tenth
        # due() is asked first: a line for a tenth counts as one, and the next waits its time.
        if self._pace.due() or passed:
            share = f"{human_percent(fraction)}" if fraction is not None else "..."
            self.say("  ".join(part for part in (f"{self._title}: {phase}", share, text) if part))

    def finish(self, phase: str) -> None:
        pass

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveBars:
    """For terminals: one bar per phase with the latest figures below, redrawn in place, and lines above."""

    def __init__(self, console: Console, title: str, clock: Clock) -> None:
        from rich.live import Live

        self._title = title
        self._text = ""
        self._bars = _bars(console, clock)
        # Standard output is not redirected: results written meanwhile belong there, not among the bars on standard error.
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, redirect_stdout=False)
        self._tasks: dict[str, TaskID] = {}

    def advance(self, phase: str, fraction: float | None, text: str) -> None:
        if phase not in self._tasks:
            self._live.start()
            self._tasks[phase] = self._bars.add_task(f"{self._title}: {phase}", total=None)
        total = 1.0 if fraction is not None else None
        self._bars.update(self._tasks[phase], total=total, completed=fraction or 0.0)
        self._text = text

    def finish(self, phase: str) -> None:
        if phase in self._tasks:
            self._bars.update(self._tasks[phase], total=1.0, completed=1.0)
            self._text = ""

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, Text(self._text, no_wrap=True, overflow="ellipsis")) if self._text else self._bars


def _bars(console: Console, clock: Clock) -> Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        get_time=clock,
        auto_refresh=False,  # it is drawn by the Live that holds it
    )
