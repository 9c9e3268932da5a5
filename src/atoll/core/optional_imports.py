"""Optional dependencies: imported by name when they are needed, with advice when they are missing."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError


def require(module: str, *, extra: str, purpose: str) -> Any:
    """The module of that name, or a ConfigError that says which extra of atoll brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} need {module}, which cannot be imported ({error}). Install it with `{install_command(extra)}`."
        ) from error


def install_command(extra: str) -> str:
    """A command that installs an extra's libraries from any folder, without an index that has atoll: from the checkout that this
    code belongs to, or by the requirements of the installed package."""
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    needed = (re.split(r"[;\s]", line)[0] for line in metadata.requires("atoll") or () if line.endswith(f'extra == "{extra}"'))
    return "pip install " + " ".join(f'"{requirement}"' for requirement in needed)
