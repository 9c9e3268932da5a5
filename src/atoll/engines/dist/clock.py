"""The clock on the wall, and how long an exchange may take by it."""

from __future__ import annotations

import time

FIRST_LIMIT_S = 600.0
"""Before anybody knows how long a round takes: others may still be reading their data, or compiling."""
LEAST_LIMIT_S = 60.0
PATIENCE = 10.0
"""How many times the longest interval so far."""


class WallClock:
    """Seconds since the run began. A run that is resumed goes on from where it stood."""

    def __init__(self) -> None:
        self._zero = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero

    def set(self, now_s: float) -> None:
        self._zero = time.monotonic() - now_s


class Limit:
    """How long this island waits in an exchange before it has failed.

    It is derived: ten times the longest interval between the ends of two exchanges so far, computing and waiting for others
    included, and never less than a minute; ten minutes before the first. Or it is given.

    >>> limit = Limit()
    >>> limit.limit_s
    600.0
    >>> limit.saw(20.0)
    >>> limit.limit_s
    200.0
    """

    def __init__(self, given_s: float | None = None) -> None:
        self._given_s, self._longest_s = given_s, 0.0

    @property
    def limit_s(self) -> float:
        if self._given_s is not None:
            return self._given_s
        return max(LEAST_LIMIT_S, PATIENCE * self._longest_s) if self._longest_s else FIRST_LIMIT_S

    @property
    def why(self) -> str:
        """Where it comes from, in words."""
        if self._given_s is not None:
            return "as given"
        if not self._longest_s:
            return "before the first exchange; from then on ten times the longest interval between two, and at least 60 s"
        return f"ten times the longest interval between two exchanges ({self._longest_s:.3g} s), and at least {LEAST_LIMIT_S:g} s"

    def saw(self, interval_s: float) -> None:
        """So long it took from the end of one exchange to the end of the next."""
        self._longest_s = max(self._longest_s, interval_s)
