"""What the libraries under atoll write to standard error by themselves."""

from __future__ import annotations

import os

QUIET = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torchft logs every quorum, and torch every store that is away and every host name that it cannot resolve. Each reads its variable
once, when it is imported."""


def quieten() -> None:
    """Have libraries that this process and its children import later log problems alone, where the user has set no level."""
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
