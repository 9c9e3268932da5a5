"""The simulated cluster as a value: who is there when, how fast each computes, and over what lines they talk.

Everything random is drawn from the seed and the names of what it is for, never from a generator with a position. So a run that
is resumed draws what it would have drawn.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.runs.network import Link, Topology

_MOST_ISLANDS = 65_536
_MOST_SIGMA = 5.0  # beyond it one batch in a hundred takes a hundred thousand times as long as another
PoolName = Literal["constant", "doubling", "halving", "ramp_up", "ramp_down"]
Level = Literal["none", "slight", "moderate", "very"]
_VERY_S = (0.58, 0.75, 1.51, 3.33)  # the devices of the asynchronous paper's notebook
_POWERS: dict[Level, float] = {"none": 0.0, "slight": 1 / 3, "moderate": 2 / 3, "very": 1.0}


@dataclass(frozen=True, kw_only=True)
class Away:
    """An island that is not there from round `start` up to, not including, round `stop`; rounds count from 0."""

    island: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """An island that is not heard in one round's exchange; rounds count from 0."""

    island: int
    round: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Outage:
    """An island that is gone from `start_s` on, whatever it was doing, and back at `stop_s`; virtual seconds. One that starts at 0
    comes late, one without a `stop_s` never comes back. For asynchronous algorithms, in which rounds are each worker's own."""

    island: int
    start_s: float
    stop_s: float = math.inf

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Islands and the lines between them.

    Args:
        islands: how many there are at most.
        step_time_s: seconds of virtual time that an island needs for one batch, one figure per island. A list is cut or repeated
            to the number of islands. Or how much four devices differ: none, slight, moderate, very; see `step_times`. Where an
            island has several devices, each of them needs as long for a batch of its own.
        step_time_spread: islands differ by a factor drawn once for each, log-normal with this sigma.
        step_time_jitter: each batch takes a factor drawn anew, log-normal with this sigma.
        link: every island's line, unless `links` gives one per island (cut or repeated).
        links: one line per island.
        topology: ring, or star with a server.
        drop_probability: with which an island is not heard in an exchange, independently each round.
        lost: exchanges in which named islands are not heard.
        pool: how many islands take part over time: a name, or a list of counts that share the run evenly.
        away: islands that leave and come back, by rounds.
        outages: islands that die and come back, by time; for asynchronous algorithms.
        threads_per_island: CPU threads that one island computes with. Results depend on it in the last bits.
        devices_per_island: how many devices each island has. They are equally fast, but for jitter.
        inside: the line between the devices of one island.
    """

    islands: int = 4
    step_time_s: tuple[float, ...] | Level = (1.0,)
    step_time_spread: float = 0.0
    step_time_jitter: float = 0.0
    link: Link = Link()
    links: tuple[Link, ...] = ()
    topology: Topology = "ring"
    drop_probability: float = 0.0
    lost: tuple[Lost, ...] = ()
    pool: PoolName | tuple[int, ...] = "constant"
    away: tuple[Away, ...] = ()
    outages: tuple[Outage, ...] = ()
    threads_per_island: int = 1
    devices_per_island: int = 1
    inside: Link = Link(latency_s=5e-6, bandwidth_mbit_per_s=200_000.0)

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.islands <= _MOST_ISLANDS:
            raise ConfigError(
                f"islands={self.islands}: a cluster has at least 1 island, and at most {_MOST_ISLANDS}. Use 1 to train alone."
            )
        if self.devices_per_island < 1 or self.devices > _MOST_ISLANDS:
            raise ConfigError(
                f"devices_per_island={self.devices_per_island}: an island has at least 1 device, and all {self.islands} of them "
                f"together at most {_MOST_ISLANDS}. Use 1 if an island is one device."
            )
        times = step_times(self.step_time_s)
        if not times or not all(time > 0 and math.isfinite(time) for time in times):
            raise ConfigError(f"step_time_s={list(times)}: give one or more positive numbers of seconds, such as [0.5,1.2].")
        for name in ("step_time_spread", "step_time_jitter"):
            if not 0 <= getattr(self, name) <= _MOST_SIGMA:
                raise ConfigError(f"{name}={getattr(self, name)}: a sigma is between 0 and {_MOST_SIGMA}. Use 0 for none.")
        if not 0 <= self.drop_probability <= 1:
            raise ConfigError(f"drop_probability={self.drop_probability} is outside [0, 1]. Use 0 to lose nothing.")
        if self.threads_per_island < 1:
            raise ConfigError(f"threads_per_island={self.threads_per_island}: an island computes with at least 1 thread.")
        counts = self.pool if isinstance(self.pool, tuple) else self._counts()
        if not counts or not all(1 <= count <= self.islands for count in counts):
            raise ConfigError(
                f"pool={list(counts)}: each count is between 1 and islands={self.islands}. Raise islands, or lower the counts."
            )
        for away in self.away:
            if not (0 <= away.island < self.islands and 0 <= away.start < away.stop):
                raise ConfigError(f"{away}: the island is below {self.islands} and start comes before stop; rounds count from 0.")
        for outage in self.outages:
            if not (0 <= outage.island < self.islands and 0 <= outage.start_s < outage.stop_s):
                raise ConfigError(f"{outage}: the island is below {self.islands} and start_s comes before stop_s, in seconds.")
        for one, two in pairwise(sorted(self.outages, key=lambda outage: (outage.island, outage.start_s))):
            if one.island == two.island and two.start_s <= one.stop_s:
                raise ConfigError(f"{one} and {two} overlap: an island that is gone cannot go again. Make one of both.")
        for lost in self.lost:
            if not (0 <= lost.island < self.islands and lost.round >= 0):
                raise ConfigError(f"{lost}: the island is below {self.islands} and the round is 0 or more.")

    @property
    def devices(self) -> int:
        """Of all islands."""
        return self.islands * self.devices_per_island

    def apart(self, seed: int) -> Cluster:
        """The cluster with every device as an island of its own, on its island's line: what devices are that have no algorithm of
        their own. In a ring the slowest line sets the pace, so the fast ones inside islands change nothing; and of the devices
        of an island, which are neighbours, one sends over the slow line what the ring sends."""
        count = self.devices_per_island
        if count == 1:
            return self
        return replace(
            self,
            islands=self.devices,
            devices_per_island=1,
            step_time_s=tuple(self.step_time(device // count, seed) for device in range(self.devices)),
            step_time_spread=0.0,
            links=tuple(self.line(device // count) for device in range(self.devices)) if self.links else (),
            lost=tuple(replace(lost, island=device) for lost in self.lost for device in self._devices_of(lost.island)),
            away=tuple(replace(away, island=device) for away in self.away for device in self._devices_of(away.island)),
            outages=tuple(replace(outage, island=device) for outage in self.outages for device in self._devices_of(outage.island)),
            pool=self.pool if self.pool == "constant" else tuple(islands * count for islands in self._counts()),
        )

    def _devices_of(self, island: int) -> range:
        return range(island * self.devices_per_island, (island + 1) * self.devices_per_island)

    def present(self, round: int, rounds: int, over: int | None = None) -> list[int]:
        """Who takes part in this round. A pool goes by how much of the run is over, in `over` of `rounds`; none: by the round."""
        counts = self._counts()
        count = counts[min((round if over is None else over) * len(counts) // max(rounds, 1), len(counts) - 1)]
        gone = {away.island for away in self.away if away.start <= round < away.stop}
        present = [island for island in range(count) if island not in gone]
        if not present:
            raise ConfigError(f"nobody is left in round {round}: away={list(self.away)}. Leave at least one island in every round.")
        return present

    def check_synchronous(self) -> None:
        """Refuses what only asynchronous algorithms can go through."""
        if self.outages:
            raise ConfigError(
                "cluster.outages strike in mid-round, and in a synchronous round nobody can go on without the one who is gone. "
                "Use cluster.away, which counts in rounds, or an asynchronous algorithm."
            )

    def check_asynchronous(self) -> None:
        """Refuses what only synchronous algorithms know."""
        if self.away or self.pool != "constant":
            raise ConfigError(
                "cluster.away and cluster.pool count in rounds that all islands share, and an asynchronous algorithm has none. "
                "Use cluster.outages, which counts in virtual seconds."
            )
        if self.drop_probability == 1:
            raise ConfigError(
                "cluster.drop_probability=1: nothing would ever arrive, and the run would never end. Use less than 1."
            )

    def present_at_start(self) -> list[int]:
        """Who is there when the clock starts, as far as outages say."""
        late = {outage.island for outage in self.outages if outage.start_s == 0}
        return [island for island in range(self.islands) if island not in late]

    def changes(self) -> list[tuple[float, int, bool]]:
        """All comings and goings after the start, in order: when, which island, and whether it comes."""
        gone = [(outage.start_s, outage.island, False) for outage in self.outages if outage.start_s > 0]
        back = [(outage.stop_s, outage.island, True) for outage in self.outages if outage.stop_s < math.inf]
        return sorted([*gone, *back], key=lambda change: (change[0], not change[2], change[1]))

    def heard(self, island: int, round: int, seed: int) -> bool:
        """Whether the others hear this island in this round's exchange."""
        if Lost(island=island, round=round) in self.lost:
            return False
        return self.drop_probability == 0 or _draw(seed, "drop", round, island).random() >= self.drop_probability

    @property
    def loses_messages(self) -> bool:
        """Whether somebody may go unheard, so that a round may have to be repeated."""
        return self.drop_probability > 0 or bool(self.lost)

    def step_time(self, island: int, seed: int) -> float:
        """Seconds that one batch takes this island, before jitter."""
        times = step_times(self.step_time_s)
        return times[island % len(times)] * _factor(self.step_time_spread, seed, "spread", island)

    def jitter(self, island: int, stretch: int | str, batches: float, seed: int) -> float:
        """By which factor this island's so-manieth stretch of computing is longer: the mean over its batches."""
        if not self.step_time_jitter:
            return 1.0
        draw = _draw(seed, "jitter", stretch, island)
        draws = max(1, round(batches))  # a piece of a batch draws like a batch
        return sum(draw.lognormvariate(0.0, self.step_time_jitter) for _ in range(draws)) / draws

    def line(self, island: int) -> Link:
        return self.links[island % len(self.links)] if self.links else self.link

    def _counts(self) -> tuple[int, ...]:
        """How many islands, over equal parts of the run."""
        if isinstance(self.pool, tuple):
            return self.pool
        most, half = self.islands, max(self.islands // 2, 1)
        match self.pool:
            case "constant":
                return (most,)
            case "doubling":
                return (half, most)
            case "halving":
                return (most, half)
            case "ramp_up":
                return tuple(range(1, most + 1))
            case "ramp_down":
                return tuple(range(most, 0, -1))


def step_times(given: tuple[float, ...] | Level) -> tuple[float, ...]:
    """Seconds per batch: a list as it is; of a level, the asynchronous paper's devices, drawn towards their geometric mean by a
    power and then all scaled so that together they do as many batches a second as before.

    >>> step_times("very")
    (0.58, 0.75, 1.51, 3.33)
    >>> [round(time, 3) for time in step_times("moderate")]
    [0.667, 0.792, 1.263, 2.14]
    >>> [round(time, 3) for time in step_times("none")]
    [0.995, 0.995, 0.995, 0.995]
    """
    if isinstance(given, tuple):
        return given
    middle = math.prod(_VERY_S) ** (1 / len(_VERY_S))
    drawn = [middle * (time / middle) ** _POWERS[given] for time in _VERY_S]
    scale = sum(1 / time for time in drawn) / sum(1 / time for time in _VERY_S)
    return _VERY_S if given == "very" else tuple(time * scale for time in drawn)


def draw(*names: object) -> float:
    """A number in [0, 1) that depends on these names alone."""
    return _draw(*names).random()


def _draw(*names: object) -> random.Random:
    return random.Random("/".join(map(str, names)))


def _factor(sigma: float, *names: object) -> float:
    return _draw(*names).lognormvariate(0.0, sigma) if sigma else 1.0
