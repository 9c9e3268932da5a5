"""Calls that are repeated for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(
    call: Callable[[], T],
    kind: type[Exception],
    limit_s: float,
    every_s: float,
    on_error: Callable[[Exception], object] = lambda error: None,
) -> T:
    """Repeat a call until it raises no error of this kind. After `limit_s` its error is raised."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except kind as error:
            if time.monotonic() > deadline_s:
                raise
            on_error(error)
        time.sleep(every_s)
