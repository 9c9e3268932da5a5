"""What a run looks like on a terminal: a bar per phase, and a line where something happens.

All of it goes to standard error, so that standard output is left for results. On a terminal the bars are redrawn in place.
Elsewhere (a file, a pipe, a batch job) a plain line is written every tenth of a phase and every few seconds; the pause between
two lines grows with the run, so that a week fills a few pages and not a disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from atoll.core.events import Event, Progress, RoundFinished, RunFinished, RunStarted, Saved, WarmStartFinished
from atoll.telemetry.event_text import figures, local_updates_total, notice
from atoll.telemetry.progress_display import Clock, Display, LiveBars, Pace, PlainLines
from atoll.telemetry.running_totals import Tally

if TYPE_CHECKING:
    from rich.console import Console

WARM_START = "warm start"
TRAINING = "training"


class ConsoleSink:
    """Shows a run to whoever watches. Close it, or use it in a `with`, so that the terminal gets its cursor back.

    Args:
        title: what to call the run.
        quiet: show nothing at all.
        steps: inner steps each island will take, if known before an event tells.
        who: who trains, in words, where the number of islands does not say it all.
        console: where to write; standard error if None.
        clock: seconds of real time, for the pace of lines and the time that remains.
    """

    def __init__(
        self,
        title: str,
        quiet: bool = False,
        *,
        steps: int | None = None,
        who: str | None = None,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._steps = steps
        self._who = who
        self._clock = clock
        self._tally = Tally()
        self._text = ""
        self._fraction: float | None = None
        self._paces: dict[type[Event], Pace] = {}
        self._withheld: dict[type[Event], int] = {}
        self._display = None if quiet else _display(title, console, clock)

    def emit(self, event: Event) -> None:
        if self._display is None:
            return
        self._tally.take(event)
        match event:
            case RunStarted():
                self._steps = event.steps
            case Progress():
                self._advance(self._display, event)
            case RoundFinished():
                self._text = figures(event, self._tally)
                self._display.advance(TRAINING, self._done(event), self._text)
            case WarmStartFinished():
                self._display.finish(WARM_START)
            case RunFinished():
                self._display.finish(TRAINING)
                self._display.close()  # so that the last line stands below the bars
            case _:
                pass
        self._notice(self._display, event)

    def recall(self, events: Iterable[Event]) -> None:
        """What happened before, in another process: nothing is shown, but figures go on from there."""
        for event in events:
            self._tally.take(event)
            if isinstance(event, RunStarted):
                self._steps = event.steps

    def close(self) -> None:
        """Leaves the bars as they are and gives the terminal back. Closing twice is fine."""
        if self._display is not None:
            self._display.close()

    def __enter__(self) -> ConsoleSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _advance(self, display: Display, event: Progress) -> None:
        phase = _phase(event.phase)
        if phase == TRAINING and self._steps is None:
            self._steps = event.total  # a resumed run was started, and its length reported, by another process
        fraction = min(1.0, event.done / event.total) if event.total > 0 else None
        if phase == TRAINING:
            self._fraction = fraction
        # Between two rounds the last round's figures say more than a note that is not there.
        display.advance(phase, fraction, event.note or (self._text if phase == TRAINING else ""))

    def _done(self, event: RoundFinished) -> float | None:
        """How much of the training is done. With a hub all count who bring updates, and steps of each are a mean at best."""
        if not self._tally.asynchronous:
            return min(1.0, event.steps / self._steps) if self._steps else None
        started = self._tally.started
        # Of a run whose beginning is not known, what the engine last said stands.
        return min(1.0, event.local_updates / local_updates_total(started)) if started is not None else self._fraction

    def _notice(self, display: Display, event: Event) -> None:
        line = notice(event, self._who)
        if line is None:
            return
        kind = type(event)
        if kind not in self._paces:
            free, apart_s = (1, 60.0) if kind is Saved else (20, 5.0)
            self._paces[kind] = Pace(self._clock, free=free, apart_s=apart_s)
        if not self._paces[kind].due():
            self._withheld[kind] = self._withheld.get(kind, 0) + 1
            return
        withheld = self._withheld.pop(kind, 0)
        display.say(line + (f" (and {withheld} more since the last such line)" if withheld else ""))


def _display(title: str, console: Console | None, clock: Clock) -> Display:
    from rich.console import Console

    console = console or Console(stderr=True)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveBars(console, title, clock) if live else PlainLines(console, title, clock)


def _phase(name: str) -> str:
    """Rounds, progress within them and a resumption move one bar, whatever an engine calls the phase; so does the warm start.

    >>> _phase("train"), _phase("resume"), _phase("warm_start"), _phase("tokenizing")
    ('training', 'training', 'warm start', 'tokenizing')
    """
    known = {"train": TRAINING, "round": TRAINING, "resum": TRAINING, "warm": WARM_START}
    return next((phase for prefix, phase in known.items() if name.lower().startswith(prefix)), name)
