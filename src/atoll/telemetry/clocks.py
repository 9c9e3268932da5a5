"""Which clock a run's times are on: a simulated cluster's (virtual), or that of real machines (wall).

Seconds of the one say nothing about seconds of the other, so whatever shows a time names its clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from atoll.core.events import Arrived, Evaluated, RoundFinished, RunFinished, RunStarted
from atoll.telemetry.event_log import read_events

Clock = Literal["virtual", "wall"]


def clock_of(engine: str) -> Clock:
    """The clock that counts where this engine ran.

    >>> clock_of("sim"), clock_of("dist")
    ('virtual', 'wall')
    """
    return "virtual" if engine == "sim" else "wall"


def clock_at(event: Arrived | Evaluated | RoundFinished | RunFinished) -> Clock:
    """The clock that an event's time is on."""
    return "wall" if event.virtual_time_s is None else "virtual"


def read_clock(folder: str | Path) -> Clock:
    """The clock of the run in a folder, by what its log begins with; of a log that is cut short there, virtual."""
    first = next(read_events(Path(folder) / "events.jsonl", kinds=(RunStarted,)), None)
    return clock_of(first.engine) if isinstance(first, RunStarted) else "virtual"


def clock_name(clocks: Iterable[Clock]) -> str:
    """What an axis of all these runs' times is called.

    >>> clock_name(["wall", "wall"]), clock_name(["virtual", "wall"])
    ('wall time', 'virtual or wall time')
    """
    return f"{' or '.join(sorted(set(clocks)))} time"
