"""Makes faults happen to processes and lines, at their times, and writes down what it did.

Time is an argument, and nobody sleeps here: whoever watches the processes calls `step` again and again. What is done for a while is
undone by itself, and by `close` at the latest; of faults that overlap each lasts as long as it is to.
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

from atoll.core.errors import ConfigError
from atoll.core.events import Arrived, Attended, Event
from atoll.testing.chaos.faults import At, Cut, Fault, Freeze, FullDisk, Kill, Script, Slow


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


Lasting = Freeze | FullDisk | Cut | Slow
"""Faults that are over after a while."""


class _Target:
    """A process or a line, and what is wrong with it at the moment.

    Args:
        apply: brings it into the state that these faults make of it. It is false if it is no more.
    """

    def __init__(self, apply: Callable[[Sequence[Lasting]], bool]) -> None:
        self._apply = apply
        self._now: list[Lasting] = []

    def begin(self, fault: Lasting) -> bool:
        self._now.append(fault)
        return self._apply(self._now)

    def end(self, fault: Lasting) -> bool:
        self._now.remove(fault)
        return self._apply(self._now)


class Chaos:
    """Carries out a script on one run. It is also a sink: the script's clock begins with the first commit that it hears of, or of a
    hub's run the first update that arrives.

    Args:
        script: what is to happen.
        log: where it is written down, one line of JSON each. It is begun anew.
        lines: that can be cut or shaped, by their names.
    """

    def __init__(self, script: Script, log: Path, *, lines: Mapping[str, Breakable] | None = None) -> None:
        self._lines = dict(lines or {})
        unknown = sorted(script.lines - self._lines.keys())
        if unknown:
            raise ConfigError(
                f"a script breaks the lines {unknown}, and there are {sorted(self._lines)}. Give them, or leave it out."
            )
        self._script = script
        self._order = itertools.count()
        self._todo: list[tuple[float, int, At]] = [(one.at_s, next(self._order), one) for one in script.faults]
        heapq.heapify(self._todo)
        self._undo: list[tuple[float, int, Lasting, _Target]] = []
        self._targets: dict[tuple[type[Lasting] | None, object], _Target] = {}
        self._zero_s: float | None = None
        self._now_s = 0.0
        self._log = log
        log.write_text("", "utf-8")

    @property
    def script(self) -> Script:
        return self._script

    # ------------------------------------------------------------------------------------------------------------- the clock

    def emit(self, event: Event) -> None:
        """An event of the run has appeared in its log. Who was there is written down too, with the time on this clock."""
        if isinstance(event, Arrived | Attended) and self._zero_s is None:
            self._zero_s = self._now_s
        if isinstance(event, Attended):
            self._note("saw", {"round": event.round, "epoch": event.epoch, "participating": event.participating})

    def step(self, now_s: float, processes: Mapping[str, Process]) -> None:
        """Do what is due by now, on any clock that only goes forward."""
        self._now_s = now_s
        if self._zero_s is None:
            return
        while self._undo and self._undo[0][0] <= now_s:
            self._mend(*heapq.heappop(self._undo)[2:])
        while self._todo and self._zero_s + self._todo[0][0] <= now_s:
            self._carry_out(heapq.heappop(self._todo)[2].fault, processes)

    def close(self) -> None:
        """Mend what is still broken."""
        while self._undo:
            self._mend(*heapq.heappop(self._undo)[2:])

    # ------------------------------------------------------------------------------------------------------------- the faults

    def _carry_out(self, fault: Fault, processes: Mapping[str, Process]) -> None:
        if isinstance(fault, Cut | Slow):
            self._note("did", _plain(fault))
            line = self._lines[fault.line]
            self._begin(fault, None, fault.line, lambda faults: _bent(line, faults))
            return
        process = processes.get(fault.victim)
        if process is None or process.poll() is not None:
            why = "it does not run now" if process is not None else "there is none"
            self._note("skipped", {**_plain(fault), "why": why})
            return
        self._note("did", {**_plain(fault), "pid": process.pid})
        if isinstance(fault, Kill):
            with suppress(ProcessLookupError):  # it has gone by itself in this very moment
                os.kill(process.pid, signal.SIGKILL)
        elif isinstance(fault, Freeze):
            self._begin(fault, Freeze, process.pid, lambda faults: _frozen(process, faults))
        else:
            before = _limit_of(process)
            self._begin(fault, FullDisk, process.pid, lambda faults: _limited(process, before, faults))

    def _begin(self, fault: Lasting, kind: type[Lasting] | None, who: object, apply: Callable[[Sequence[Lasting]], bool]) -> None:
        target = self._targets.setdefault((kind, who), _Target(apply))
        target.begin(fault)
        heapq.heappush(self._undo, (self._now_s + fault.for_s, next(self._order), fault, target))

    def _mend(self, fault: Lasting, target: _Target) -> None:
        self._note("mended", {"fault": type(fault).__name__, "done": target.end(fault)})

    def _note(self, what: str, about: Mapping[str, Any]) -> None:
        at_s = self._now_s - (self._zero_s if self._zero_s is not None else self._now_s)
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": round(at_s, 3), what: dict(about)}) + "\n")


def _plain(fault: Fault) -> dict[str, Any]:
    return {"fault": type(fault).__name__, **vars(fault)}


def _bent(line: Breakable, faults: Sequence[Lasting]) -> bool:
    """Cut if anything cuts it, else as slow as the slowest has it."""
    rates = [fault.mbit_per_s for fault in faults if isinstance(fault, Slow)]
    if any(isinstance(fault, Cut) for fault in faults):
        line.cut()
    elif rates:
        line.shape(min(rates))
    else:
        line.mend()
    return True


def _frozen(process: Process, faults: Sequence[Lasting]) -> bool:
    if process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP if faults else signal.SIGCONT)
        return True
    return False


def _limit_of(process: Process) -> int:
    """How long files may become that it writes."""
    with suppress(ProcessLookupError):
        return resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0]
    return resource.RLIM_INFINITY


def _limited(process: Process, before: int, faults: Sequence[Lasting]) -> bool:
    """Files may become as long as the worst fault has it, or as before."""
    if process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        limits = [fault.file_bytes for fault in faults if isinstance(fault, FullDisk)]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (min(limits, default=before), hard))
        return True
    return False
