"""What the libraries under atoll write to standard error by themselves."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft logs every quorum, and torch every store that is away and every host name that it cannot resolve. Each reads its variable
once, when it is imported."""


def quieten() -> None:
    """Have libraries log problems alone, in this process and in those that it starts, where the user has set no level."""
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    # If a user's script has imported torch before, its library is loaded, and reads the variable again: c10::initLogging().
    with suppress(OSError, AttributeError):  # it is not loaded, or another version has no such function
        ctypes.CDLL("libc10.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)["_ZN3c1011initLoggingEv"]()
