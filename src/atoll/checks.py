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
    """Refuses text that is none of a field's choices, and fractions where whole numbers are meant. For __post_init__."""
    for name, choices, whole in _declared(type(instance)):
        value = getattr(instance, name)
        if choices and isinstance(value, str) and value not in choices:
            raise ConfigError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}. Use one of them.")
        if whole and isinstance(value, float | bool):
            raise ConfigError(f"{name}={value!r} is not a whole number. Give one.")


_KNOWN: dict[type, tuple[tuple[str, tuple[Any, ...], bool], ...]] = {}


def _declared(kind: type) -> tuple[tuple[str, tuple[Any, ...], bool], ...]:
    """For each field its choices, if it is a choice of text, and whether it is a whole number."""
    if kind not in _KNOWN:  # asked once for each class
        hints = get_type_hints(kind)
        _KNOWN[kind] = tuple((field.name, _choices(hints[field.name]), _whole(hints[field.name])) for field in fields(kind))
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
