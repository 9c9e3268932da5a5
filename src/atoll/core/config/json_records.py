"""A Run as plain data, for a file. It is a tree of frozen dataclasses, each of which becomes a dictionary that names its class.

>>> from atoll.core.protocols import Work
>>> work = Work(shard=0, start=0, schedule=0, examples=512)
>>> to_json(work)
{'type': 'atoll.core.protocols.Work', 'shard': 0, 'start': 0, 'schedule': 0, 'examples': 512, 'pieces': 1}
>>> from_json(to_json(work)) == work
True

Nothing is ever evaluated as code, and a file cannot make us import anything.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.core.config.type_hints import has_default, is_record, joined, settable
from atoll.core.errors import ConfigError


def to_json(value: Any) -> Any:
    """Dictionaries, lists, strings, numbers and none, from which `from_json` makes an equal value.

    Raises:
        ConfigError: there is something in it that settings cannot hold.
    """
    return _to_json(value, "")


def _to_json(value: Any, at: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no word for these, and a plain string would read back as one.
        return float(value) if math.isfinite(value) else {"type": "float", "value": repr(float(value))}
    if isinstance(value, Path):
        return {"type": "path", "value": str(value)}
    if type(value) is tuple:
        return [_to_json(item, joined(at, i)) for i, item in enumerate(value)]
    if is_record(value) and "type" not in settable(type(value)):
        return {"type": full_name(type(value)), **{n: _to_json(getattr(value, n), joined(at, n)) for n in settable(type(value))}}
    raise ConfigError(
        f"{at or 'the value'} is {value!r}, which cannot be saved. Settings hold frozen dataclasses (without a field called "
        f"'type'), tuples, numbers, text, paths and none. Use one of these."
    )


def from_json(node: Any) -> Any:
    """The value that `to_json` wrote. Fields that a file of an older version lacks get their defaults.

    Raises:
        ConfigError: a type or field is unknown, a field without a default is missing, or the dataclass refuses its values.
    """
    return _from_json(node, "")


def _from_json(node: Any, at: str) -> Any:
    if isinstance(node, list):
        return tuple(_from_json(item, joined(at, i)) for i, item in enumerate(node))
    if not isinstance(node, dict):
        return node
    name, given = node.get("type"), {key: item for key, item in node.items() if key != "type"}
    here = at or "the Run"
    try:
        if name in ("float", "path"):
            return float(node["value"]) if name == "float" else Path(node["value"])
        kind = find_type(name)
        if kind is None or not is_dataclass(kind):
            raise ConfigError(
                f"{here} has the type {name!r}, which is not a known dataclass. Types of atoll are found by themselves; "
                f"import the module of your own ones before you open the file, or check the name."
            )
        _check_fields(kind, given, f"{here} ({kind.__name__})")
        return kind(**{key: _from_json(item, joined(at, key)) for key, item in given.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{here} cannot be made from {node}: {error}. Correct the file, or write it again with atoll.") from error


def _check_fields(kind: type, given: Iterable[str], here: str) -> None:
    known, given = settable(kind), set(given)
    unknown, missing = sorted(given - known.keys()), [n for n, f in known.items() if n not in given and not has_default(f)]
    if unknown:
        raise ConfigError(
            f"{here} is given {', '.join(unknown)}, which it does not have. It has: {', '.join(known)}. "
            f"Remove it, or open the file with the version of atoll that wrote it."
        )
    if missing:
        raise ConfigError(f"{here} is not given {', '.join(missing)}, which has no default. Add it to the file.")


def full_name(kind: type) -> str:
    """The name by which `find_type` finds a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def find_type(name: Any) -> type | None:
    """The class of that full name, if it is one of atoll's or if its module is imported already; else none."""
    parts = name.split(".") if isinstance(name, str) else []
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = _module(".".join(parts[:cut]))
        if found is not None:
            for part in parts[cut:]:
                found = getattr(found, "__dict__", {}).get(part)  # no getattr: a lazy module would import what the file names
            return found if isinstance(found, type) else None
    return None


def _module(name: str) -> ModuleType | None:
    if name not in sys.modules and name.startswith("atoll.") and "__main__" not in name:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            return None
    return sys.modules.get(name)
