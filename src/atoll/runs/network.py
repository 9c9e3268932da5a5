"""What it costs to talk: seconds and bytes of the collectives, from latency and bandwidth.

Collectives run in rings, in which every island sends at the same time to the next one and the slowest link sets the pace, or over
a star, in which every island talks to one server. Byte counts are exact, also where sizes do not divide: they are what an
implementation by pieces sends. Control messages (weights, counts) travel with the payload and cost no time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.layout import shard_range

Topology = Literal["ring", "star"]
CONTROL_BYTES = 8  # a weight or a count, to one peer


@dataclass(frozen=True, kw_only=True)
class Link:
    """An island's line to the others.

    Args:
        latency_s: one way, in seconds.
        bandwidth_mbit_per_s: both ways, unless `download_mbit_per_s` is given. Infinite, with a latency of 0, the line is free.
        download_mbit_per_s: towards the island, where the line is asymmetric.
    """

    latency_s: float = 0.030
    bandwidth_mbit_per_s: float = 100.0
    download_mbit_per_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(
                f"latency_s={self.latency_s}: a message needs 0 seconds or more. Give seconds, such as 0.03 for 30 ms."
            )
        for name in ("bandwidth_mbit_per_s", "download_mbit_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(
                    f"{name}={value}: a link carries more than 0 Mbit/s. Use a small number for a slow link, inf for a free one."
                )

    @property
    def up_bytes_per_s(self) -> float:
        return self.bandwidth_mbit_per_s * 1e6 / 8

    @property
    def down_bytes_per_s(self) -> float:
        return (self.download_mbit_per_s or self.bandwidth_mbit_per_s) * 1e6 / 8


class Cost(NamedTuple):
    """Of one collective: how long it takes from the moment that all are there, and what each participant sends."""

    seconds: float
    sent_bytes: list[int]


def transfer_s(num_bytes: float, sender: Link, receiver: Link) -> float:
    """One message."""
    return max(sender.latency_s, receiver.latency_s) + num_bytes / min(sender.up_bytes_per_s, receiver.down_bytes_per_s)


def all_reduce(numel: int, item_bytes: int, links: Sequence[Link], topology: Topology = "ring") -> Cost:
    """Everybody gets the sum: a reduce-scatter and an all-gather, or up to a server and down again."""
    if topology == "star":
        return _star(numel * item_bytes, links)
    scatter, gather = reduce_scatter(numel, item_bytes, links), all_gather(numel, item_bytes, links)
    sent = [one + two for one, two in zip(scatter.sent_bytes, gather.sent_bytes, strict=True)]
    return Cost(scatter.seconds + gather.seconds, sent)


def reduce_scatter(numel: int, item_bytes: int, links: Sequence[Link]) -> Cost:
    """Everybody gets its shard of the sum: each sends every shard but its own."""
    shards = _shards(numel, len(links))
    return Cost(_ring_s(max(shards) * item_bytes, links), [(numel - shard) * item_bytes for shard in shards])


def all_gather(numel: int, item_bytes: int, links: Sequence[Link]) -> Cost:
    """Everybody gets everybody's shard: each shard is sent to all the others."""
    shards = _shards(numel, len(links))
    return Cost(_ring_s(max(shards) * item_bytes, links), [shard * item_bytes * (len(links) - 1) for shard in shards])


def _shards(numel: int, size: int) -> list[int]:
    return [stop - start for start, stop in (shard_range(numel, rank, size) for rank in range(size))]


def _ring_s(piece_bytes: int, links: Sequence[Link]) -> float:
    """size - 1 steps in which each island sends one piece to the next; the slowest pair sets the pace."""
    size = len(links)
    if size == 1:
        return 0.0
    return (size - 1) * max(transfer_s(piece_bytes, links[rank], links[(rank + 1) % size]) for rank in range(size))


def _star(num_bytes: int, links: Sequence[Link]) -> Cost:
    """Up to a server with room for all, then down. Each island's own line is what limits it."""
    if len(links) == 1:
        return Cost(0.0, [0])
    up = max(link.latency_s + num_bytes / link.up_bytes_per_s for link in links)
    down = max(link.latency_s + num_bytes / link.down_bytes_per_s for link in links)
    return Cost(up + down, [num_bytes] * len(links))
