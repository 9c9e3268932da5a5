"""Optional dependencies: imported by name when they are needed, with advice when they are missing."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError


def require(module: str, *, extra: str, purpose: str, alone: bool = False) -> Any:
    """The module of that name, or a ConfigError with the command that installs its extra of atoll; of the extra's libraries only
    this one, if it is enough `alone`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = install_command(extra, module if alone else "")
        raise ConfigError(f"{purpose} need {module}, which cannot be imported ({error}). Install it with `{command}`.") from error


def install_command(extra: str, library: str = "") -> str:
    """A command that installs an extra's libraries, or one of them, from any folder, without an index that has atoll: from the
    checkout that this code belongs to, or by the requirements of the installed package."""
    checkout = Path(__file__).parents[3]
    if not library and (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    needed = (re.split(r"[;\s]", line)[0] for line in metadata.requires("atoll") or () if line.endswith(f'extra == "{extra}"'))
    return "pip install " + " ".join(f'"{one}"' for one in needed if one.startswith(library))
