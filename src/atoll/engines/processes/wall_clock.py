"""The clock on the wall, and how long an exchange may take by it."""

from __future__ import annotations

import time
from collections.abc import Callable

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

    It is derived: ten times the longest interval between the ends of two exchanges, computing and waiting for others included, and
    never less than a minute; ten minutes before the first is over. The interval that is not over yet counts too: whoever took an
    hour for a round can expect that others take a while longer. Or the limit is given.

    >>> seconds = iter([0.0, 20.0, 25.0, 45.0])
    >>> limit = Limit(now=lambda: next(seconds))
    >>> limit.begin()  # after 20 s of computing
    600.0
    >>> limit.end()  # 5 s later
    >>> limit.begin()
    250.0
    """

    def __init__(self, given_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.given_s, self._now = given_s, now
        self._ended_s, self._longest_s = now(), 0.0

    @property
    def limit_s(self) -> float:
        """As far as is known before the next exchange begins."""
        if self.given_s is not None:
            return self.given_s
        return max(LEAST_LIMIT_S, PATIENCE * self._longest_s) if self._longest_s else FIRST_LIMIT_S

    def begin(self) -> float:
        """An exchange begins: how long it may take."""
        if self.given_s is not None:
            return self.given_s
        return max(self.limit_s, PATIENCE * (self._now() - self._ended_s))

    def end(self) -> None:
        """It is over."""
        now_s = self._now()
        self._longest_s, self._ended_s = max(self._longest_s, now_s - self._ended_s), now_s

    def go_on(self) -> None:
        """Something came between that is no part of a round, such as a checkpoint: from now on it counts again."""
        self._ended_s = self._now()

    @property
    def why(self) -> str:
        """Where it comes from, in words."""
        if self.given_s is not None:
            return "as given"
        if not self._longest_s:
            return "before the first exchange; from then on ten times the longest interval between two, and at least 60 s"
        return f"ten times the longest interval between two exchanges ({self._longest_s:.3g} s), and at least {LEAST_LIMIT_S:g} s"
