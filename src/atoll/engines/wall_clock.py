"""The wall clock of a run, and how long an exchange may take by it."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_TIMEOUT_S = 600.0
"""Before the first exchange, peers may still be reading their data, or compiling."""
LEAST_TIMEOUT_S = 60.0
INTERVALS = 10.0
"""The timeout in multiples of the longest interval between two exchanges so far."""


class WallClock:
    """Seconds since the run began. A resumed run continues from the saved time."""

    def __init__(self) -> None:
        self._zero = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero

    def set(self, now_s: float) -> None:
        self._zero = time.monotonic() - now_s


class ExchangeTimeout:
    """How long this process waits in an exchange before the exchange has failed.

    By default it is ten times the longest interval between the ends of two exchanges, computing and waiting included, and at least
    60 s; before the first exchange it is 600 s. The interval that is under way counts too: a peer's round may take longer still.
    `fixed_s` sets another timeout, for good.

    >>> seconds = iter([0.0, 20.0, 25.0, 45.0])
    >>> timeout = ExchangeTimeout(now=lambda: next(seconds))
    >>> timeout.start()  # after 20 s of computing
    600.0
    >>> timeout.finish()  # 5 s later
    >>> timeout.start()
    250.0
    """

    def __init__(self, fixed_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.fixed_s, self._now = fixed_s, now
        self._finished_s, self._longest_s = now(), 0.0

    @property
    def timeout_s(self) -> float:
        """As far as it is known before the next exchange starts."""
        if self.fixed_s is not None:
            return self.fixed_s
        return max(LEAST_TIMEOUT_S, INTERVALS * self._longest_s) if self._longest_s else FIRST_TIMEOUT_S

    def start(self) -> float:
        """An exchange starts. Returns its timeout in seconds."""
        if self.fixed_s is not None:
            return self.fixed_s
        return max(self.timeout_s, INTERVALS * (self._now() - self._finished_s))

    def finish(self) -> None:
        """The exchange is over."""
        now_s = self._now()
        self._longest_s, self._finished_s = max(self._longest_s, now_s - self._finished_s), now_s

    def restart(self) -> None:
        """Begin a new interval: the time since the last exchange went into something else than a round, such as a checkpoint."""
        self._finished_s = self._now()

    @property
    def reason(self) -> str:
        """Where the timeout comes from, for the log."""
        if self.fixed_s is not None:
            return "as given"
        if not self._longest_s:
            return "before the first exchange; from then on ten times the longest interval between two, and at least 60 s"
        return f"ten times the longest interval between two exchanges ({self._longest_s:.3g} s), and at least {LEAST_TIMEOUT_S:g} s"
