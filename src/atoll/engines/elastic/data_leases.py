"""Who trains on what, when islands come and go: data in units, each of which ends in exactly one committed delta.

A unit is a stretch of batches of one shard. It is leased to an island for a round. If the island's delta is in the commit, the unit
is delivered; if not, because the island died, fell behind or was refused, the unit goes back and is leased again, before any
other. Everybody who commits keeps the same account by the same rule, so nobody has to be asked, and nobody's death loses it.

A unit that was refused is leased to another island, where there is one. One that is refused again and again is poisoned: it is
dropped, since nobody will ever deliver it.

With all islands there all the time, island i trains on shard i as in any other run. An island that finds its own shard ahead of
others, since theirs were away, goes on with one that is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from atoll.core.errors import ConfigError, ExchangeFailed

MOST_REFUSALS = 3
"""A unit that was refused so often, and not by one island's fault alone, is dropped."""


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
    dropped: dict[str, Unit]


class Leases:
    """The account of all data.

    Args:
        shards: how many there are.
        batches: of a unit.
        units: that are to be delivered in all, or dropped.

    >>> leases = Leases(shards=2, batches=10, units=4)
    >>> leases.lease(["a", "b"])
    {'a': Unit(shard=0, start=0, batches=10), 'b': Unit(shard=1, start=0, batches=10)}
    >>> leases.settle(["a"]).returned  # b has died
    {'b': Unit(shard=1, start=0, batches=10)}
    >>> leases.lease(["a"])  # and a goes on with what it leaves
    {'a': Unit(shard=1, start=0, batches=10)}
    """

    def __init__(self, *, shards: int, batches: int, units: int) -> None:
        if shards < 1 or batches < 1 or units < 1:
            raise ConfigError(f"{units} units of {batches} batches from {shards} shards: there must be at least one of each.")
        self.units, self.delivered, self.dropped = units, 0, 0
        self.out: dict[str, Unit] = {}
        """Leased and not settled."""
        self._batches = batches
        self._positions, self._counts = [0] * shards, [0] * shards
        """Of each shard: batches that were leased at least once, and units that are out or settled for good."""
        self._returned: list[Unit] = []
        self._refused: dict[Unit, list[str]] = {}
        """Whose deltas of a unit were refused so far, of units that are not settled for good."""
        self._last: dict[str, int] = {}
        """The shard that each island was given last; at first they are dealt in the order in which islands come."""

    @property
    def done(self) -> bool:
        return self.settled >= self.units

    @property
    def settled(self) -> int:
        """Units that are done with for good."""
        return self.delivered + self.dropped

    def settle(self, delivered: Collection[str], refused: Collection[str] = ()) -> Settled:
        """A round is over, the deltas of some islands are in the commit, and those of others were refused."""
        strangers = sorted({*delivered, *refused} - self.out.keys())
        if strangers:
            raise ExchangeFailed(f"islands {strangers} delivered without a lease. Everybody must keep the same account.")
        settled = Settled({}, {}, {})
        for name, unit in self.out.items():
            if name in delivered:
                settled.delivered[name] = unit
            elif name in refused and self._is_poisoned(unit, name):
                settled.dropped[name] = unit
            else:
                settled.returned[name] = unit
                self._counts[unit.shard] -= 1
                self._returned.append(unit)
        for unit in (*settled.delivered.values(), *settled.dropped.values()):
            self._refused.pop(unit, None)
        self.delivered += len(settled.delivered)
        self.dropped += len(settled.dropped)
        self.out = {}
        return settled

    def _is_poisoned(self, unit: Unit, name: str) -> bool:
        """Whether it is, now that the delta of this island was refused too."""
        names = self._refused.setdefault(unit, [])
        names.append(name)
        return len(names) >= MOST_REFUSALS and (len(set(names)) > 1 or len(self.out) == 1)

    def lease(self, names: Iterable[str]) -> dict[str, Unit]:
        """Lease a unit to each of these islands, as long as there are some left."""
        assert not self.out, "the last round is not settled"
        names, given = list(names), dict[str, Unit]()
        free = list(names)
        for name in names:
            self._last.setdefault(name, len(self._last) % len(self._positions))
        # What came back before anything new: else it may be missing at the end, when enough others are delivered.
        for unit in self._returned[: len(free)]:
            name = min(free, key=lambda name: (name in self._refused.get(unit, ()), self._last[name] != unit.shard))
            free.remove(name)
            given[name] = unit
            self._counts[unit.shard] += 1
        del self._returned[: len(given)]
        for name in free[: self.units - self.settled - len(given)]:
            given[name] = self._new(name)
        self.out = {name: given[name] for name in names if name in given}
        return dict(self.out)

    def _new(self, name: str) -> Unit:
        shard, least = self._last[name], min(self._counts)
        if self._counts[shard] > least:
            shard = self._last[name] = self._counts.index(least)
        self._counts[shard] += 1
        start = self._positions[shard]
        self._positions[shard] += self._batches
        return Unit(shard, start, self._batches)

    def check(self) -> None:
        """Whether every batch that was ever leased is settled, out or returned, and nothing twice."""
        waiting = [*self._returned, *self.out.values()]
        batches = self.settled * self._batches + sum(unit.batches for unit in waiting)
        if batches != sum(self._positions) or len({(unit.shard, unit.start) for unit in waiting}) != len(waiting):
            raise ExchangeFailed(
                f"the account of data is wrong: {sum(self._positions)} batches were leased, of which {self.settled} units are "
                f"settled and {waiting} are not. What was saved before this round stands."
            )

    def to_parts(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {
            "delivered": self.delivered,
            "dropped": self.dropped,
            "out": {name: list(unit) for name, unit in self.out.items()},
            "positions": list(self._positions),
            "counts": list(self._counts),
            "returned": [list(unit) for unit in self._returned],
            "refused": [[*unit, names] for unit, names in self._refused.items()],
            "last": dict(self._last),
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        shards = len(self._positions)
        if len(parts["positions"]) != shards:
            raise ConfigError(
                f"the account is of {len(parts['positions'])} shards, and there are {shards}. Use data.shards as before."
            )
        self.delivered, self.dropped = parts["delivered"], parts["dropped"]
        self.out = {name: Unit(*unit) for name, unit in parts["out"].items()}
        self._positions, self._counts = list(parts["positions"]), list(parts["counts"])
        self._returned = [Unit(*unit) for unit in parts["returned"]]
        self._refused = {Unit(*unit): list(names) for *unit, names in parts["refused"]}
        self._last = dict(parts["last"])
