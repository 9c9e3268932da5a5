"""Injects the faults of a script into processes and links at their times, and logs each one.

The injector has no clock and never sleeps: the supervisor of the processes calls `step` with the time. A fault with a duration is
reverted after it, and by `close` at the latest. Overlapping faults of one target each last their own duration.
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

from atoll.core.events import Arrived, Attended, Event
from atoll.testing.chaos.faults import (
    Cut,
    CutOneWay,
    CutPair,
    ExternalFault,
    FaultScript,
    Freeze,
    FullDisk,
    Kill,
    LinkFault,
    Slow,
    fault_record,
)
from atoll.testing.network_namespaces import ShapedLink


class TargetProcess(Protocol):
    """A process, such as a subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""


LastingFault = Freeze | FullDisk | LinkFault
Apply = Callable[[Sequence[LastingFault]], bool]
"""Brings a target into the state that these active faults cause. False if the target no longer exists."""
_Target = tuple[list[LastingFault], Apply]
"""The active faults of a process or a link, and how they are applied."""


class FaultInjector:
    """Executes a fault script on one run, and logs one JSON object per line to the file `log`, which is truncated first. As a Sink
    it starts the script's clock at the first commit, or the first arrived update."""

    def __init__(self, script: FaultScript, log: Path, *, links: Mapping[str, ShapedLink] | None = None) -> None:
        self._links = dict(links or {})
        self._sequence = itertools.count()
        self._pending = [(one.at_s, next(self._sequence), one.fault) for one in script.faults]
        heapq.heapify(self._pending)
        self._active: list[tuple[float, int, LastingFault, _Target]] = []
        self._targets: dict[tuple[type[LastingFault] | None, object], _Target] = {}
        self._start_s: float | None = None
        self._now_s = 0.0
        self._log_path = log
        log.write_text("", "utf-8")

    def emit(self, event: Event) -> None:
        """Takes an event of the run. A commit is logged with its time on the script's clock."""
        if isinstance(event, Arrived | Attended) and self._start_s is None:
            self._start_s = self._now_s
        if isinstance(event, Attended):
            self._log("observed", {"round": event.round, "epoch": event.epoch, "participating": event.participating})

    def step(self, now_s: float, processes: Mapping[str, TargetProcess]) -> None:
        """Injects and reverts what is due at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        if self._start_s is None:
            return
        while self._active and self._active[0][0] <= now_s:
            self._revert(*heapq.heappop(self._active)[2:])
        while self._pending and self._start_s + self._pending[0][0] <= now_s:
            self._inject(heapq.heappop(self._pending)[2], processes)

    def close(self) -> None:
        """Reverts every active fault."""
        while self._active:
            self._revert(*heapq.heappop(self._active)[2:])

    def _inject(self, fault: ExternalFault, processes: Mapping[str, TargetProcess]) -> None:
        if isinstance(fault, LinkFault):
            self._log("injected", fault_record(fault))
            link = self._links[fault.link]
            if isinstance(fault, CutPair):
                other = self._links[fault.other]
                pair = frozenset((fault.link, fault.other))
                self._begin(fault, CutPair, pair, lambda faults: _apply_to_pair(link, other, faults))
            else:
                self._begin(fault, None, fault.link, lambda faults: _apply_to_link(link, faults))
            return
        process = processes.get(fault.victim)
        if process is None or process.poll() is not None:
            why = "it is not running" if process is not None else "no such process"
            self._log("skipped", {**fault_record(fault), "why": why})
            return
        self._log("injected", {**fault_record(fault), "pid": process.pid})
        if isinstance(fault, Kill):
            with suppress(ProcessLookupError):  # it ended by itself since poll()
                os.kill(process.pid, signal.SIGKILL)
        elif isinstance(fault, Freeze):
            self._begin(fault, Freeze, process.pid, lambda faults: _stop_or_continue(process, faults))
        else:
            limit_before = resource.RLIM_INFINITY
            with suppress(ProcessLookupError):
                limit_before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0]
            self._begin(fault, FullDisk, process.pid, lambda faults: _limit_files(process, limit_before, faults))

    def _begin(self, fault: LastingFault, kind: type[LastingFault] | None, target_id: object, apply: Apply) -> None:
        target = active, apply = self._targets.setdefault((kind, target_id), ([], apply))
        active.append(fault)
        apply(active)
        heapq.heappush(self._active, (self._now_s + fault.for_s, next(self._sequence), fault, target))

    def _revert(self, fault: LastingFault, target: _Target) -> None:
        active, apply = target
        active.remove(fault)
        self._log("reverted", {"fault": type(fault).__name__, "done": apply(active)})

    def _log(self, action: str, about: Mapping[str, Any]) -> None:
        at_s = self._now_s - (self._start_s if self._start_s is not None else self._now_s)
        with open(self._log_path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": round(at_s, 3), action: dict(about)}) + "\n")


def _apply_to_link(link: ShapedLink, faults: Sequence[LastingFault]) -> bool:
    """Cut if any active fault is a Cut, else cut in one direction, else shaped to the lowest rate."""
    rates = [fault.mbit_per_s for fault in faults if isinstance(fault, Slow)]
    cuts = [fault for fault in faults if isinstance(fault, Cut | CutOneWay)]
    if cuts:
        link.cut(one_way=all(isinstance(fault, CutOneWay) for fault in cuts))
    elif rates:
        link.shape(min(rates))
    else:
        link.restore()
    return True


def _apply_to_pair(link: ShapedLink, other: ShapedLink, faults: Sequence[LastingFault]) -> bool:
    link.separate(other, apart=bool(faults))
    return True


def _stop_or_continue(process: TargetProcess, faults: Sequence[LastingFault]) -> bool:
    if process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP if faults else signal.SIGCONT)
        return True
    return False


def _limit_files(process: TargetProcess, limit_before: int, faults: Sequence[LastingFault]) -> bool:
    """Applies the smallest limit of the active faults, or the limit from before the first."""
    if process.poll() is not None:
        return False
    with suppress(ProcessLookupError):
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        limits = [fault.file_bytes for fault in faults if isinstance(fault, FullDisk)]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (min(limits, default=limit_before), hard))
        return True
    return False
