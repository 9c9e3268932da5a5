"""How far a run is and how busy its islands are, from its events so far."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from atoll.core import events as ev
from atoll.core.errors import ConfigError, one_line
from atoll.core.verified_files import read_record
from atoll.telemetry.event_log import read_events

RUN_FORMAT = 2
"""Version of run.json, of the keys of events and of the names of types in a run's folder."""
_STALENESS_WINDOW = 20


class RunningTotals:
    """Takes events one by one and keeps the latest of each kind that shows how far the run is.

    >>> totals = RunningTotals()
    >>> totals.take(ev.RunStarted(recipe="demo", algorithm="DDP", islands=2, params=10, steps=4, seed=0))
    >>> totals.take(ev.Computed(island=0, round=0, start_s=0.0, end_s=3.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> totals.take(ev.Computed(island=1, round=0, start_s=0.0, end_s=1.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> totals.utilisation(now_s=4.0)
    0.5
    """

    def __init__(self) -> None:
        self.started: ev.RunStarted | None = None
        self.round: ev.RoundFinished | None = None
        self.evaluation: ev.Evaluated | None = None
        self.finished: ev.RunFinished | None = None
        self.asynchronous = False
        self._devices = 1
        self._computed_s: defaultdict[int, float] = defaultdict(float)
        self._since_s: dict[int, float] = {}  # when each present island joined
        self._past_s: defaultdict[int, float] = defaultdict(float)  # how long an island was present before it left
        self._tasks: dict[int, ev.Dispatched] = {}  # rounds under way, which a worker reports when it arrives
        self._step_s: dict[int, float] = {}
        self._staleness: deque[int] = deque(maxlen=_STALENESS_WINDOW)

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted():
                self.started = event
                self._since_s = dict.fromkeys(range(event.islands), 0.0)
                self._devices = event.devices_per_island or 1
            case ev.RoundFinished():
                self.round = event
            case ev.Evaluated():
                self.evaluation = event
            case ev.RunFinished():
                self.finished = event
            case ev.Dispatched():
                self._dispatched(event)
            case ev.Arrived():
                self._staleness.append(event.staleness)
                self._tasks.pop(event.island, None)
            case ev.Computed():
                self._computed(event)
            case ev.Refused() | ev.Returned():
                # The hub also refuses an update that arrives twice; the round of that update was over before.
                if event.island in self._tasks and self._tasks[event.island].round == event.round:
                    self._abandon(event.island, event.time_s)
            case ev.IslandJoined():
                self._since_s[event.island] = event.time_s
            case ev.IslandLeft():
                if event.island in self._tasks:
                    self._abandon(event.island, event.time_s)
                self._past_s[event.island] += event.time_s - self._since_s.pop(event.island, event.time_s)
            case _:
                pass

    @property
    def position(self) -> str:
        """The last finished step, and of how many if that is known."""
        total = "" if self.started is None or not self.started.steps else f" of {self.started.steps}"
        return f"step {self.round.steps if self.round is not None else 0}{total}"

    def utilisation(self, now_s: float | None = None) -> float | None:
        """Mean over islands of computing time over time present, now or after the last round; None where either is unknown.

        A worker reports its work when it arrives. Until then its round counts at the speed of its last round.
        """
        if now_s is None:
            now_s = self.round.time_s if self.round is not None else 0.0
        present_s = dict(self._past_s)
        for island, since_s in self._since_s.items():
            present_s[island] = present_s.get(island, 0.0) + max(0.0, now_s - since_s)
        computed_s = {island: self._computed_s.get(island, 0.0) + self._under_way_s(island, now_s) for island in present_s}
        # An event may report work that ends later than now, hence the limit of 1.
        shares = [min(1.0, computed_s[island] / here_s) for island, here_s in present_s.items() if here_s > 0]
        return sum(shares) / len(shares) if shares and self._computed_s else None

    def staleness(self) -> float | None:
        """Mean over the last 20 arrivals; None before the first."""
        return sum(self._staleness) / len(self._staleness) if self._staleness else None

    def _dispatched(self, event: ev.Dispatched) -> None:
        if not self.asynchronous:
            # RunStarted also counts islands that join later. The hub dispatches every island that is present.
            self.asynchronous, self._since_s = True, {}
        if self.started is not None:
            self._since_s.setdefault(event.island, event.time_s)
        self._tasks[event.island] = event

    def _computed(self, event: ev.Computed) -> None:
        # An island with several devices counts the mean over them.
        self._computed_s[event.island] += (event.end_s - event.start_s) / (1 if event.device is None else self._devices)
        if event.steps:
            self._step_s[event.island] = (event.end_s - event.start_s) / event.steps
        self._tasks.pop(event.island, None)

    def _abandon(self, island: int, now_s: float) -> None:
        """A round ends without an update. The time that the worker spent on it still counts as computing."""
        self._computed_s[island] += self._under_way_s(island, now_s)
        del self._tasks[island]

    def _under_way_s(self, island: int, now_s: float) -> float:
        task = self._tasks.get(island)
        if task is None:
            return 0.0
        spent_s = max(0.0, now_s - task.begin_s)
        step_s = self._step_s.get(island)
        return spent_s if step_s is None else min(spent_s, task.steps * step_s)


def read_progress(folder: str | Path) -> RunningTotals:
    """How far the run in a folder is, finished or not. The folder must hold run.json; the log may be empty or missing."""
    read_settings(folder)
    totals, log = RunningTotals(), Path(folder) / "events.jsonl"
    for event in read_events(log) if log.exists() else ():
        totals.take(event)
    return totals


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The Run of a folder as plain data. ConfigError if run.json cannot be read, or another version of atoll wrote it."""
    return read_settings_file(Path(folder) / "run.json")


def read_settings_file(path: Path) -> dict[str, Any]:
    """The Run in a file like run.json as plain data."""
    folder = path.parent
    try:
        run = read_record(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not the folder of a run: {path.name} cannot be read ({error.strerror}). Give a folder that `atoll run` "
            f"wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({one_line(error)}). Restore it from a copy, or start a new run.") from error
    version = run.pop("format", 1)
    if version != RUN_FORMAT:
        raise ConfigError(
            f"{path} has format {str(version)[:50]}, and this version of atoll reads format {RUN_FORMAT}. Use the version of atoll "
            f"that wrote it (see source.txt there), or start a new run."
        )
    return run
