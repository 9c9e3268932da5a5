"""A running account of a run's events: how far it is, and how busy its islands are."""

from __future__ import annotations

from collections import deque

from atoll.core.events import (
    Arrived,
    Computed,
    Dispatched,
    Evaluated,
    Event,
    IslandJoined,
    IslandLeft,
    Refused,
    Returned,
    RoundFinished,
    RunFinished,
    RunStarted,
    WarmStartFinished,
)

_LAST_ARRIVALS = 20


class Tally:
    """Takes events one by one and knows the latest of each kind that tells how far the run is.

    >>> tally = Tally()
    >>> tally.take(RunStarted(recipe="demo", algorithm="DDP", islands=2, params=10, steps=4, seed=0))
    >>> tally.take(Computed(island=0, round=0, start_s=0.0, end_s=3.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> tally.take(Computed(island=1, round=0, start_s=0.0, end_s=1.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> tally.utilisation(now_s=4.0)
    0.5
    """

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.warm_start: WarmStartFinished | None = None
        self.round: RoundFinished | None = None
        self.evaluation: Evaluated | None = None
        self.finished: RunFinished | None = None
        self.asynchronous = False
        self._devices = 1
        self._computed_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}  # of the islands that are here
        self._past_s: dict[int, float] = {}  # an island that left may come back: how long it was here before
        self._away: dict[int, Dispatched] = {}  # what workers are at, who report it when they arrive
        self._step_s: dict[int, float] = {}
        self._staleness: deque[int] = deque(maxlen=_LAST_ARRIVALS)

    def take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = event
                self._since_s = dict.fromkeys(range(event.islands), 0.0)
                self._devices = event.devices_per_island or 1
            case WarmStartFinished():
                self.warm_start = event
            case RoundFinished():
                self.round = event
            case Evaluated():
                self.evaluation = event
            case RunFinished():
                self.finished = event
            case Dispatched():
                self._sent_off(event)
            case Arrived():
                self._staleness.append(event.staleness)
                self._away.pop(event.island, None)
            case Computed():
                self._computed(event)
            case Refused() | Returned():
                # An update that is delivered a second time is refused too, but its round was over before.
                if event.island in self._away and self._away[event.island].round == event.round:
                    self._give_up(event.island, event.time_s)
            case IslandJoined():
                self._since_s[event.island] = event.time_s
            case IslandLeft():
                if event.island in self._away:
                    self._give_up(event.island, event.time_s)
                here_s = event.time_s - self._since_s.pop(event.island, event.time_s)
                self._past_s[event.island] = self._past_s.get(event.island, 0.0) + here_s
            case _:
                pass

    def utilisation(self, now_s: float) -> float | None:
        """Mean over islands of computing time over time present; None where presence or work is not known.

        A worker reports its work when it arrives. What it is at counts too, at the pace of its last round.
        """
        present_s = dict(self._past_s)
        for island, since_s in self._since_s.items():
            present_s[island] = present_s.get(island, 0.0) + max(0.0, now_s - since_s)
        computed_s = {island: self._computed_s.get(island, 0.0) + self._under_way_s(island, now_s) for island in present_s}
        # An asynchronous island may have reported work that ends later than now: it is busy, not more than busy.
        shares = [min(1.0, computed_s[island] / here_s) for island, here_s in present_s.items() if here_s > 0]
        return sum(shares) / len(shares) if shares and self._computed_s else None

    def staleness(self) -> float | None:
        """Mean over the last arrivals; None before the first."""
        return sum(self._staleness) / len(self._staleness) if self._staleness else None

    def _sent_off(self, event: Dispatched) -> None:
        if not self.asynchronous:
            # Islands that are to join later count in RunStarted but are not here yet; whoever is here is sent off.
            self.asynchronous, self._since_s = True, {}
        if self.started is not None:
            self._since_s.setdefault(event.island, event.time_s)
        self._away[event.island] = event

    def _computed(self, event: Computed) -> None:
        # Of an island with several devices, the mean over them.
        computed_s = (event.end_s - event.start_s) / (1 if event.device is None else self._devices)
        self._computed_s[event.island] = self._computed_s.get(event.island, 0.0) + computed_s
        if event.steps:
            self._step_s[event.island] = (event.end_s - event.start_s) / event.steps
        self._away.pop(event.island, None)

    def _give_up(self, island: int, now_s: float) -> None:
        """A round ends without an update: the time that went into it stays spent."""
        self._computed_s[island] = self._computed_s.get(island, 0.0) + self._under_way_s(island, now_s)
        del self._away[island]

    def _under_way_s(self, island: int, now_s: float) -> float:
        task = self._away.get(island)
        if task is None:
            return 0.0
        spent_s = max(0.0, now_s - task.begin_s)
        step_s = self._step_s.get(island)
        return spent_s if step_s is None else min(spent_s, task.steps * step_s)
