"""The islands of a synchronous run: what each consists of, what of it is saved, and slices cut anew when islands change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.core.events import Recut
from atoll.engines.accounting import Books
from atoll.engines.replicated_state import shared_fields, with_shared
from atoll.engines.resharding import missing_bytes, recut
from atoll.engines.simulator.island_devices import Devices, rest_of
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster


@dataclass
class Island:
    """One island that takes part."""

    id: int
    replica: LocalReplica
    """Its model; the first of them where devices have an algorithm of their own."""
    state: Any
    version: int
    """Of the shared fields it holds: the number of commits it knows of."""
    clock_s: float
    uplink_free_s: float
    """When its line has sent what others asked of it."""
    uncommitted_tokens: int = 0
    devices: Devices | None = None

    def part(self, newest: int) -> dict[str, Any]:
        """What a checkpoint must hold of it. Shared fields of the newest version are saved elsewhere, once for all."""
        return {
            "clock_s": self.clock_s,
            "version": self.version,
            "uncommitted_tokens": self.uncommitted_tokens,
            "shared": shared_fields(self.state) if self.version != newest else None,
            "rest": rest_of(self.state),
            "replica": None if self.devices else self.replica.state(),
            "devices": self.devices.parts() if self.devices else None,
        }


def cut_anew(islands: Mapping[int, Island], before: Mapping[int, dict[str, Any]], cluster: Cluster, books: Books) -> Recut:
    """What each island holds a slice of is cut for the islands that are there now. Each sends what others lack; the slices of those
    who left are at hand, but nobody's line carries them. `before` are the slices by island, in the order of the old ranks."""
    new = list(islands)
    sent = missing_bytes(before, new)
    start_s = max(island.clock_s for island in islands.values())
    lines = {island: cluster.line(island) for island in new}
    end_s = start_s + max(lines[i].latency_s + sent[i] / lines[i].up_bytes_per_s if sent[i] else 0.0 for i in new)
    for (number, mine), slices in zip(islands.items(), recut(list(before.values()), len(new)), strict=True):
        mine.state = with_shared(mine.state, slices)
        books.ledgers[number].sent_bytes += sent[number]
        books.ledgers[number].present_s += end_s - mine.clock_s
        mine.clock_s = mine.uplink_free_s = end_s
    return Recut(round=books.totals.round, islands=new, start_s=start_s, end_s=end_s, sent_bytes=list(sent.values()))
