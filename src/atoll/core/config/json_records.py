"""Records as JSON: a tree of frozen dataclasses, each of which becomes a dictionary that names its class.

>>> from atoll.core.protocols import Work
>>> work = Work(shard=0, start=0, schedule=0, examples=512)
>>> to_json(work)
{'type': 'Work', 'shard': 0, 'start': 0, 'schedule': 0, 'examples': 512, 'pieces': 1, 'before': 0}

A class of atoll is saved by its name alone, which does not change when its module moves. A user's class is saved by its full name,
and its module must be imported before the file is read: a file never causes the import of foreign code.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atoll.core.config.type_checks import allows_class, hints_of, is_record, item_hints, joined, missing_fields, settable
from atoll.core.errors import ConfigError


def to_json(value: Any, at: str = "") -> Any:
    """Dictionaries, lists, strings, numbers and none, from which `from_json` makes an equal value. `at` is its path, for the
    ConfigError about a value that settings cannot hold."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no word for these, and a plain string would read back as one.
        return float(value) if math.isfinite(value) else {"type": "float", "value": repr(float(value))}
    if isinstance(value, Path):
        return {"type": "path", "value": str(value)}
    if type(value) is tuple:
        return [to_json(item, joined(at, i)) for i, item in enumerate(value)]
    if is_record(value) and "type" not in settable(type(value)):
        return {"type": type_name(type(value)), **{n: to_json(getattr(value, n), joined(at, n)) for n in settable(type(value))}}
    raise ConfigError(
        f"{at or 'the value'} is {value!r}, which cannot be saved. Settings hold frozen dataclasses (without a field called "
        f"'type'), tuples, numbers, text, paths and none. Use one of these."
    )


def from_json(node: Any, at: str = "", hint: Any = Any) -> Any:
    """The value that `to_json` wrote. Fields that a file of an older version lacks get their defaults.

    Args:
        at: the path of the value, for messages.
        hint: the type of the value. Classes that do not fit it, or the hints of the fields inside, are not called: a file may name
            any dataclass of any module that is imported.

    Raises:
        ConfigError: a type or field is unknown or not allowed at its place, a field without a default is missing, or the dataclass
            refuses its values.
    """
    if isinstance(node, list):
        hints = [Any] * len(node) if hint is Any else item_hints(hint, len(node)) or [type(None)] * len(node)
        return tuple(from_json(item, joined(at, i), hints[i]) for i, item in enumerate(node))
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
                f"{here} has the type {name!r:.200}, which is not a known dataclass. Types of atoll are found by themselves; "
                f"import the module of your own ones before you open the file, or check the name."
            )
        if not allows_class(hint, kind):
            raise ConfigError(f"{here} has the type {name!r:.200}, which does not fit there. Restore the file, or check the name.")
        _check_fields(kind, given, f"{here} ({kind.__name__})")
        inner = hints_of(kind)
        return kind(**{key: from_json(item, joined(at, key), inner[key]) for key, item in given.items()})
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise ConfigError(
            f"{here} cannot be made from {str(node)[:200]}: {str(error)[:200]}. Correct the file, or write it again with atoll."
        ) from error


def _check_fields(kind: type, given: Collection[str], here: str) -> None:
    known = settable(kind)
    unknown, missing = sorted(set(given) - known.keys()), missing_fields(kind, given)
    if unknown:
        raise ConfigError(
            f"{here} is given {', '.join(unknown)[:200]}, which it does not have. It has: {', '.join(known)}. "
            f"Remove it, or open the file with the version of atoll that wrote it."
        )
    if missing:
        raise ConfigError(f"{here} is not given {', '.join(missing)}, which has no default. Add it to the file.")


def type_name(kind: type) -> str:
    """The name by which `find_type` finds a class."""
    own = kind.__module__.partition(".")[0] == "atoll"
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


def find_type(name: Any) -> type | None:
    """The record of atoll with this name, or the class of an imported module with this full name; else none."""
    if not isinstance(name, str):
        return None
    parts = name.split(".")
    if len(parts) == 1:
        return _own_records().get(name)
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for part in parts[cut:]:
                found = getattr(found, "__dict__", {}).get(part)  # getattr would run a lazy module's code
            return found if isinstance(found, type) else None
    return None


_RECORD_PACKAGES = ("core", "optim", "algorithms", "models", "data", "runs")


@cache
def _own_records() -> dict[str, type]:
    """The dataclasses and named tuples that atoll saves, by name. No class name occurs twice in the package."""
    root = Path(__file__).parents[2]
    modules = [path for package in _RECORD_PACKAGES for path in (root / package).rglob("*.py") if path.stem != "__init__"]
    found: dict[str, type] = {}
    for path in modules:
        module = importlib.import_module(".".join(["atoll", *path.relative_to(root).with_suffix("").parts]))
        classes = {
            name: kind for name, kind in vars(module).items() if isinstance(kind, type) and kind.__module__ == module.__name__
        }
        found |= {name: kind for name, kind in classes.items() if is_dataclass(kind) or hasattr(kind, "_fields")}
    return found
