"""Where the islands' time went in a run whose islands meet: who computes, who waits, and how much of the exchanges was hidden.

An island's time at hand is split into three parts that add up to it: computing; talking, which is the part of the exchanges during
which it did not compute; and waiting, for others or for an exchange that they are late for. What is hidden is the part of the
exchanges during which it did compute, so that they cost it nothing.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.events import (
    CaughtUp,
    Computed,
    Event,
    Exchanged,
    IslandJoined,
    IslandLeft,
    Recut,
    RoundFailed,
    RoundFinished,
    RunFinished,
    RunStarted,
    UpdateSkipped,
)
from atoll.telemetry.async_summary import is_asynchronous
from atoll.telemetry.device_events import by_device
from atoll.telemetry.event_log import read_events
from atoll.telemetry.island_times import IslandAccount, IslandTimes

_TELLING = re.compile(rb'"background": true|"devices_per_island": \d|"engine": "(?!sim")|\{"event": "(UpdateSkipped|RoundFailed)"')


@dataclass(frozen=True, kw_only=True)
class Level:
    """Exchanges inside islands, or those between them, of a run that has both.

    Attributes:
        background: of these `exchanges`, those that went on while devices computed, or could have.
        sent_bytes: payload: inside of each device on average, between of each island.
        exchanged_s: of all devices together.
        hidden_s: the part of it during which they computed.
        dropped_tokens: inside: whose gradients waited when an island was given other weights; None as long as it is not known.
    """

    exchanges: int
    background: int
    sent_bytes: float
    exchanged_s: float
    hidden_s: float
    dropped_tokens: int | None = None

    @property
    def hidden(self) -> float | None:
        """The share of the exchanges that was hidden."""
        return self.hidden_s / self.exchanged_s if self.exchanged_s else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hidden": self.hidden}


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
        inside: exchanges between devices of one island; `between`: those of islands. None where devices have no algorithm.
    """

    islands: tuple[IslandTimes, ...]
    background: int
    exchanges: int
    skipped: int
    failed: int
    most_tokens: int
    fewest_tokens: int
    devices_per_island: int | None = None
    inside: Level | None = None
    between: Level | None = None

    @property
    def hidden(self) -> float | None:
        """The share of all islands' exchanges during which they computed."""
        exchanged_s = sum(island.exchanged_s for island in self.islands)
        return sum(island.hidden_s for island in self.islands) / exchanged_s if exchanged_s else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the attributes' names, for JSON."""
        record = {**asdict(self), "hidden": self.hidden, "islands": [island.to_dict() for island in self.islands]}
        for name in ("inside", "between"):
            level: Level | None = getattr(self, name)
            record[name] = None if level is None else level.to_dict()
        two_levels = ("devices_per_island", "inside", "between")
        return {key: value for key, value in record.items() if value is not None or key not in two_levels}


class Overlap:
    """Takes a run's events one by one, in order, and can be asked at any time.

    >>> overlap = Overlap()
    >>> overlap.take(Computed(island=0, round=0, start_s=0.0, end_s=3.0, steps=1, batches=1, tokens=8, loss=2.0))
    >>> overlap.summary().islands[0].computed_s
    3.0
    """

    def __init__(self) -> None:
        self._islands: dict[int, IslandAccount] = {}
        self._background = self._exchanges = self._skipped = self._failed = 0
        self._devices: int | None = None
        self._inside = self._inside_background = self._inside_bytes = 0
        self._between_bytes = 0.0
        self._dropped_tokens: int | None = None
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
                self._island(event.island).since_s = self._island(event.island).until_s = event.time_s
            case IslandLeft():
                self._island(event.island).left()
            case UpdateSkipped():
                self._skipped += 1
            case RoundFailed():
                self._failed += 1
            case RoundFinished():
                self._finished(event)
            case RunFinished():
                self._between_bytes = event.sent_bytes_per_island
                self._dropped_tokens = event.inside_dropped_tokens
            case _:
                pass

    def summary(self) -> OverlapSummary:
        fewest, most = self._round_tokens or (0, 0)
        accounts = {number: one.so_far() for number, one in sorted(self._islands.items())}
        inside, between = self._levels(list(accounts.values())) if self._devices is not None else (None, None)
        return OverlapSummary(
            islands=tuple(one.times(number, two_levels=self._devices is not None) for number, one in accounts.items()),
            background=self._background,
            exchanges=self._exchanges,
            skipped=self._skipped,
            failed=self._failed,
            most_tokens=most,
            fewest_tokens=fewest,
            devices_per_island=self._devices,
            inside=inside,
            between=between,
        )

    def _levels(self, accounts: list[IslandAccount]) -> tuple[Level, Level]:
        """Those inside, and those between islands."""
        exchanged_s, hidden_s = sum(one.inside_exchanged_s for one in accounts), sum(one.inside_hidden_s for one in accounts)
        inside = Level(
            exchanges=self._inside,
            background=self._inside_background,
            sent_bytes=self._inside_bytes / max(1, len(accounts)),
            exchanged_s=exchanged_s,
            hidden_s=hidden_s,
            dropped_tokens=self._dropped_tokens,
        )
        between = Level(
            exchanges=self._exchanges - self._inside,
            background=self._background - self._inside_background,
            sent_bytes=self._between_bytes,
            exchanged_s=sum(one.exchanged_s for one in accounts) - exchanged_s,
            hidden_s=sum(one.hidden_s for one in accounts) - hidden_s,
        )
        return inside, between

    def _exchanged(self, event: Exchanged) -> None:
        self._exchanges += 1
        self._background += event.background
        if event.inside is not None:
            self._inside += 1
            self._inside_background += event.background
            self._inside_bytes += sum(event.sent_bytes)
        for number, arrived_s in zip(event.islands, event.arrived_s, strict=True):
            start_s = max(arrived_s, event.start_s)
            self._island(number).exchanged(start_s, event.end_s, inside=event.inside is not None)

    def _finished(self, event: RoundFinished) -> None:
        for island in self._islands.values():
            island.settle()
        self._between_bytes = event.sent_bytes_per_island
        tokens, self._tokens = event.tokens - self._tokens, event.tokens
        if tokens > 0:  # a round that was void or skipped committed none
            fewest, most = self._round_tokens or (tokens, tokens)
            self._round_tokens = min(fewest, tokens), max(most, tokens)

    def _island(self, number: int) -> IslandAccount:
        return self._islands.setdefault(number, IslandAccount())


def read_overlap(folder: str | Path) -> OverlapSummary | None:
    """The figures of the run in a folder, as far as it is; None for an asynchronous one."""
    if is_asynchronous(folder):
        return None
    overlap = Overlap()
    for event in by_device(read_events(Path(folder) / "events.jsonl")):
        overlap.take(event)
    return overlap.summary()


def worth_telling(folder: str | Path) -> bool:
    """Whether exchanges of the run in a folder were hidden, it has two levels or a real clock, or something went wrong. The log is
    skimmed, not parsed."""
    with (Path(folder) / "events.jsonl").open("rb") as log:
        return any(_TELLING.search(line) for line in log)
