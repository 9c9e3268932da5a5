"""What each island of a run held in memory at most, read from its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core.events import MEMORY_KINDS, Event, MemoryCounted
from atoll.telemetry.event_log import read_events
from atoll.telemetry.units import human_bytes


@dataclass(frozen=True, kw_only=True)
class IslandMemory:
    """Bytes of one island's live tensors at its peak, activations and batches apart."""

    island: int
    parameters_bytes: int
    gradients_bytes: int
    communication_bytes: int
    optimizer_bytes: int
    copies_bytes: int
    peak_bytes: int

    @property
    def kinds(self) -> Mapping[str, int]:
        return {kind: getattr(self, f"{kind}_bytes") for kind in MEMORY_KINDS}


@dataclass(frozen=True, kw_only=True)
class MemorySummary:
    """Attributes:
    islands: in order of their numbers.
    formula: what ACCO's paper has for the algorithm, in bytes a parameter, with the run's own widths; None if it has none.
    formula_bytes: what that comes to.
    """

    islands: tuple[IslandMemory, ...]
    formula: str | None
    formula_bytes: int | None

    @property
    def largest(self) -> IslandMemory:
        """The island that held most; of several, the first."""
        return max(self.islands, key=lambda island: island.peak_bytes)

    @property
    def sharded(self) -> bool:
        """Whether each island holds a share of something, by the formula."""
        return self.formula is not None and "/" in self.formula

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the attributes' names, for JSON."""
        islands = [asdict(island) for island in self.islands]
        return {"islands": islands, "formula": self.formula, "formula_bytes": self.formula_bytes}


def memory_of(events: Iterable[Event]) -> MemorySummary | None:
    """The largest count of each island; None where nothing was counted. The formula is that of the last count."""
    largest: dict[int, MemoryCounted] = {}
    last: MemoryCounted | None = None
    for event in events:
        if isinstance(event, MemoryCounted):
            before, last = largest.get(event.island), event
            largest[event.island] = event if before is None or event.peak_bytes > before.peak_bytes else before
    if last is None:
        return None
    islands = tuple(_island(largest[number]) for number in sorted(largest))
    return MemorySummary(islands=islands, formula=last.formula, formula_bytes=last.formula_bytes)


def read_memory(folder: str | Path) -> MemorySummary | None:
    """What the islands of the run in a folder held, as far as it is; None where nothing was counted."""
    log = Path(folder) / "events.jsonl"
    return memory_of(read_events(log, kinds=(MemoryCounted,))) if log.exists() else None


def memory_line(summary: MemorySummary) -> str:
    """A line for a report: what the island that held most held, and what it should by the paper."""
    largest = summary.largest
    parts = ", ".join(f"{kind} {human_bytes(num_bytes)}" for kind, num_bytes in largest.kinds.items() if num_bytes)
    line = f"memory     {human_bytes(largest.peak_bytes)} an island at most: {parts}"
    if summary.formula is not None and summary.formula_bytes is not None:
        line += f"; by the paper's formula, {summary.formula} bytes a parameter, {human_bytes(summary.formula_bytes)}"
    return line


def _island(event: MemoryCounted) -> IslandMemory:
    kinds = {f"{kind}_bytes": getattr(event, f"{kind}_bytes") for kind in MEMORY_KINDS}
    return IslandMemory(island=event.island, **kinds, peak_bytes=event.peak_bytes)
