"""The simulated cluster as a value: who is there when, how fast each computes, and over what lines they talk.

Everything random is drawn from the seed and the names of what it is for, never from a generator with a position. So a run that
is resumed draws what it would have drawn.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from atoll.checks import check_types
from atoll.engines.sim.network import Link, Topology
from atoll.errors import ConfigError

_MOST_ISLANDS = 65_536
_MOST_SIGMA = 5.0  # beyond it one batch in a hundred takes a hundred thousand times as long as another
PoolName = Literal["constant", "doubling", "halving", "ramp_up", "ramp_down"]


@dataclass(frozen=True, kw_only=True)
class Away:
    """An island that is not there from round `start` up to, not including, round `stop`; rounds count from 0."""

    island: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Lost:
    """An island that is not heard in one round's exchange; rounds count from 0."""

    island: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Islands and the lines between them.

    Args:
        islands: how many there are at most.
        step_time_s: seconds of virtual time that an island needs for one batch, one figure per island. A list is cut or repeated
            to the number of islands.
        step_time_spread: islands differ by a factor drawn once for each, log-normal with this sigma.
        step_time_jitter: each batch takes a factor drawn anew, log-normal with this sigma.
        link: every island's line, unless `links` gives one per island (cut or repeated).
        links: one line per island.
        topology: ring, or star with a server.
        drop_probability: with which an island is not heard in an exchange, independently each round.
        lost: exchanges in which named islands are not heard.
        pool: how many islands take part over time: a name, or a list of counts that share the run evenly.
        away: islands that leave and come back.
        threads_per_island: CPU threads that one island computes with. Results depend on it in the last bits.
    """

    islands: int = 4
    step_time_s: tuple[float, ...] = (1.0,)
    step_time_spread: float = 0.0
    step_time_jitter: float = 0.0
    link: Link = Link()
    links: tuple[Link, ...] = ()
    topology: Topology = "ring"
    drop_probability: float = 0.0
    lost: tuple[Lost, ...] = ()
    pool: PoolName | tuple[int, ...] = "constant"
    away: tuple[Away, ...] = ()
    threads_per_island: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.islands <= _MOST_ISLANDS:
            raise ConfigError(
                f"islands={self.islands}: a cluster has at least 1 island, and at most {_MOST_ISLANDS}. Use 1 to train alone."
            )
        if not self.step_time_s or not all(time > 0 and math.isfinite(time) for time in self.step_time_s):
            raise ConfigError(
                f"step_time_s={list(self.step_time_s)}: give one or more positive numbers of seconds, such as [0.5,1.2]."
            )
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
        for lost in self.lost:
            if not (0 <= lost.island < self.islands and lost.round >= 0):
                raise ConfigError(f"{lost}: the island is below {self.islands} and the round is 0 or more.")

    def present(self, round: int, rounds: int) -> list[int]:
        """Who takes part in this round of so many."""
        counts = self._counts()
        count = counts[min(round * len(counts) // max(rounds, 1), len(counts) - 1)]
        gone = {away.island for away in self.away if away.start <= round < away.stop}
        present = [island for island in range(count) if island not in gone]
        if not present:
            raise ConfigError(f"nobody is left in round {round}: away={list(self.away)}. Leave at least one island in every round.")
        return present

    def heard(self, island: int, round: int, seed: int) -> bool:
        """Whether the others hear this island in this round's exchange."""
        if Lost(island=island, round=round) in self.lost:
            return False
        return self.drop_probability == 0 or _draw(seed, "drop", round, island).random() >= self.drop_probability

    def step_time(self, island: int, seed: int) -> float:
        """Seconds that one batch takes this island, before jitter."""
        given = self.step_time_s[island % len(self.step_time_s)]
        return given * _factor(self.step_time_spread, seed, "spread", island)

    def jitter(self, island: int, stretch: int, batches: int, seed: int) -> float:
        """By which factor this island's so-manieth stretch of computing is longer: the mean over its batches."""
        if not self.step_time_jitter:
            return 1.0
        draw = _draw(seed, "jitter", stretch, island)
        return sum(draw.lognormvariate(0.0, self.step_time_jitter) for _ in range(batches)) / batches

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


def _draw(*names: object) -> random.Random:
    return random.Random("/".join(map(str, names)))


def _factor(sigma: float, *names: object) -> float:
    return _draw(*names).lognormvariate(0.0, sigma) if sigma else 1.0
