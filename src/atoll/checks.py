"""What a frozen dataclass refuses before it looks at its numbers: values of another type than its fields declare.

>>> from dataclasses import dataclass
>>> from typing import Literal
>>> @dataclass(frozen=True)
... class Setting:
...     steps: int
...     way: Literal["up", "down"] = "up"
...     def __post_init__(self) -> None:
...         check_types(self)
>>> Setting(steps=2, way="dwon")
Traceback (most recent call last):
atoll.errors.ConfigError: way='dwon' is none of 'up', 'down'. Use one of them.
>>> Setting(steps=2.5)
Traceback (most recent call last):
atoll.errors.ConfigError: steps=2.5 is not a whole number. Give one.
"""

from __future__ import annotations

from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from atoll.errors import ConfigError


def check_types(instance: Any) -> None:
    """Refuses text that is none of a field's choices and fractions where whole numbers are meant; takes lists for tuples."""
    for name, choices, whole, many in _declared(type(instance)):
        value = getattr(instance, name)
        if many and isinstance(value, list):  # as natural to write, and not hashable
            object.__setattr__(instance, name, value := tuple(value))
        if many and not isinstance(value, tuple | str):
            raise ConfigError(f"{name}={value!r} is not a list. Give one, such as [{value!r}].")
        if choices and isinstance(value, str) and value not in choices:
            raise ConfigError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}. Use one of them.")
        if whole and isinstance(value, float | bool):
            raise ConfigError(f"{name}={value!r} is not a whole number. Give one.")


_KNOWN: dict[type, tuple[tuple[str, tuple[Any, ...], bool, bool], ...]] = {}


def _declared(kind: type) -> tuple[tuple[str, tuple[Any, ...], bool, bool], ...]:
    """For each field its choices, if it is a choice of text, whether it is a whole number, and whether it is a list."""
    if kind not in _KNOWN:  # asked once for each class
        hints = get_type_hints(kind)
        declared = ((field.name, hints[field.name]) for field in fields(kind))
        _KNOWN[kind] = tuple((name, _choices(hint), _whole(hint), _many(hint)) for name, hint in declared)
    return _KNOWN[kind]


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(hint: Any) -> tuple[Any, ...]:
    members = _members(hint)
    if str in members:
        return ()
    return tuple(choice for member in members if get_origin(member) is Literal for choice in get_args(member))


def _whole(hint: Any) -> bool:
    members = _members(hint)
    return int in members and float not in members and bool not in members


def _many(hint: Any) -> bool:
    return any(get_origin(member) is tuple for member in _members(hint))
