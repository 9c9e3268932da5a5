"""Runs of classes that are not atoll's: how a command is given so that it knows them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.core.config.json_records import find_type
from atoll.core.errors import ConfigError
from atoll.runs.folder import RunFolder


def check_imported(folder: Path) -> None:
    """Refuse a run of classes whose module nobody has imported, with the command that imports it first.

    Raises:
        ConfigError: the Run cannot be built here; says how it can.
    """
    for name in _types(RunFolder.open(folder).run_json):
        module = name.rpartition(".")[0]
        of_a_script = "__main__" in name or "<locals>" in name
        if find_type(name) is not None or name.startswith("atoll.") or (module in sys.modules and not of_a_script):
            continue
        why = f"{folder} is a run of {name}, which is not atoll's own, and a file cannot make atoll import anything."
        if of_a_script:
            raise ConfigError(f"{why} Only the script that defines this class can open it. Give classes a module of their own.")
        command = f'python -c "import {module}; from atoll.cli.main import main; main()" {shlex.join(sys.argv[1:])}'
        raise ConfigError(f"{why} Have it import the module first, from the folder in which that lies: {command}")


def _types(node: Any) -> Iterator[str]:
    """The full names of all classes in a Run as plain data; numbers and paths have short ones there."""
    if isinstance(node, dict) and "." in str(node.get("type", "")):
        yield str(node["type"])
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _types(inner)
