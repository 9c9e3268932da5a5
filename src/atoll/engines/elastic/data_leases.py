"""Which island trains on which data, while islands come and go: every unit of data ends in at most one committed delta.

A unit is a run of batches of one shard. It is leased to an island for a round. If the island's delta is in the commit, the unit is
delivered. If the island died, fell behind or had its delta rejected, the unit returns and is leased again before any new one. All
islands compute the leases by the same rule from the same commits, so no island has to be asked, and no death loses them.

Where a round has several commits, each delivers a part of the unit: the batches up to the step at which its deltas were sent, and
the last commit the rest. Of an island that is lost in between, what it has not delivered returns; the next holder skips the steps
of the other part.

While all islands are present, island i trains on shard i as in any other run. An island whose shard is ahead of the others, because
islands were away, continues with a shard that is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.core.errors import ConfigError, ExchangeFailed

ABSENT_KEPT = 256
"""Islands that are away and remembered by name."""
REJECTION_LIMIT = 3
"""A rejected unit is leased to another island, if there is one. A unit that is rejected so often, and not from one island alone
unless there is no other, is dropped."""


class DataUnit(NamedTuple):
    """Consecutive batches of a shard, from batch `start` on."""

    shard: int
    start: int
    batches: int


class Settlement(NamedTuple):
    """What became of a round's leases, by island."""

    delivered: dict[str, DataUnit]
    returned: dict[str, DataUnit]
    dropped: dict[str, DataUnit]


class DataLeases:
    """The account of all data. `units` are to be delivered or dropped in the whole run, each of so many batches. `cuts` are the
    batches of a unit that each commit of a round but the last has delivered.

    >>> leases = DataLeases(shards=2, batches=10, units=4)
    >>> leases.lease(["a", "b"])
    {'a': DataUnit(shard=0, start=0, batches=10), 'b': DataUnit(shard=1, start=0, batches=10)}
    >>> leases.settle(["a"]).returned  # b has died
    {'b': DataUnit(shard=1, start=0, batches=10)}
    >>> leases.lease(["a"])  # a continues with b's unit
    {'a': DataUnit(shard=1, start=0, batches=10)}

    >>> leases = DataLeases(shards=1, batches=10, units=2, cuts=[4])
    >>> _ = leases.lease(["a"])
    >>> leases.settle(["a"]).delivered, leases.settle([]).returned  # a has died between two commits of a round
    ({'a': DataUnit(shard=0, start=0, batches=4)}, {'a': DataUnit(shard=0, start=4, batches=6)})
    """

    def __init__(self, *, shards: int, batches: int, units: int, cuts: Sequence[int] = ()) -> None:
        if shards < 1 or batches < 1 or units < 1:
            raise ConfigError(f"{units} units of {batches} batches from {shards} shards: there must be at least one of each.")
        self.units, self.delivered, self.dropped = units, 0, 0
        self.active: dict[str, DataUnit] = {}
        """Units that are leased and not settled, by island; of each, what is not delivered."""
        self.part = 0
        """The number of the next commit in its round."""
        self._batches, self._cuts = batches, (*cuts, batches)
        self._positions, self._counts = [0] * shards, [0] * shards
        """Of each shard: batches that were leased at least once, and units that are leased or settled for good."""
        self._returned: list[DataUnit] = []
        self._rejected: dict[DataUnit, list[str]] = {}
        """The islands whose deltas of a unit were rejected, for units that are not settled for good."""
        self._last_shard: dict[str, int] = {}
        """The shard that each island trained on last, in the order of their last leases. Initially shards are assigned in the order
        in which islands join."""

    @property
    def done(self) -> bool:
        return self.settled >= self.units

    @property
    def settled(self) -> int:
        """Units that are settled for good."""
        return self.delivered + self.dropped

    def settle(self, delivered: Collection[str], rejected: Collection[str] = ()) -> Settlement:
        """Settle a commit: the deltas of some islands are in it, and those of others were rejected. When no lease is left, the
        round is over."""
        unknown = sorted({*delivered, *rejected} - self.active.keys())
        if unknown:
            raise ExchangeFailed(f"islands {unknown} delivered without a lease. All islands must keep the same account.")
        settled, left = Settlement({}, {}, {}), self._batches - self._cuts[self.part]
        leased, self.active = self.active, {}
        for name, unit in leased.items():
            if name in delivered:
                shard, start, batches = unit
                done = max(0, batches - left)  # 0 if another island has delivered this part
                if done:
                    settled.delivered[name] = DataUnit(shard, start, done)
                if left:
                    self.active[name] = DataUnit(shard, start + done, batches - done)
            elif name in rejected and self._is_undeliverable(unit, name, len(leased)):
                settled.dropped[name] = unit
            else:
                settled.returned[name] = unit
                self._counts[unit.shard] -= 1
                self._returned.append(unit)
            if name not in settled.returned:
                self._rejected.pop(unit, None)
        self.delivered += 0 if left else len(settled.delivered)
        self.dropped += len(settled.dropped)
        self.part = self.part + 1 if self.active else 0
        return settled

    def _is_undeliverable(self, unit: DataUnit, name: str, islands: int) -> bool:
        """Whether to drop a unit, now that this island's delta of it was rejected too."""
        names = self._rejected.setdefault(unit, [])
        names.append(name)
        return len(names) >= REJECTION_LIMIT and (len(set(names)) > 1 or islands == 1)

    def lease(self, names: Iterable[str]) -> dict[str, DataUnit]:
        """Lease a unit to each of these islands, as long as units are left."""
        assert not self.active, "the last round is not settled"
        names, given = list(names), dict[str, DataUnit]()
        free = list(names)
        for name in names:
            self._last_shard[name] = self._last_shard.pop(name, len(self._last_shard) % len(self._positions))
        for name in [*self._last_shard][: max(0, len(self._last_shard) - len(names) - ABSENT_KEPT)]:
            del self._last_shard[name]
        # Returned units before new ones: else one may be missing at the end, when enough new ones are delivered.
        for unit in self._returned[: len(free)]:
            name = min(free, key=lambda name: (name in self._rejected.get(unit, ()), self._last_shard[name] != unit.shard))
            free.remove(name)
            given[name] = unit
            self._counts[unit.shard] += 1
        del self._returned[: len(given)]
        for name in free[: self.units - self.settled - len(given)]:
            given[name] = self._new_unit(name)
        self.active = {name: given[name] for name in names if name in given}
        return dict(self.active)

    def _new_unit(self, name: str) -> DataUnit:
        shard, least = self._last_shard[name], min(self._counts)
        if self._counts[shard] > least:
            shard = self._last_shard[name] = self._counts.index(least)
        self._counts[shard] += 1
        start = self._positions[shard]
        self._positions[shard] += self._batches
        return DataUnit(shard, start, self._batches)

    def check(self) -> None:
        """Check that every batch that was ever leased is settled, leased or returned, and none of them twice."""
        waiting = [*self._returned, *self.active.values()]
        batches = (self.settled + len(waiting)) * self._batches
        ends = {(unit.shard, unit.start + unit.batches) for unit in waiting}
        if batches != sum(self._positions) or len(ends) != len(waiting):
            raise ExchangeFailed(
                f"the account of data is wrong: {sum(self._positions)} batches were leased, of which {self.settled} units are "
                f"settled and {waiting} are not. Checkpoints of earlier rounds stand."
            )

    def to_parts(self) -> dict[str, Any]:
        return {
            "delivered": self.delivered,
            "dropped": self.dropped,
            "active": {name: list(unit) for name, unit in self.active.items()},
            "part": self.part,
            "positions": list(self._positions),
            "counts": list(self._counts),
            "returned": [list(unit) for unit in self._returned],
            "rejected": [[*unit, names] for unit, names in self._rejected.items()],
            "last_shard": dict(self._last_shard),
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        shards = len(self._positions)
        if len(parts["positions"]) != shards:
            raise ConfigError(
                f"the saved leases are of {len(parts['positions'])} shards, and there are {shards}. Use data.shards as before."
            )
        self.delivered, self.dropped = parts["delivered"], parts["dropped"]
        self.active = {name: DataUnit(*unit) for name, unit in parts["active"].items()}
        self.part = parts.get("part", 0)
        self._positions, self._counts = list(parts["positions"]), list(parts["counts"])
        self._returned = [DataUnit(*unit) for unit in parts["returned"]]
        self._rejected = {DataUnit(*unit): list(names) for *unit, names in parts["rejected"]}
        self._last_shard = dict(parts["last_shard"])
