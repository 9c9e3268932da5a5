"""Workers that have introduced themselves and have no place yet. The first of a run wait for the others, for a while."""

from __future__ import annotations

import math
import time

_GATHER_S = 60.0  # so long the first wait for the others


class Gathering:
    """Who waits for a place.

    Args:
        workers: how many the first wait for.
        first: whether nobody has a place yet.
    """

    def __init__(self, workers: int, *, first: bool) -> None:
        self._workers, self._first = workers, first
        self._lives: dict[int, int] = {}
        self._since_s = math.inf

    def add(self, number: int, life: int) -> None:
        self._lives[number] = max(life, self._lives.get(number, -1))
        self._since_s = min(self._since_s, time.monotonic())

    def has(self, number: int, life: int) -> bool:
        return self._lives.get(number) == life

    def drop(self, number: int, life: int) -> None:
        """It has died."""
        if self.has(number, life):
            del self._lives[number]

    def seated(self) -> dict[int, int]:
        """Who takes a place now, by number with its life: at once, or in the beginning when all are there, or have had their time.
        These wait no more."""
        late = time.monotonic() - self._since_s > _GATHER_S
        if not self._lives or (self._first and len(self._lives) < self._workers and not late):
            return {}
        lives, self._lives, self._since_s, self._first = self._lives, {}, math.inf, False
        return lives
