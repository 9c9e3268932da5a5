"""Whose delta is taken: one that is not finite, or absurdly long, is refused by everybody alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

REMEMBERED = 16
"""Rounds whose lengths are looked back at."""
ENOUGH = 3
"""So many lengths must be known before any of them is absurd."""


class Brought(NamedTuple):
    """What an island brings to a mean, as it tells.

    Attributes:
        weight: 0 of an island that has no work yet.
        finite: whether its delta is.
        norm: of it.
    """

    weight: float
    finite: bool
    norm: float


class Judge:
    """Remembers how long deltas are, and refuses those that are longer by far.

    Args:
        limit: how many times the median of those before; in the first rounds, of those that come with it.
            Infinity refuses what is not finite alone.

    >>> judge = Judge(limit=10)
    >>> for _ in range(3):
    ...     judge.remember([Brought(1.0, True, 2.0), Brought(1.0, True, 3.0)], refused={})
    >>> judge.refused([Brought(1.0, True, 2.5), Brought(1.0, True, 1e6)])
    {1: 'its delta has a norm of 1e+06, 400000 times what is usual (2.5); the limit is 10 times'}
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._norms: list[float] = []

    def refused(self, brought: Sequence[Brought]) -> dict[int, str]:
        """Whose delta is not taken, by rank, and why."""
        usual = self._usual([one.norm for one in brought if one.weight and one.finite])
        reasons = {rank: self._reason(one, usual) for rank, one in enumerate(brought) if one.weight}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def remember(self, brought: Sequence[Brought], refused: Collection[int]) -> None:
        """A round is committed: how long the deltas were that it took."""
        taken = [one.norm for rank, one in enumerate(brought) if one.weight and rank not in refused]
        if taken:
            self._norms = [*self._norms, median(taken)][-REMEMBERED:]

    def _usual(self, norms: Sequence[float]) -> float:
        """What is to be expected, as far as anybody knows: what was lately, or at first what the others bring now. Else 0."""
        known = self._norms if len(self._norms) >= ENOUGH else norms
        return median(known) if len(known) >= ENOUGH else 0.0

    def _reason(self, one: Brought, usual: float) -> str:
        if not one.finite:
            return "its delta is not finite"
        if usual and one.norm > self._limit * usual:
            return (
                f"its delta has a norm of {one.norm:.3g}, {one.norm / usual:.6g} times what is usual ({usual:.3g}); "
                f"the limit is {self._limit:g} times"
            )
        return ""

    def to_parts(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self._norms = list(parts["norms"])
