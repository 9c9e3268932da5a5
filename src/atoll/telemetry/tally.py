"""A running account of a run's events: how far it is, and how busy its islands are."""

from __future__ import annotations

from atoll.events import (
    Computed,
    Evaluated,
    Event,
    IslandJoined,
    IslandLeft,
    RoundFinished,
    RunFinished,
    RunStarted,
    WarmStartFinished,
)


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
        self._computed_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}  # of the islands that are here
        self._past_s: dict[int, float] = {}  # an island that left may come back: how long it was here before

    def take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = event
                self._since_s = dict.fromkeys(range(event.islands), 0.0)
            case WarmStartFinished():
                self.warm_start = event
            case RoundFinished():
                self.round = event
            case Evaluated():
                self.evaluation = event
            case RunFinished():
                self.finished = event
            case Computed():
                self._computed_s[event.island] = self._computed_s.get(event.island, 0.0) + event.end_s - event.start_s
            case IslandJoined():
                self._since_s[event.island] = event.virtual_time_s
            case IslandLeft():
                here_s = event.virtual_time_s - self._since_s.pop(event.island, event.virtual_time_s)
                self._past_s[event.island] = self._past_s.get(event.island, 0.0) + here_s
            case _:
                pass

    def utilisation(self, now_s: float) -> float | None:
        """Mean over islands of computing time over time present; None where presence or work is not known."""
        present_s = dict(self._past_s)
        for island, since_s in self._since_s.items():
            present_s[island] = present_s.get(island, 0.0) + max(0.0, now_s - since_s)
        # An asynchronous island may have reported work that ends later than now: it is busy, not more than busy.
        shares = [min(1.0, self._computed_s.get(island, 0.0) / here_s) for island, here_s in present_s.items() if here_s > 0]
        return sum(shares) / len(shares) if shares and self._computed_s else None
