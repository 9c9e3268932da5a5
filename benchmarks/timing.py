"""How long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result
