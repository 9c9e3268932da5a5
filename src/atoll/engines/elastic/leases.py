"""Who trains on what, when islands come and go: data in units, each of which ends in exactly one committed delta.

A unit is a stretch of batches of one shard. It is leased to an island for a round. If the island's delta is in the commit, the unit
is delivered; if not, because the island died, fell behind or was refused, the unit goes back and is leased again, before any
other. Everybody who commits keeps the same account by the same rule, so nobody has to be asked, and nobody's death loses it.

With all islands there all the time, island i trains on shard i as in any other run. An island that finds its own shard ahead of
others, since theirs were away, goes on with one that is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.errors import ConfigError, ExchangeFailed


class Unit(NamedTuple):
    """A stretch of a shard.

    Attributes:
        shard: of the data.
        start: its first batch.
        batches: how many.
    """

    shard: int
    start: int
    batches: int


class Settled(NamedTuple):
    """What became of the leases of a round, by island."""

    delivered: dict[str, Unit]
    returned: dict[str, Unit]


class Leases:
    """The account of all data.

    Args:
        shards: how many there are.
        batches: of a unit.
        units: that are to be delivered in all.

    >>> leases = Leases(shards=2, batches=10, units=4)
    >>> leases.lease(["a", "b"])
    {'a': Unit(shard=0, start=0, batches=10), 'b': Unit(shard=1, start=0, batches=10)}
    >>> leases.settle(["a"])  # b has died
    Settled(delivered={'a': Unit(shard=0, start=0, batches=10)}, returned={'b': Unit(shard=1, start=0, batches=10)})
    >>> leases.lease(["a"])  # and a goes on with what it leaves
    {'a': Unit(shard=1, start=0, batches=10)}
    """

    def __init__(self, *, shards: int, batches: int, units: int) -> None:
        if shards < 1 or batches < 1 or units < 1:
            raise ConfigError(f"{units} units of {batches} batches from {shards} shards: there must be at least one of each.")
        self.units, self.delivered = units, 0
        self.out: dict[str, Unit] = {}
        """Leased and not settled."""
        self._batches = batches
        self._positions, self._counts = [0] * shards, [0] * shards
        """Of each shard: batches that were leased at least once, and units that are out or delivered."""
        self._returned: list[Unit] = []
        self._last: dict[str, int] = {}
        """The shard that each island was given last; at first they are dealt in the order in which islands come."""

    @property
    def done(self) -> bool:
        return self.delivered >= self.units

    def settle(self, delivered: Collection[str]) -> Settled:
        """A round is over, and the deltas of these islands are in the commit."""
        strangers = sorted(set(delivered) - self.out.keys())
        if strangers:
            raise ExchangeFailed(f"islands {strangers} delivered without a lease. Everybody must keep the same account.")
        settled = Settled(
            {n: u for n, u in self.out.items() if n in delivered}, {n: u for n, u in self.out.items() if n not in delivered}
        )
        self.delivered += len(settled.delivered)
        for unit in settled.returned.values():
            self._counts[unit.shard] -= 1
            self._returned.append(unit)
        self.out = {}
        return settled

    def lease(self, names: Iterable[str]) -> dict[str, Unit]:
        """Lease a unit to each of these islands, in this order, as long as there are some left."""
        assert not self.out, "the last round is not settled"
        for name in names:
            if self.delivered + len(self.out) < self.units:
                self.out[name] = self._next(name)
        return dict(self.out)

    def _next(self, name: str) -> Unit:
        shard = self._last.setdefault(name, len(self._last) % len(self._positions))
        if self._returned:  # before anything new: else it may be missing at the end, when enough others are delivered
            unit = next((unit for unit in self._returned if unit.shard == shard), self._returned[0])
            self._returned.remove(unit)
            self._counts[unit.shard] += 1
            return unit
        least = min(self._counts)
        if self._counts[shard] > least:
            shard = self._last[name] = self._counts.index(least)
        self._counts[shard] += 1
        start = self._positions[shard]
        self._positions[shard] += self._batches
        return Unit(shard, start, self._batches)

    def check(self) -> None:
        """Whether every batch that was ever leased is delivered, out or returned, and nothing twice."""
        waiting = [*self._returned, *self.out.values()]
        batches = self.delivered * self._batches + sum(unit.batches for unit in waiting)
        if batches != sum(self._positions) or len({(unit.shard, unit.start) for unit in waiting}) != len(waiting):
            raise ExchangeFailed(
                f"the account of data is wrong: {sum(self._positions)} batches were leased, of which {self.delivered} units are "
                f"delivered and {waiting} are not. What was saved before this round stands."
            )

    def to_parts(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {
            "delivered": self.delivered,
            "out": {name: list(unit) for name, unit in self.out.items()},
            "positions": list(self._positions),
            "counts": list(self._counts),
            "returned": [list(unit) for unit in self._returned],
            "last": dict(self._last),
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        shards = len(self._positions)
        if len(parts["positions"]) != shards:
            raise ConfigError(
                f"the account is of {len(parts['positions'])} shards, and there are {shards}. Use data.shards as before."
            )
        self.delivered = parts["delivered"]
        self.out = {name: Unit(*unit) for name, unit in parts["out"].items()}
        self._positions, self._counts = list(parts["positions"]), list(parts["counts"])
        self._returned = _units(parts["returned"])
        self._last = dict(parts["last"])


def _units(plain: Sequence[Sequence[int]]) -> list[Unit]:
    return [Unit(*unit) for unit in plain]
