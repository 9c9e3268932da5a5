"""What a user should know and did not ask for: one line, where it is seen."""

from __future__ import annotations

import logging
import sys

_LOG = logging.getLogger("atoll")


def say(text: str) -> None:
    """Tell the user: by the logger `atoll`, at INFO, where logging is set up; else on stderr, since nobody would see it."""
    if _LOG.hasHandlers():
        _LOG.info(text)
    else:
        sys.stderr.write(f"atoll: {text}\n")


def warn(text: str) -> None:
    """Tell the user of something that is probably wrong. Without any handler Python writes it to stderr."""
    _LOG.warning("atoll: %s", text)
