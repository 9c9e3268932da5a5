"""Where the islands' time went in a run whose islands meet: who computes, who waits, and how much of the exchanges was hidden.

An island's time at hand is split into three parts that add up to it: computing; talking, which is the part of the exchanges during
which it did not compute; and waiting, for others or for an exchange that they are late for. What is hidden is the part of the
exchanges during which it did compute, so that they cost it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll.events import (
    CaughtUp,
    Computed,
    Event,
    Exchanged,
    IslandJoined,
    IslandLeft,
    Recut,
    RoundFailed,
    RoundFinished,
    RunStarted,
    UpdateSkipped,
)
from atoll.telemetry.asynchrony import is_asynchronous
from atoll.telemetry.jsonl import read_events
from atoll.telemetry.levels import by_device

Stretch = tuple[float, float]
"""From when to when, in seconds of virtual time."""
_ROUNDING = 1e-9  # shares of time below this are what adding up floats leaves
_TELLING = (b'"background": true', b'{"event": "UpdateSkipped"', b'{"event": "RoundFailed"')


@dataclass(frozen=True, kw_only=True)
class IslandTimes:
    """One island's share of a run. `present_s` is the sum of `computed_s`, `talked_s` and `waited_s`.

    Attributes:
        batches: that it computed, pieces of them by their size.
        exchanged_s: in exchanges, hidden or not.
        hidden_s: the part of these during which it computed.
    """

    island: int
    batches: float
    tokens: int
    present_s: float
    computed_s: float
    exchanged_s: float
    hidden_s: float

    @property
    def talked_s(self) -> float:
        """In exchanges that held it up."""
        return self.exchanged_s - self.hidden_s

    @property
    def waited_s(self) -> float:
        """For others: it neither computed nor exchanged anything."""
        idle_s = self.present_s - self.computed_s - self.talked_s
        return idle_s if idle_s > _ROUNDING * self.present_s else 0.0

    @property
    def busy(self) -> float | None:
        """Computing time over time present."""
        return self.computed_s / self.present_s if self.present_s else None

    @property
    def hidden(self) -> float | None:
        """The share of its exchanges that was hidden."""
        return self.hidden_s / self.exchanged_s if self.exchanged_s else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "talked_s": self.talked_s, "waited_s": self.waited_s}


@dataclass(frozen=True, kw_only=True)
class OverlapSummary:
    """A synchronous run in figures.

    Attributes:
        islands: in order of their numbers.
        background: exchanges that went on while islands computed, or could have.
        exchanges: all of them.
        skipped: updates that were left out because gradients were not finite, or there were none.
        failed: rounds that were void because somebody was not heard.
        most_tokens: of one round; `fewest_tokens` of one that committed any.
        devices_per_island: where devices have an algorithm of their own; `islands` are then these, counted through all islands.
    """

    islands: tuple[IslandTimes, ...]
    background: int
    exchanges: int
    skipped: int
    failed: int
    most_tokens: int
    fewest_tokens: int
    devices_per_island: int | None = None

    @property
    def hidden(self) -> float | None:
        """The share of all islands' exchanges during which they computed."""
        exchanged_s = sum(island.exchanged_s for island in self.islands)
        return sum(island.hidden_s for island in self.islands) / exchanged_s if exchanged_s else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the attributes' names, for JSON."""
        record = {**asdict(self), "hidden": self.hidden}
        if self.devices_per_island is None:
            del record["devices_per_island"]
        return {**record, "islands": [island.to_dict() for island in self.islands]}


class Overlap:
    """Takes a run's events one by one, in order, and can be asked at any time.

    >>> overlap = Overlap()
    >>> overlap.take(Computed(island=0, round=0, start_s=0.0, end_s=3.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> overlap.summary().islands[0].computed_s
    3.0
    """

    def __init__(self) -> None:
        self._islands: dict[int, _Island] = {}
        self._background = self._exchanges = self._skipped = self._failed = 0
        self._devices: int | None = None
        self._tokens = 0
        self._round_tokens: tuple[int, int] | None = None

    def take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._devices = event.devices_per_island
            case Computed():
                self._island(event.island).computed(event)
            case Exchanged():
                self._exchanged(event)
            case CaughtUp():
                self._island(event.island).here_until(event.end_s)
            case Recut():
                for number in event.islands:
                    self._island(number).here_until(event.end_s)
            case IslandJoined():
                self._island(event.island).since_s = self._island(event.island).until_s = event.virtual_time_s
            case IslandLeft():
                self._island(event.island).left()
            case UpdateSkipped():
                self._skipped += 1
            case RoundFailed():
                self._failed += 1
            case RoundFinished():
                self._finished(event)
            case _:
                pass

    def summary(self) -> OverlapSummary:
        fewest, most = self._round_tokens or (0, 0)
        return OverlapSummary(
            islands=tuple(one.times(number) for number, one in sorted(self._islands.items())),
            background=self._background,
            exchanges=self._exchanges,
            skipped=self._skipped,
            failed=self._failed,
            most_tokens=most,
            fewest_tokens=fewest,
            devices_per_island=self._devices,
        )

    def _exchanged(self, event: Exchanged) -> None:
        self._exchanges += 1
        self._background += event.background
        for number, arrived_s in zip(event.islands, event.arrived_s, strict=True):
            self._island(number).exchanges.append((max(arrived_s, event.start_s), event.end_s))

    def _finished(self, event: RoundFinished) -> None:
        for island in self._islands.values():
            island.settle()
        tokens, self._tokens = event.tokens - self._tokens, event.tokens
        if tokens > 0:  # a round that was void or skipped committed none
            fewest, most = self._round_tokens or (tokens, tokens)
            self._round_tokens = min(fewest, tokens), max(most, tokens)

    def _island(self, number: int) -> _Island:
        return self._islands.setdefault(number, _Island([], []))


def read_overlap(folder: str | Path) -> OverlapSummary | None:
    """The figures of the run in a folder, as far as it is; None for an asynchronous one."""
    if is_asynchronous(folder):
        return None
    overlap = Overlap()
    for event in by_device(read_events(Path(folder) / "events.jsonl")):
        overlap.take(event)
    return overlap.summary()


def worth_telling(folder: str | Path) -> bool:
    """Whether exchanges of the run in a folder were hidden, or something went wrong. The log is skimmed, not parsed."""
    with (Path(folder) / "events.jsonl").open("rb") as log:
        return any(sign in line for line in log for sign in _TELLING)


def shared_s(one: Sequence[Stretch], two: Sequence[Stretch]) -> float:
    """How long both go on. Each is in order, and its stretches do not overlap.

    >>> shared_s([(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)])
    3.0
    """
    total_s, first, second = 0.0, 0, 0
    while first < len(one) and second < len(two):
        (start_s, end_s), (other_start_s, other_end_s) = one[first], two[second]
        total_s += max(0.0, min(end_s, other_end_s) - max(start_s, other_start_s))
        if end_s < other_end_s:
            first += 1
        else:
            second += 1
    return total_s


@dataclass
class _Island:
    """One island's account. Stretches wait for the end of their round, for an exchange is told when it begins."""

    stretches: list[Stretch]
    exchanges: list[Stretch]
    batches: float = 0.0
    tokens: int = 0
    computed_s: float = 0.0
    exchanged_s: float = 0.0
    hidden_s: float = 0.0
    past_s: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0

    def computed(self, event: Computed) -> None:
        self.batches += event.batches
        self.tokens += event.tokens
        self.stretches.append((event.start_s, event.end_s))

    def here_until(self, time_s: float) -> None:
        self.until_s = max(self.until_s, time_s)

    def settle(self) -> None:
        """What the round came to."""
        exchanges = [stretch for stretch in sorted(self.exchanges) if stretch[0] < stretch[1]]
        self.computed_s += sum(end_s - start_s for start_s, end_s in self.stretches)
        self.exchanged_s += sum(end_s - start_s for start_s, end_s in exchanges)
        self.hidden_s += shared_s(sorted(self.stretches), exchanges)
        for _, end_s in (*self.stretches, *exchanges):
            self.here_until(end_s)
        self.stretches, self.exchanges = [], []

    def left(self) -> None:
        self.settle()
        self.past_s += self.until_s - self.since_s
        self.since_s = self.until_s

    def times(self, island: int) -> IslandTimes:
        now = replace(self)
        now.settle()  # of a round that is not over, what is known of it
        return IslandTimes(
            island=island,
            batches=now.batches,
            tokens=now.tokens,
            present_s=now.past_s + now.until_s - now.since_s,
            computed_s=now.computed_s,
            exchanged_s=now.exchanged_s,
            hidden_s=now.hidden_s,
        )
