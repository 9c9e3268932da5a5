"""Optional dependencies: imported by name when they are needed, with advice when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from atoll.core.errors import ConfigError


def require(module: str, *, extra: str, purpose: str) -> Any:
    """The module of that name, or a ConfigError that says which extra of atoll brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'{purpose} need {module}, which cannot be imported ({error}). Install it with `pip install "atoll[{extra}]"`.'
        ) from error
