"""What the libraries under atoll write to standard error by themselves."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft logs every quorum, and torch every store that is away and every host name that it cannot resolve. Each reads its variable
once, when it is imported."""


def quieten() -> None:
    """Have libraries log problems alone, in this process and in those that it starts, where the user has set no level."""
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:  # a user's script has imported it: have it read its variable again
        with suppress(OSError, AttributeError):  # on a system, or with a torch, whose library has another name
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))["_ZN3c1011initLoggingEv"]()
