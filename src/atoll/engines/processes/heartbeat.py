"""Signs of life in the store: whoever waits for another's word sees whether it is still there.

A connection that closes tells of a death, but only to those who exchange over it. Between rounds processes wait for words in the
store, which knows nothing of deaths. So each counts there, on a thread of its own.
"""

from __future__ import annotations

import threading
import time

from torch.distributed.distributed_c10d import Store

from atoll.engines.processes.failure_attribution import Blame

BEAT_S = 2.0
SILENT_S = 30.0
"""Whoever has not counted for so long is taken for dead."""


class Pulse:
    """This process's count, and a look at others'.

    Args:
        store: that all see.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._over = threading.Event()
        store.set(f"pulse/{rank}", "0")
        threading.Thread(target=self._count, name="pulse", daemon=True).start()

    def _count(self) -> None:
        beats = 0
        while not self._over.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"pulse/{self._rank}", str(beats))
            except RuntimeError:  # the store is gone, and whoever needs it will say so
                return

    def close(self) -> None:
        self._over.set()

    def watch(self, rank: int) -> Watch:
        """Look at another's count from now on."""
        return Watch(self._store, rank)


class Watch:
    """A look at another process. It is asked often; the store is asked once a second."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._seen, self._seen_s, self._asked_s, self._words = "", time.monotonic(), 0.0, ""

    def silent_s(self) -> float:
        """How long ago it was last seen to count."""
        now_s = time.monotonic()
        if now_s - self._asked_s > 1.0:
            self._asked_s = now_s
            self._words = Blame(self._store, self._rank, [self._rank]).last_words(0)
            key = f"pulse/{self._rank}"
            count = self._store.get(key).decode() if self._store.check([key]) else ""
            if count != self._seen:
                self._seen, self._seen_s = count, now_s
        return now_s - self._seen_s

    def last_words(self) -> str:
        """What it ended with, if it said so; as of the last look."""
        return self._words
