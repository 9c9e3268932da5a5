"""Figures of a synchronous run: how each island spent its time, and how much of the exchanges was hidden behind computing.

In a run of two levels each island has devices with an algorithm of their own, and each device counts as one island here: device j
of island i has the number i * devices + j.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from atoll.core import events as ev
from atoll.telemetry.async_summary import is_asynchronous
from atoll.telemetry.event_log import read_events
from atoll.telemetry.units import JsonRecord

Interval = tuple[float, float]
"""Start and end, in seconds on the run's clock."""
_ROUNDING = 1e-9  # a smaller share of the time is an error of float addition
_REPORTED = re.compile(
    rb'"background": true|"devices_per_island": \d|"engine": "(?!simulator")|\{"event": "(UpdateSkipped|RoundFailed)"'
)


@dataclass(frozen=True, kw_only=True)
class IslandTimes(JsonRecord):
    """One island's work and times. `present_s` is the sum of `computed_s`, `talked_s` (communicating) and `waited_s`."""

    derived = ("talked_s", "waited_s")
    time_parts: ClassVar[Mapping[str, str]] = {"computing": "computed_s", "communicating": "talked_s", "waiting": "waited_s"}
    island: int
    batches: float  # a part of a batch counts by its size
    tokens: int
    present_s: float
    computed_s: float
    exchanged_s: float  # in exchanges, hidden or not
    hidden_s: float  # the part of the exchanges during which the island computed, so that it cost no time
    inside_exchanged_s: float | None = None  # of a device: the part of `exchanged_s` with devices of the same island
    inside_hidden_s: float | None = None

    @property
    def talked_s(self) -> float:
        """In exchanges during which the island did not compute."""
        return self.exchanged_s - self.hidden_s

    @property
    def waited_s(self) -> float:
        """Neither computing nor exchanging. On real machines this includes evaluations and checkpoints."""
        idle_s = self.present_s - self.computed_s - self.talked_s
        return idle_s if idle_s > _ROUNDING * self.present_s else 0.0

    @property
    def hidden(self) -> float | None:
        """The hidden share of the exchanges; of a device, of those inside its island."""
        if self.inside_exchanged_s is None or self.inside_hidden_s is None:
            return _share(self.hidden_s, self.exchanged_s)
        return _share(self.inside_hidden_s, self.inside_exchanged_s)


@dataclass(frozen=True, kw_only=True)
class ExchangeLevel(JsonRecord):
    """The exchanges inside islands, or those between islands, of a run of two levels. Times are sums over all devices."""

    derived = ("hidden",)
    exchanges: int
    background: int  # exchanges that ran in the background of computing
    sent_bytes: float  # payload: mean over devices inside islands, mean over islands between them
    exchanged_s: float
    hidden_s: float
    dropped_tokens: int | None
    """Inside islands: tokens whose gradients an island discarded when it received new weights. None before the end."""

    @property
    def hidden(self) -> float | None:
        return _share(self.hidden_s, self.exchanged_s)


@dataclass(frozen=True, kw_only=True)
class OverlapSummary(JsonRecord):
    derived = ("hidden",)
    islands: tuple[IslandTimes, ...]  # in a run of two levels, one entry per device
    background: int  # exchanges that ran in the background of computing
    exchanges: int
    skipped: int  # updates that all islands left out, because gradients were missing or not finite
    failed: int  # rounds without a result, because an island missed the exchange
    most_tokens: int  # of the largest round; `fewest_tokens` of the smallest that committed any
    fewest_tokens: int
    devices_per_island: int | None = None
    inside: ExchangeLevel | None = None
    between: ExchangeLevel | None = None

    @property
    def hidden(self) -> float | None:
        """The hidden share of the exchanges of all islands."""
        return _share(sum(island.hidden_s for island in self.islands), sum(island.exchanged_s for island in self.islands))


def overlap_of(events: Iterable[ev.Event]) -> OverlapSummary:
    """The figures up to the latest event of a synchronous run.

    >>> computed = ev.Computed(island=0, round=0, start_s=0.0, end_s=3.0, steps=1, batches=1, tokens=8, loss=2.0)
    >>> overlap_of([computed]).islands[0].computed_s
    3.0
    """
    islands: defaultdict[int, _IslandTotals] = defaultdict(_IslandTotals)
    counts, round_tokens = Counter[str](), list[int]()
    devices, dropped_tokens, tokens, between_bytes = None, None, 0, 0.0
    for event in by_device(events):
        match event:
            case ev.RunStarted():
                devices = event.devices_per_island
            case ev.Computed():
                islands[event.island].compute(event)
            case ev.Exchanged():
                level = "between" if event.inside is None else "inside"
                counts.update({level: 1, f"{level} background": event.background, f"{level} bytes": sum(event.sent_bytes)})
                for number, arrived_s in zip(event.islands, event.arrived_s, strict=True):
                    if max(arrived_s, event.start_s) < event.end_s:  # else the island arrived after the end of the exchange
                        islands[number].intervals[level].append((max(arrived_s, event.start_s), event.end_s))
            case ev.CaughtUp() | ev.Recut():
                for number in event.islands if isinstance(event, ev.Recut) else [event.island]:
                    islands[number].until_s = max(islands[number].until_s, event.end_s)
            case ev.IslandJoined():
                islands[event.island].since_s = islands[event.island].until_s = event.time_s
            case ev.IslandLeft():
                islands[event.island].leave()
            case ev.UpdateSkipped() | ev.RoundFailed():
                counts[type(event).__name__] += 1
            case ev.RoundFinished():
                for island in islands.values():
                    island.settle()
                between_bytes = event.sent_bytes_per_island
                round_tokens.append(event.tokens - tokens)
                tokens = event.tokens
            case ev.RunFinished():
                dropped_tokens, between_bytes = event.inside_dropped_tokens, event.sent_bytes_per_island
            case _:
                pass
    for island in islands.values():
        island.settle()

    def exchange_level(name: str, sent_bytes: float, dropped_tokens: int | None = None) -> ExchangeLevel:
        return ExchangeLevel(
            exchanges=counts[name],
            background=counts[f"{name} background"],
            sent_bytes=sent_bytes,
            exchanged_s=sum(device.exchanged_s[name] for device in islands.values()),
            hidden_s=sum(device.hidden_s[name] for device in islands.values()),
            dropped_tokens=dropped_tokens,
        )

    committed = [count for count in round_tokens if count > 0]  # a failed or skipped round commits none
    inside_bytes = counts["inside bytes"] / max(1, len(islands))
    return OverlapSummary(
        islands=tuple(island.times(number, two_levels=devices is not None) for number, island in sorted(islands.items())),
        background=counts["between background"] + counts["inside background"],
        exchanges=counts["between"] + counts["inside"],
        skipped=counts["UpdateSkipped"],
        failed=counts["RoundFailed"],
        most_tokens=max(committed, default=0),
        fewest_tokens=min(committed, default=0),
        devices_per_island=devices,
        inside=None if devices is None else exchange_level("inside", inside_bytes, dropped_tokens),
        between=None if devices is None else exchange_level("between", between_bytes),
    )


def read_overlap(folder: str | Path) -> OverlapSummary | None:
    """The figures of the synchronous run in a folder, finished or not; None for an asynchronous one."""
    return None if is_asynchronous(folder) else overlap_of(read_events(Path(folder) / "events.jsonl"))


def reports_overlap(folder: str | Path) -> bool:
    """Whether a report shows these figures: an exchange ran in the background, the run has two levels or a wall clock, or a round
    failed or was skipped. The log is searched, not parsed."""
    with (Path(folder) / "events.jsonl").open("rb") as log:
        return any(_REPORTED.search(line) for line in log)


def by_device(events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """The events of a run of two levels as if each device were an island; those of other runs unchanged.

    An event of an island becomes one of each of its devices. The first device has all bytes of the island, so sums stay the same.
    """
    count: int | None = None
    for event in events:
        if isinstance(event, ev.RunStarted):
            count = event.devices_per_island
        if count is None:
            yield event
        else:
            yield from _split_by_device(event, count)


def _split_by_device(event: ev.Event, count: int) -> Iterator[ev.Event]:
    devices = range(count)
    match event:
        case ev.Computed() if event.device is not None:
            yield replace(event, island=event.island * count + event.device)
        case ev.Exchanged() | ev.UpdateSkipped() if event.inside is not None:
            yield replace(event, islands=[event.inside * count + device for device in event.islands])
        case ev.Exchanged():
            yield replace(
                event,
                islands=[island * count + device for island in event.islands for device in devices],
                heard=[heard for heard in event.heard for _ in devices],
                arrived_s=[arrived_s for arrived_s in event.arrived_s for _ in devices],
                sent_bytes=[0 if device else size for size in event.sent_bytes for device in devices],
                control_bytes=[0 if device else size for size in event.control_bytes for device in devices],
            )
        case ev.CaughtUp() | ev.IslandJoined() | ev.IslandLeft():
            for device in devices:
                split: ev.Event = replace(event, island=event.island * count + device)
                if isinstance(split, ev.CaughtUp | ev.IslandJoined):
                    donor = None if split.donor is None else split.donor * count
                    split = replace(split, donor=donor, sent_bytes=0 if device else split.sent_bytes)
                yield split
        case _:
            yield event


def device_name(number: int, devices_per_island: int | None) -> str:
    """
    >>> device_name(5, 2), device_name(5, None)
    ('2.1', '5')
    """
    return str(number) if devices_per_island is None else f"{number // devices_per_island}.{number % devices_per_island}"


class _IslandTotals:
    """Intervals wait for the end of their round, because the log has an exchange before the computing that hides it."""

    def __init__(self) -> None:
        self.intervals: dict[str, list[Interval]] = {"computing": [], "between": [], "inside": []}
        self.exchanged_s, self.hidden_s = ({"between": 0.0, "inside": 0.0} for _ in range(2))
        self.batches, self.tokens, self.computed_s = 0.0, 0, 0.0
        self.past_s = self.since_s = self.until_s = 0.0

    def compute(self, event: ev.Computed) -> None:
        self.batches += event.batches
        self.tokens += event.tokens
        self.intervals["computing"].append((event.start_s, event.end_s))

    def settle(self) -> None:
        """Adds the intervals of the round to the totals."""
        ordered = {kind: disjoint(intervals) for kind, intervals in self.intervals.items()}
        self.computed_s += _length_s(ordered["computing"])
        for level in self.exchanged_s:
            self.exchanged_s[level] += _length_s(ordered[level])
            self.hidden_s[level] += shared_s(ordered["computing"], ordered[level])
        self.until_s = max([self.until_s, *(end_s for intervals in ordered.values() for _, end_s in intervals)])
        self.intervals = {kind: [] for kind in self.intervals}

    def leave(self) -> None:
        self.settle()
        self.past_s += self.until_s - self.since_s
        self.since_s = self.until_s

    def times(self, island: int, *, two_levels: bool) -> IslandTimes:
        return IslandTimes(
            island=island,
            batches=self.batches,
            tokens=self.tokens,
            present_s=self.past_s + self.until_s - self.since_s,
            computed_s=self.computed_s,
            exchanged_s=sum(self.exchanged_s.values()),
            hidden_s=sum(self.hidden_s.values()),
            inside_exchanged_s=self.exchanged_s["inside"] if two_levels else None,
            inside_hidden_s=self.hidden_s["inside"] if two_levels else None,
        )


def disjoint(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, each cut to begin where the one before it ends. Measured exchanges may overlap: an island may enter
    its next exchange before all others left the last one.

    >>> disjoint([(4.0, 5.0), (0.0, 2.0), (1.5, 3.0), (2.0, 2.5)])
    [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0)]
    """
    kept: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        start_s = max(start_s, kept[-1][1]) if kept else start_s
        if start_s < end_s:
            kept.append((start_s, end_s))
    return kept


def shared_s(one: Sequence[Interval], two: Sequence[Interval]) -> float:
    """The time that both sequences cover. Each is in order and disjoint.

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


def _length_s(intervals: Sequence[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _share(part_s: float, whole_s: float) -> float | None:
    return part_s / whole_s if whole_s else None
