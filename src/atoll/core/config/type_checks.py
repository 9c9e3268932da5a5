"""What is refused before anybody looks at its numbers: values of another type than was asked for.

A frozen dataclass has its fields checked against the types that they declare. A Protocol is asked for its methods, since anything
that has them will do.

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
atoll.core.errors.ConfigError: way='dwon' is none of 'up', 'down'. Use one of them.
>>> Setting(steps=2.5)
Traceback (most recent call last):
atoll.core.errors.ConfigError: steps=2.5 is not a whole number. Give one.
>>> Setting(steps="2")
Traceback (most recent call last):
atoll.core.errors.ConfigError: steps='2' is text, not a whole number. Leave out the quotation marks.
>>> check_type("setting", Setting, Setting)
Traceback (most recent call last):
atoll.core.errors.ConfigError: setting is the class Setting, not a Setting. Give one: Setting(...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import atoll
from atoll.core.errors import ConfigError

_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
}
"""What they are called, and what is one: a truth is no number, and numpy's numbers are."""
_SUCH_AS = {
    "Rule": "atoll.AdamW(lr=4e-4) or atoll.Nesterov(lr=0.7)",
    "Correction": "atoll.Polynomial()",
    "Algorithm": "atoll.DiLoCo(inner_steps=50)",
    "AsyncAlgorithm": "atoll.AsyncLocalSGD(inner_steps=50)",
    "TrainsDevices": "atoll.DDP(), atoll.ZeRO1(), atoll.FSDP(), atoll.ACCO(), atoll.DPU() or atoll.WP()",
    "Run": "atoll.recipes.demo_diloco()",
    "Module": "torch.nn.Linear(2, 1)",
}
"""Examples of what is not made by its own name."""
_SHOWN = 60
"""Characters of a value that are shown."""


def check_types(instance: Any) -> None:
    """Refuses fields whose values are of another type than they declare. Takes lists for tuples, and paths for text.

    Raises:
        ConfigError: one is. It says what was given, and what is asked for.
    """
    kind: Any = type(instance)
    for name, hint in _declared(kind):
        given = getattr(instance, name)
        taken = _taken(name, given, hint)
        if taken is not given:  # as natural to write; and lists are not hashable
            object.__setattr__(instance, name, taken)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuses an argument that is of another type than `hint`, which may be all that a field can declare.

    Raises:
        ConfigError: it is. It says what was given, and what is asked for.
    """
    _taken(name, value, hint)


@cache
def _declared(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _taken(name: str, value: Any, hint: Any) -> Any:
    """The value as it is kept."""
    asked = _asked(hint)
    if any(fits(value) for fits in asked.fitting):
        return value
    if asked.lists and isinstance(value, list | tuple):
        return _taken_list(name, value, asked.lists[0])
    if asked.lists == (tuple[str, ...],) and isinstance(value, str):  # whoever asks for patterns knows what to say of a single one
        return value
    if asked.text and isinstance(value, PathLike):
        return fspath(value)
    raise ConfigError(f"{name}{_refusal(value, asked)}")


def _taken_list(name: str, value: list[Any] | tuple[Any, ...], hint: Any) -> tuple[Any, ...]:
    items = get_args(hint)
    each = items[:1] * len(value) if items[1:] == (...,) else items
    if len(value) != len(each):
        raise ConfigError(f"{name}={_shown(value)} has {len(value)} entries, and takes {len(each)}. Give as many.")
    taken = tuple(_taken(f"{name}[{at}]", item, kind) for at, (item, kind) in enumerate(zip(value, each, strict=True)))
    unchanged = isinstance(value, tuple) and all(new is old for new, old in zip(taken, value, strict=True))
    return value if unchanged else taken  # type: ignore[return-value]


# -------------------------------------------------------------------------------------------------------- what is asked for


class _Asked(NamedTuple):
    """What a hint asks for.

    Attributes:
        fitting: a value fits that one of these says yes to.
        choices: words that fit.
        lists: tuples that fit if their entries do.
        text: whether text fits.
        kinds: classes and Protocols that fit.
        names: what all of that is called.
    """

    fitting: tuple[Callable[[Any], bool], ...]
    choices: tuple[Any, ...]
    lists: tuple[Any, ...]
    text: bool
    kinds: tuple[type, ...]
    names: tuple[str, ...]


@cache
def _asked(hint: Any) -> _Asked:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = tuple(choice for member in members if get_origin(member) is Literal for choice in get_args(member))
    lists = tuple(member for member in members if get_origin(member) is tuple)
    kinds = tuple(get_origin(member) or member for member in members if _is_kind(member))
    plain = [_PLAIN[member] for member in members if member in _PLAIN]
    fitting = [fits for _, fits in plain]
    fitting += [_fitting(kind) for kind in kinds]
    if choices:
        fitting.append(lambda value: isinstance(value, str) and value in choices)
    if Any in members:
        fitting.append(lambda value: True)
    names = [name for name, _ in plain if name != "None"] + [f"{_article(kind.__name__)} {kind.__name__}" for kind in kinds]
    names += [f"one of {', '.join(map(repr, choices))}"] if choices else []
    names += ["a list"] if lists else []
    return _Asked(tuple(fitting), choices, lists, str in members, kinds, tuple(names))


def _is_kind(member: Any) -> bool:
    """Whether it is a class or a Protocol, with or without what it is generic in."""
    kind = get_origin(member) or member
    return isinstance(kind, type) and kind not in _PLAIN and kind not in (tuple, Any)


def _fitting(kind: type) -> Callable[[Any], bool]:
    if _is_protocol(kind):
        return lambda value: not isinstance(value, type) and not missing(value, kind)
    return lambda value: isinstance(value, kind)


def _is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def missing(value: Any, protocol: type) -> list[str]:
    """What a value lacks of a Protocol, by name."""
    # Of the class first: a property is not asked for its value.
    return [name for name in _members(protocol) if not hasattr(type(value), name) and not hasattr(value, name)]


@cache
def _members(protocol: type) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_own_members(protocol)))


def _own_members(protocol: type) -> Iterator[str]:
    for base in reversed(protocol.__mro__):
        if _is_protocol(base) and base.__module__ != "typing":
            yield from (name for name in [*get_annotations(base), *vars(base)] if not name.startswith("_"))


# ------------------------------------------------------------------------------------------------------------- what is said


def _refusal(value: Any, asked: _Asked) -> str:
    """What follows the name of what was given."""
    *others, last = asked.names or ("None",)
    wanted = f"{', '.join(others)} or {last}" if others else last
    if asked.choices and isinstance(value, str):
        return f"={value!r} is none of {', '.join(map(repr, asked.choices))}. Use one of them."
    if asked.lists and not isinstance(value, str):
        return f"={_shown(value)} is not a list. Give one, such as [{_shown(value)}]."
    if isinstance(value, str) and _is_number(value) and {"a whole number", "a number"} & {*asked.names}:
        return f"={value!r} is text, not {wanted}. Leave out the quotation marks."
    if isinstance(value, type):
        return f" is the class {value.__name__}, not {wanted}. {_advice(asked, value)}"
    if callable(value) and hasattr(value, "__name__"):
        return f" is the function {value.__name__}, not {wanted}. If it returns one, call it: {value.__name__}(...)."
    if isinstance(value, Real) or type(value).__module__ == "builtins":
        if len(asked.kinds) == len(asked.names) > 1 and not any(map(_is_protocol, asked.kinds)):
            return f"={_shown(value)} is none of {', '.join(map(_example, asked.kinds))}. Use one of them."
        return f"={_shown(value)} is not {wanted}. {_advice(asked)}"
    room = type(value).__module__.partition(".")[0]
    kind = type(value).__name__ if room in ("__main__", "atoll") else f"{type(value).__module__}.{type(value).__name__}"
    return f" is {_article(kind)} {kind}, not {wanted}{_lacking(value, asked)}. {_advice(asked)}"


def _lacking(value: Any, asked: _Asked) -> str:
    """What it would need to be what it comes closest to."""
    lacks = sorted((missing(value, kind) for kind in asked.kinds if _is_protocol(kind)), key=len)
    return f": it has no {', '.join(lacks[0])}" if lacks else ""


def _advice(asked: _Asked, given: type | None = None) -> str:
    """What to give instead; of a class that was given itself, one of these if that will do."""
    if given is not None and any(_makes(given, kind) for kind in asked.kinds):
        return f"Give one: {given.__name__}(...)."
    if len(asked.names) > len(asked.kinds):  # a number is known without an example
        return "Give one."
    unheard_of = [kind for kind in asked.kinds if _is_protocol(kind) and kind.__name__ not in _SUCH_AS]
    if unheard_of:
        return f"Give something that has {', '.join(_members(unheard_of[0]))}."
    return f"Give one, such as {' or '.join(map(_example, asked.kinds))}."


def _makes(given: type, kind: type) -> bool:
    return not missing(given, kind) if _is_protocol(kind) else issubclass(given, kind)


def _example(kind: type) -> str:
    named = f"atoll.{kind.__name__}" if kind.__name__ in dir(atoll) else kind.__name__  # torch has rules of the same names
    return _SUCH_AS.get(kind.__name__, f"{named}(...)")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _article(noun: str) -> str:
    spelt = noun[:2].isupper() and noun[0] in "FHLMNRSX"  # an MLP
    return "an" if spelt or noun[0] in "AEIOUaeiou" else "a"


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
