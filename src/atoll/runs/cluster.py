"""The simulated cluster as a value: when each island takes part, how fast it computes, its links, and the cost of collectives.

Every random number is drawn from the seed and the names of its use, never from a generator with a position. A resumed run therefore
draws the same numbers.

Collectives run in a ring or over a star; docs/assumptions.md has the model. Byte counts are exact, also where shards are unequal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, TypeVar

from atoll.core.config.type_checks import AtMost, Bandwidth, Seconds, SecondsOrInfinite, check_positive, check_types, shown
from atoll.core.errors import ConfigError
from atoll.core.layout import shard_range
from atoll.core.protocols import Codec

CollectiveTopology = Literal["ring", "star"]
CONTROL_BYTES = 8
"""Size of a control message to one peer: a weight or a count."""
_LEAST_MBIT_PER_S = 1e-6  # a bit per second


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of an island to the others.

    Args:
        latency_s: one way, in seconds.
        bandwidth_mbit_per_s: both ways, unless `download_mbit_per_s` is given. With inf and a latency of 0 the link is free.
        download_mbit_per_s: towards the island, if the link is asymmetric.
    """

    latency_s: Seconds = 0.030
    bandwidth_mbit_per_s: Bandwidth = 100.0
    download_mbit_per_s: Bandwidth | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.latency_s < 0:
            raise ConfigError(f"latency_s={self.latency_s}: it is 0 seconds or more. Give seconds, such as 0.03 for 30 ms.")
        for name in ("bandwidth_mbit_per_s", "download_mbit_per_s"):
            value = getattr(self, name)
            if value is not None and value < _LEAST_MBIT_PER_S:
                raise ConfigError(
                    f"{name}={value}: a link carries more than 0 Mbit/s, at least {_LEAST_MBIT_PER_S}. Use a small number for a "
                    f"slow link, inf for a free one."
                )

    @property
    def up_bytes_per_s(self) -> float:
        return self.bandwidth_mbit_per_s * 1e6 / 8

    @property
    def down_bytes_per_s(self) -> float:
        return (self.download_mbit_per_s or self.bandwidth_mbit_per_s) * 1e6 / 8


_MAX_ISLANDS = 65_536
_LEAST_STEP_S = 1e-9
_MAX_SIGMA = 5.0  # beyond it one batch in a hundred takes a hundred thousand times as long as another
_MAX_ASYNC_LOSS = 0.999  # of the updates of an asynchronous run, whose length counts the updates that arrive
PoolName = Literal["constant", "doubling", "halving", "ramp_up", "ramp_down"]
Level = Literal["none", "slight", "moderate", "very"]
_VERY_S = (0.58, 0.75, 1.51, 3.33)  # the devices of the asynchronous paper's notebook
_POWERS: dict[Level, float] = {"none": 0.0, "slight": 1 / 3, "moderate": 2 / 3, "very": 1.0}


@dataclass(frozen=True, kw_only=True)
class Away:
    """An island that is absent from round `start` up to, not including, round `stop`; rounds count from 0."""

    island: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """An island whose message is lost in one round's exchange; rounds count from 0."""

    island: int
    round: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Outage:
    """An island that dies at `start_s`, also in mid-round, and is back at `stop_s`; virtual seconds. With a `start_s` of 0 it joins
    late; without a `stop_s` it never returns. For asynchronous algorithms, where each worker has its own rounds."""

    island: int
    start_s: Seconds
    stop_s: SecondsOrInfinite = math.inf

    def __post_init__(self) -> None:
        check_types(self)


IslandFault = TypeVar("IslandFault", Away, Lost, Outage)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Islands and the links between them.

    Args:
        islands: the largest number of islands.
        step_time_s: virtual seconds that an island needs for one batch, one figure per island; or how much four devices differ:
            none, slight, moderate or very (see `step_times`). A list is cut or repeated to the number of islands. Each device of
            an island needs this time for a batch of its own.
        step_time_spread: sigma of a log-normal factor, drawn once per island.
        step_time_jitter: sigma of a log-normal factor, drawn for each batch.
        link: of every island, unless `links` has one per island.
        links: one link per island, cut or repeated to the number of islands.
        topology: ring, or star with a server.
        drop_probability: that an island's message is lost in an exchange, independently each round.
        lost: exchanges in which the message of a named island is lost.
        pool: number of islands over time: constant, doubling, halving, ramp_up or ramp_down; or a list of counts that share the run
            evenly.
        away: islands that leave and return, by rounds.
        outages: islands that die and return, by time; for asynchronous algorithms.
        threads_per_island: CPU threads of one island. Results depend on it in the last bits.
        devices_per_island: they are equally fast but for jitter.
        inside: the link between the devices of one island.
    """

    islands: int = 4
    step_time_s: tuple[Seconds, ...] | Level = (1.0,)
    step_time_spread: float = 0.0
    step_time_jitter: float = 0.0
    link: Link = Link()
    links: tuple[Link, ...] = ()
    topology: CollectiveTopology = "ring"
    drop_probability: float = 0.0
    lost: tuple[Lost, ...] = ()
    pool: PoolName | tuple[int, ...] = "constant"
    away: tuple[Away, ...] = ()
    outages: tuple[Outage, ...] = ()
    threads_per_island: Annotated[int, AtMost(1024, " threads")] = 1
    devices_per_island: int = 1
    inside: Link = Link(latency_s=5e-6, bandwidth_mbit_per_s=200_000.0)

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.islands <= _MAX_ISLANDS:
            raise ConfigError(
                f"islands={self.islands}: a cluster has at least 1 island, and at most {_MAX_ISLANDS}. Use 1 to train alone."
            )
        if self.devices_per_island < 1 or self.devices > _MAX_ISLANDS:
            raise ConfigError(
                f"devices_per_island={self.devices_per_island}: an island has at least 1 device, and all {self.islands} of them "
                f"together at most {_MAX_ISLANDS}. Use 1 if an island is one device."
            )
        times = step_times(self.step_time_s)
        if not times or min(times) < _LEAST_STEP_S:
            raise ConfigError(
                f"step_time_s={shown(list(times))}: give one or more positive numbers of seconds, at least {_LEAST_STEP_S}, such "
                f"as [0.5,1.2]."
            )
        for name in ("step_time_spread", "step_time_jitter"):
            if not 0 <= getattr(self, name) <= _MAX_SIGMA:
                raise ConfigError(f"{name}={getattr(self, name)}: a sigma is between 0 and {_MAX_SIGMA}. Use 0 for none.")
        if not 0 <= self.drop_probability <= 1:
            raise ConfigError(f"drop_probability={self.drop_probability} is outside [0, 1]. Use 0 to lose nothing.")
        check_positive(self, "threads_per_island")
        counts = self._counts()
        if not counts or not all(1 <= count <= self.islands for count in counts):
            raise ConfigError(
                f"pool={shown(list(counts))}: each count is between 1 and islands={self.islands}. Raise islands, or lower the "
                f"counts."
            )
        for away in self.away:
            if not (0 <= away.island < self.islands and 0 <= away.start < away.stop):
                raise ConfigError(f"{away}: the island is below {self.islands} and start comes before stop; rounds count from 0.")
        for outage in self.outages:
            if not (0 <= outage.island < self.islands and 0 <= outage.start_s < outage.stop_s):
                raise ConfigError(f"{outage}: the island is below {self.islands} and start_s comes before stop_s, in seconds.")
        for one, two in pairwise(sorted(self.outages, key=lambda outage: (outage.island, outage.start_s))):
            if one.island == two.island and two.start_s <= one.stop_s:
                raise ConfigError(f"{one} and {two} overlap: an island that is down cannot go down again. Merge them into one.")
        for lost in self.lost:
            if not (0 <= lost.island < self.islands and lost.round >= 0):
                raise ConfigError(f"{lost}: the island is below {self.islands} and the round is 0 or more.")

    @property
    def devices(self) -> int:
        """Devices of all islands."""
        return self.islands * self.devices_per_island

    def devices_as_islands(self, seed: int) -> Cluster:
        """The cluster with every device as an island on its island's link, for algorithms without a second level. In a ring the
        slowest link sets the pace, so the faster links inside islands change nothing. The devices of an island are neighbours in
        the ring, and one of them sends over the slow link."""
        count = self.devices_per_island
        if count == 1:
            return self
        return replace(
            self,
            islands=self.devices,
            devices_per_island=1,
            step_time_s=tuple(self.step_time(device // count, seed) for device in range(self.devices)),
            step_time_spread=0.0,
            links=tuple(self.link_of(device // count) for device in range(self.devices)) if self.links else (),
            lost=_on_every_device(self.lost, count),
            away=_on_every_device(self.away, count),
            outages=_on_every_device(self.outages, count),
            pool=self.pool if self.pool == "constant" else tuple(islands * count for islands in self._counts()),
        )

    def present(self, round: int, rounds: int, over: int | None = None) -> list[int]:
        """The islands that take part in this round. The pool's count depends on the part of the run that is over: `over` of
        `rounds`, by default the round's number."""
        counts = self._counts()
        count = counts[min((round if over is None else over) * len(counts) // max(rounds, 1), len(counts) - 1)]
        absent = {away.island for away in self.away if away.start <= round < away.stop}
        present = [island for island in range(count) if island not in absent]
        if not present:
            raise ConfigError(f"no island is left in round {round}: away={list(self.away)}. Leave at least one in every round.")
        return present

    def check_presence(self, rounds: int) -> None:
        """Refuse absences that leave a round without an island. Islands leave only where an absence starts or the pool changes."""
        parts = len(self._counts())
        changes = {0, *(away.start for away in self.away), *(-(-part * rounds // parts) for part in range(1, parts))}
        for round in sorted(changes) if self.away else ():
            if round < rounds:
                self.present(round, rounds)

    def check_synchronous(self) -> None:
        """Refuse settings that only asynchronous algorithms support."""
        if self.outages:
            raise ConfigError(
                "cluster.outages strike in mid-round, and a synchronous round cannot finish without all of its islands. Use "
                "cluster.away, which counts in rounds, or an asynchronous algorithm."
            )

    def check_asynchronous(self) -> None:
        """Refuse settings that only synchronous algorithms support."""
        if self.away or self.pool != "constant":
            raise ConfigError(
                "cluster.away and cluster.pool count in rounds that all islands share, and an asynchronous algorithm has none. "
                "Use cluster.outages, which counts in virtual seconds."
            )
        if self.drop_probability > _MAX_ASYNC_LOSS:
            raise ConfigError(
                f"cluster.drop_probability={self.drop_probability}: a run ends after a number of arrivals, and with "
                f"{_MAX_ASYNC_LOSS} one update in 1,000 arrives. Use at most {_MAX_ASYNC_LOSS}."
            )

    def present_at_start(self) -> list[int]:
        """The islands without an outage at time 0."""
        late = {outage.island for outage in self.outages if outage.start_s == 0}
        return [island for island in range(self.islands) if island not in late]

    def membership_changes(self) -> list[tuple[float, int, bool]]:
        """Deaths and returns of islands after the start, in order: the time, the island, and whether it joins."""
        leave = [(outage.start_s, outage.island, False) for outage in self.outages if outage.start_s > 0]
        join = [(outage.stop_s, outage.island, True) for outage in self.outages if outage.stop_s < math.inf]
        return sorted([*leave, *join], key=lambda change: (change[0], not change[2], change[1]))

    def delivers(self, island: int, round: int, seed: int) -> bool:
        """Whether this island's message reaches the others in this round's exchange."""
        if Lost(island=island, round=round) in self.lost:
            return False
        return self.drop_probability == 0 or _generator(seed, "drop", round, island).random() >= self.drop_probability

    @property
    def loses_messages(self) -> bool:
        """Whether messages can be lost, so that a round may be repeated."""
        return self.drop_probability > 0 or bool(self.lost)

    def step_time(self, island: int, seed: int) -> float:
        """Seconds that this island needs for one batch, before jitter."""
        times, spread = step_times(self.step_time_s), self.step_time_spread
        factor = _generator(seed, "spread", island).lognormvariate(0.0, spread) if spread else 1.0
        return times[island % len(times)] * factor

    def jitter(self, island: int, span: int | str, batches: float, seed: int) -> float:
        """The factor on the duration of this island's compute span of this number: the mean over its batches."""
        if not self.step_time_jitter:
            return 1.0
        generator = _generator(seed, "jitter", span, island)
        draws = max(1, round(batches))  # a micro-batch draws like a batch
        return sum(generator.lognormvariate(0.0, self.step_time_jitter) for _ in range(draws)) / draws

    def link_of(self, island: int) -> Link:
        return self.links[island % len(self.links)] if self.links else self.link

    def _counts(self) -> Sequence[int]:
        """The number of islands in each of equal parts of the run."""
        if isinstance(self.pool, tuple):
            return self.pool
        full, half = self.islands, max(self.islands // 2, 1)
        named: dict[PoolName, Sequence[int]] = {
            "constant": (full,),
            "doubling": (half, full),
            "halving": (full, half),
            "ramp_up": range(1, full + 1),
            "ramp_down": range(full, 0, -1),
        }
        return named[self.pool]


def step_times(given: tuple[float, ...] | Level) -> tuple[float, ...]:
    """Seconds per batch. A list is returned unchanged. A level stands for the asynchronous paper's devices: a power moves their
    times towards the geometric mean, and a factor keeps their total batches per second.
    """
    if isinstance(given, tuple):
        return given
    middle = math.prod(_VERY_S) ** (1 / len(_VERY_S))
    drawn = [middle * (time / middle) ** _POWERS[given] for time in _VERY_S]
    scale = sum(1 / time for time in drawn) / sum(1 / time for time in _VERY_S)
    return _VERY_S if given == "very" else tuple(time * scale for time in drawn)


def draw(*names: object) -> float:
    """A random number in [0, 1) that depends on these names alone."""
    return _generator(*names).random()


def _generator(*names: object) -> random.Random:
    return random.Random("/".join(map(str, names)))


def _on_every_device(faults: Sequence[IslandFault], devices: int) -> tuple[IslandFault, ...]:
    """The faults of islands as faults of all their devices."""
    return tuple(replace(fault, island=fault.island * devices + device) for fault in faults for device in range(devices))


class CollectiveCost(NamedTuple):
    """Seconds that a collective takes once all participants have started it, and the bytes that each participant sends."""

    seconds: float
    sent_bytes: list[int]


def transfer_s(num_bytes: float, sender: Link, receiver: Link) -> float:
    """Seconds that one message takes."""
    return max(sender.latency_s, receiver.latency_s) + num_bytes / min(sender.up_bytes_per_s, receiver.down_bytes_per_s)


def all_reduce_cost(
    numel: int, item_bytes: int, links: Sequence[Link], topology: CollectiveTopology = "ring", codec: Codec | None = None
) -> CollectiveCost:
    """In a ring: a reduce-scatter and an all-gather. Over a star: each island uploads to a server of unlimited bandwidth, then
    downloads. Encoded values that islands gather travel whole from each to every other."""
    others = len(links) - 1
    if codec is not None and codec.gathers:
        whole = codec.nbytes(numel)
        seconds = _ring_s(whole, links) if topology == "ring" else _star_s(whole, others * whole, links)
        return CollectiveCost(seconds, [whole * (others if topology == "ring" else min(1, others))] * len(links))
    if topology == "ring":
        scatter, gather = reduce_scatter_cost(numel, item_bytes, links, codec), all_gather_cost(numel, item_bytes, links, codec)
        sent = [one + two for one, two in zip(scatter.sent_bytes, gather.sent_bytes, strict=True)]
        return CollectiveCost(scatter.seconds + gather.seconds, sent)
    num_bytes = _wire_bytes(numel, item_bytes, codec)
    return CollectiveCost(_star_s(num_bytes, num_bytes, links), [num_bytes * min(1, others)] * len(links))


def reduce_scatter_cost(numel: int, item_bytes: int, links: Sequence[Link], codec: Codec | None = None) -> CollectiveCost:
    """Each participant sends every shard but its own."""
    shards = _shard_bytes(numel, item_bytes, len(links), codec)
    return CollectiveCost(_ring_s(max(shards), links), [sum(shards) - shard for shard in shards])


def all_gather_cost(numel: int, item_bytes: int, links: Sequence[Link], codec: Codec | None = None) -> CollectiveCost:
    """Each participant sends its shard to all others."""
    shards = _shard_bytes(numel, item_bytes, len(links), codec)
    return CollectiveCost(_ring_s(max(shards), links), [shard * (len(links) - 1) for shard in shards])


def _shard_bytes(numel: int, item_bytes: int, size: int, codec: Codec | None) -> list[int]:
    ranges = (shard_range(numel, rank, size, 1 if codec is None else codec.unit) for rank in range(size))
    return [_wire_bytes(stop - start, item_bytes, codec) for start, stop in ranges]


def _wire_bytes(numel: int, item_bytes: int, codec: Codec | None) -> int:
    return numel * item_bytes if codec is None else codec.nbytes(numel)


def _star_s(up_bytes: int, down_bytes: int, links: Sequence[Link]) -> float:
    if len(links) == 1:
        return 0.0
    up_s = max(link.latency_s + up_bytes / link.up_bytes_per_s for link in links)
    return up_s + max(link.latency_s + down_bytes / link.down_bytes_per_s for link in links)


def _ring_s(shard_bytes: int, links: Sequence[Link]) -> float:
    """A ring of n islands takes n - 1 steps, in each of which every island sends one shard to the next."""
    size = len(links)
    if size == 1:
        return 0.0
    return (size - 1) * max(transfer_s(shard_bytes, links[rank], links[(rank + 1) % size]) for rank in range(size))
