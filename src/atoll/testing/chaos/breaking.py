"""Makes faults happen to processes and lines, at their times, and writes down what it did.

Time is an argument, and nobody sleeps here: whoever watches the processes calls `step` again and again. What is done for a while is
undone by itself, and by `close` at the latest.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import ConfigError
from atoll.events import Attended, Event
from atoll.testing.chaos.faults import At, Cut, Fault, Freeze, Kill, Script, Slow, Spoil


class Process(Protocol):
    """A process that may be alive, such as a subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code; none while it lives."""


class Breakable(Protocol):
    """A line between two machines."""

    def cut(self) -> None: ...

    def shape(self, mbit_per_s: float) -> None: ...

    def mend(self) -> None:
        """As it was."""


Undo = Callable[[], object]
"""Returns False if there was nothing to mend any more."""


class Chaos:
    """Carries out a script on one run. It is also a sink: the script's clock begins with the first commit that it hears of.

    Args:
        script: what is to happen.
        log: where it is written down, one line of JSON each. It is begun anew.
        lines: that can be cut or shaped, by their names.
    """

    def __init__(self, script: Script, log: Path, *, lines: Mapping[str, Breakable] | None = None) -> None:
        self._lines = dict(lines or {})
        unknown = sorted({one.fault.line for one in script.faults if isinstance(one.fault, Cut | Slow)} - self._lines.keys())
        if unknown:
            raise ConfigError(
                f"a script breaks the lines {unknown}, and there are {sorted(self._lines)}. Give them, or leave it out."
            )
        self._script = script
        self._order = itertools.count()
        self._todo: list[tuple[float, int, At]] = [(one.at_s, next(self._order), one) for one in script.faults]
        heapq.heapify(self._todo)
        self._undo: list[tuple[float, int, str, Undo]] = []
        self._zero_s: float | None = None
        self._now_s = 0.0
        self._log = log
        log.write_text("", "utf-8")

    @property
    def script(self) -> Script:
        return self._script

    @property
    def spoils(self) -> Sequence[Spoil]:
        return self._script.spoils

    # ------------------------------------------------------------------------------------------------------------- the clock

    def emit(self, event: Event) -> None:
        """An event of the run has appeared in its log. Who was there is written down too, with the time on this clock."""
        if not isinstance(event, Attended):
            return
        if self._zero_s is None:
            self._zero_s = self._now_s
        self._note("saw", {"round": event.round, "epoch": event.epoch, "participating": event.participating})

    def step(self, now_s: float, processes: Mapping[str, Process]) -> None:
        """Do what is due by now, on any clock that only goes forward."""
        self._now_s = now_s
        if self._zero_s is None:
            return
        while self._undo and self._undo[0][0] <= now_s:
            _, _, what, undo = heapq.heappop(self._undo)
            self._note("mended", {"fault": what, "done": undo() is not False})
        while self._todo and self._zero_s + self._todo[0][0] <= now_s:
            self._carry_out(heapq.heappop(self._todo)[2].fault, processes)

    def close(self) -> None:
        """Mend what is still broken."""
        for _, _, what, undo in self._undo:
            self._note("mended", {"fault": what, "done": undo() is not False})
        self._undo.clear()

    # ------------------------------------------------------------------------------------------------------------- the faults

    def _carry_out(self, fault: Fault, processes: Mapping[str, Process]) -> None:
        if isinstance(fault, Cut | Slow):
            line = self._lines[fault.line]
            line.cut() if isinstance(fault, Cut) else line.shape(fault.mbit_per_s)
            self._note("did", _plain(fault))
            self._later(fault, fault.for_s, line.mend)
            return
        process = processes.get(fault.victim)
        if process is None or process.poll() is not None:
            why = "it does not run now" if process is not None else "there is none"
            self._note("skipped", {**_plain(fault), "why": why})
            return
        pid = process.pid
        self._note("did", {**_plain(fault), "pid": pid})
        if isinstance(fault, Kill):
            os.kill(pid, signal.SIGKILL)
        elif isinstance(fault, Freeze):
            os.kill(pid, signal.SIGSTOP)
            self._later(fault, fault.for_s, lambda: _signalled(process, signal.SIGCONT))
        else:
            before = _limited(process, (fault.file_bytes, resource.RLIM_INFINITY))
            self._later(fault, fault.for_s, lambda: before is not None and _limited(process, before) is not None)

    def _later(self, fault: Fault, for_s: float, undo: Undo) -> None:
        heapq.heappush(self._undo, (self._now_s + for_s, next(self._order), type(fault).__name__, undo))

    def _note(self, what: str, about: Mapping[str, Any]) -> None:
        at_s = self._now_s - (self._zero_s if self._zero_s is not None else self._now_s)
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": round(at_s, 3), what: dict(about)}) + "\n")


def _plain(fault: Fault) -> dict[str, Any]:
    return {"fault": type(fault).__name__, **vars(fault)}


def _signalled(process: Process, number: int) -> bool:
    """Whether it was still there."""
    if process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
        return True
    return False


def _limited(process: Process, limits: tuple[int, int]) -> tuple[int, int] | None:
    """How long files may become that it writes: as before; none if it is no more."""
    if process.poll() is not None:
        return None
    try:
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limits[0], hard))
    except ProcessLookupError:
        return None
    return soft, hard
