"""What the devices of all islands have in common: the algorithm that they run inside each island, and the means for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.core.protocols import Algorithm, Sink, Work
from atoll.engines.accounting import Books
from atoll.engines.simulator.compute_spans import Stretches
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What the devices of all islands have in common.

    Args:
        algorithm: what they do together.
        cluster: how many an island has, and the line between them.
        books: their accounts.
        stretches: has them compute.
        deal: deals out the data, by reader, batches, pieces and position of the schedule: device j of island i is reader
            i * devices + j.
        sink: takes events.
        make_replica: makes the replica of a reader.
    """

    algorithm: Algorithm[Any]
    cluster: Cluster
    books: Books
    stretches: Stretches
    deal: Callable[[int, int, int, int], Work]
    sink: Sink
    make_replica: Callable[[int], LocalReplica]

    def readers(self, island: int) -> range:
        """The island's devices among those of all islands."""
        count = self.cluster.devices_per_island
        return range(island * count, (island + 1) * count)
