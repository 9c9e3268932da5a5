"""One island's share of a run whose islands meet: how long it computed, talked and waited, and what was hidden of its exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from atoll.core.events import Computed

Stretch = tuple[float, float]
"""From when to when, in seconds on the run's clock."""
_ROUNDING = 1e-9  # shares of time below this are what adding up floats leaves


@dataclass(frozen=True, kw_only=True)
class IslandTimes:
    """One island's share of a run. `present_s` is the sum of `computed_s`, `talked_s` and `waited_s`.

    Attributes:
        batches: that it computed, pieces of them by their size.
        exchanged_s: in exchanges, hidden or not.
        hidden_s: the part of these during which it computed.
        inside_exchanged_s: of a device, the part of `exchanged_s` with others of its island; None where devices have no algorithm.
        inside_hidden_s: the part of that during which it computed.
    """

    island: int
    batches: float
    tokens: int
    present_s: float
    computed_s: float
    exchanged_s: float
    hidden_s: float
    inside_exchanged_s: float | None = None
    inside_hidden_s: float | None = None

    @property
    def talked_s(self) -> float:
        """In exchanges that held it up."""
        return self.exchanged_s - self.hidden_s

    @property
    def waited_s(self) -> float:
        """For others: it neither computed nor exchanged anything. On real machines it may have saved or evaluated meanwhile."""
        idle_s = self.present_s - self.computed_s - self.talked_s
        return idle_s if idle_s > _ROUNDING * self.present_s else 0.0

    @property
    def busy(self) -> float | None:
        """Computing time over time present."""
        return self.computed_s / self.present_s if self.present_s else None

    @property
    def hidden(self) -> float | None:
        """The share of its exchanges that was hidden; of a device, of those inside its island."""
        if self.inside_exchanged_s is None or self.inside_hidden_s is None:
            return self.hidden_s / self.exchanged_s if self.exchanged_s else None
        return self.inside_hidden_s / self.inside_exchanged_s if self.inside_exchanged_s else None

    def to_dict(self) -> dict[str, Any]:
        record = {name: value for name, value in asdict(self).items() if value is not None}
        return {**record, "talked_s": self.talked_s, "waited_s": self.waited_s}


def shared_s(one: Sequence[Stretch], two: Sequence[Stretch]) -> float:
    """How long both go on. Each is in order, and its stretches do not overlap.

    >>> shared_s([(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)])
    3.0
    """
    total_s, first, second = 0.0, 0, 0
    while first < len(one) and second < len(two):
        (start_s, end_s), (other_start_s, other_end_s) = one[first], two[second]
        total_s += max(0.0, min(end_s, other_end_s) - max(start_s, other_start_s))
        if end_s < other_end_s:
            first += 1
        else:
            second += 1
    return total_s


@dataclass
class IslandAccount:
    """Adds up what one island does. Stretches wait for the end of their round, for an exchange is told when it begins."""

    stretches: list[Stretch] = field(default_factory=list)
    between: list[Stretch] = field(default_factory=list)
    inside: list[Stretch] = field(default_factory=list)
    batches: float = 0.0
    tokens: int = 0
    computed_s: float = 0.0
    exchanged_s: float = 0.0
    hidden_s: float = 0.0
    inside_exchanged_s: float = 0.0
    """Of `exchanged_s`, with other devices of its island."""
    inside_hidden_s: float = 0.0
    past_s: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0

    def computed(self, event: Computed) -> None:
        self.batches += event.batches
        self.tokens += event.tokens
        self.stretches.append((event.start_s, event.end_s))

    def here_until(self, time_s: float) -> None:
        self.until_s = max(self.until_s, time_s)

    def exchanged(self, start_s: float, end_s: float, *, inside: bool) -> None:
        """One that it was too late for, so that it was over before it came, is none."""
        if start_s < end_s:
            (self.inside if inside else self.between).append((start_s, end_s))

    def settle(self) -> None:
        """What the round came to."""
        stretches, between, inside = one_by_one(self.stretches), one_by_one(self.between), one_by_one(self.inside)
        inside_s, inside_hidden_s = _length_s(inside), shared_s(stretches, inside)
        self.computed_s += _length_s(stretches)
        self.exchanged_s += _length_s(between) + inside_s
        self.hidden_s += shared_s(stretches, between) + inside_hidden_s
        self.inside_exchanged_s += inside_s
        self.inside_hidden_s += inside_hidden_s
        for _, end_s in (*stretches, *between, *inside):
            self.here_until(end_s)
        self.stretches, self.between, self.inside = [], [], []

    def so_far(self) -> IslandAccount:
        """The account with what is known of a round that is not over."""
        now = replace(self)
        now.settle()
        return now

    def left(self) -> None:
        self.settle()
        self.past_s += self.until_s - self.since_s
        self.since_s = self.until_s

    def times(self, island: int, *, two_levels: bool = False) -> IslandTimes:
        return IslandTimes(
            island=island,
            batches=self.batches,
            tokens=self.tokens,
            present_s=self.past_s + self.until_s - self.since_s,
            computed_s=self.computed_s,
            exchanged_s=self.exchanged_s,
            hidden_s=self.hidden_s,
            inside_exchanged_s=self.inside_exchanged_s if two_levels else None,
            inside_hidden_s=self.inside_hidden_s if two_levels else None,
        )


def one_by_one(stretches: Iterable[Stretch]) -> list[Stretch]:
    """In order, each from where the one before it ends. Where times are measured, an island may be in its next exchange before all
    others are out of the last, and no second may count twice.

    >>> one_by_one([(4.0, 5.0), (0.0, 2.0), (1.5, 3.0), (2.0, 2.5)])
    [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0)]
    """
    kept: list[Stretch] = []
    for start_s, end_s in sorted(stretches):
        start_s = max(start_s, kept[-1][1]) if kept else start_s
        if start_s < end_s:
            kept.append((start_s, end_s))
    return kept


def _length_s(stretches: Sequence[Stretch]) -> float:
    return sum(end_s - start_s for start_s, end_s in stretches)
