"""Several sinks behind one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.core.events import Event, Progress, Saved
from atoll.telemetry.sinks import Fanout, Remembered

EVENT = Saved(round=1, name="round-1")


class Door:
    """A sink that can be closed, and may refuse."""

    def __init__(self, closed: list[str], name: str, error: Exception | None = None) -> None:
        self.closed, self.name, self.error = closed, name, error

    def emit(self, event: Event) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


def test_every_sink_gets_every_event_in_order() -> None:
    one, two = Remembered(), Remembered()
    both = Fanout([one, two])
    progress = Progress(phase="train", done=1, total=2)
    both.emit(EVENT)
    both.emit(progress)
    assert one.events == two.events == [EVENT, progress]


def test_what_the_log_could_not_record_is_not_shown() -> None:
    shown = Remembered()
    with pytest.raises(OSError, match="full"):
        Fanout([Door([], "log", OSError("full")), shown]).emit(EVENT)
    assert shown.events == []


def test_all_sinks_are_closed_even_if_one_refuses() -> None:
    closed: list[str] = []
    with pytest.raises(OSError, match="stuck"), Fanout([Door(closed, "a"), Remembered(), Door(closed, "b", OSError("stuck"))]):
        pass
    assert closed == ["b", "a"]


def test_memory_gives_the_events_of_one_class() -> None:
    memory = Remembered()
    memory.emit(Progress(phase="train", done=1, total=2))
    memory.emit(EVENT)
    assert memory.of(Saved) == [EVENT]


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tensorboard', 'rich'}"
    code = f"import sys, atoll.telemetry; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)
