"""What the fields of a record may hold, by their types. Records are dataclasses."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from atoll.core.errors import ConfigError


def members_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of anything else, itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(inner for member in get_args(hint) for inner in members_of(member))
    return (hint,)


def item_hints(hint: Any, length: int) -> list[Any] | None:
    """What the items of a tuple of this length may be, or none if the hint allows no such tuple."""
    for shape in (get_args(member) for member in members_of(hint) if get_origin(member) is tuple):
        if Ellipsis in shape or len(shape) == length:
            return [shape[0]] * length if Ellipsis in shape else list(shape)
    return None


def hints_of(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of {kind.__name__}'s fields cannot be read: {error}. Settings are read by their types: "
            f"import what they name at run time, not under TYPE_CHECKING only."
        ) from error


def settable(kind: type) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(kind) if f.init}


def has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def default_of(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def joined(at: str, name: str | int) -> str:
    return f"{at}.{name}" if at else str(name)
