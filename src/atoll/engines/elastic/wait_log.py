"""A word now and then while something is waited for: nothing hangs in silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def reminding(say: Callable[[str], object], what: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Say what is waited for, and for how long it was, every so often."""
    over, began_s = threading.Event(), time.monotonic()

    def remind() -> None:
        while not over.wait(every_s):
            say(f"{what} ({time.monotonic() - began_s:.0f} s)")

    thread = threading.Thread(target=remind, name="reminder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
