"""Types of the fields of records: what a field may hold, and the refusal of values of another type. Records are dataclasses.

A frozen dataclass checks its fields against their declared types. A Protocol is checked by its members, since any object that has
them will do. Numbers and texts have limits too, so that no engine meets a number that a clock, a socket or a sum cannot hold. The
limits of a field are those of its type, unless an annotation declares others: `latency_s: Seconds`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from inspect import get_annotations
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from unicodedata import category

import atoll
from atoll.core.errors import ConfigError

_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
}
"""The name of each type in messages, and its test: a bool is no number, and numpy's numbers are numbers."""
_EXAMPLES = {
    "Rule": "atoll.AdamW(lr=4e-4) or atoll.Nesterov(lr=0.7)",
    "Correction": "atoll.Polynomial()",
    "Algorithm": "atoll.DiLoCo(inner_steps=50)",
    "AsyncAlgorithm": "atoll.AsyncLocalSGD(inner_steps=50)",
    "TrainsDevices": "atoll.DDP(), atoll.ZeRO1(), atoll.FSDP(), atoll.ACCO(), atoll.DPU() or atoll.WP()",
    "Run": "atoll.recipes.demo_diloco()",
    "Module": "torch.nn.Linear(2, 1)",
}
"""Examples of types that are not constructed by their own names."""
_SHOWN = 60
"""Characters of a value in a message."""
_LONGEST_TEXT = 4096
"""Characters of a text. Texts are names and paths, and no path of Linux is longer."""


class AtMost(NamedTuple):
    """The largest number that a field takes, in either direction. `of` says what it counts. Infinity is refused unless `or_inf`."""

    number: float
    of: str = ""
    or_inf: bool = False


COUNT, NUMBER = AtMost(10**9), AtMost(1e300)
"""The limits of whole numbers and of other numbers without an annotation. Infinity and NaN are left to the record's own checks
then, which know better advice."""
WideInt = Annotated[int, AtMost(2**53)]
"""Seeds, and bytes and examples of data sets."""
LayerSize = Annotated[int, AtMost(2**20)]
"""One side of a matrix of weights: the number of elements of the matrix fits into 64 bits."""
Seconds = Annotated[float, AtMost(366 * 86_400.0, " seconds (a year)")]
Bandwidth = Annotated[float, AtMost(1e12, " Mbit/s", or_inf=True)]
Timeout = Annotated[float, AtMost(1e6, " seconds (11 days)")]
"""Seconds that a process really waits: in milliseconds they fit into 31 bits, as sockets need."""
OrInfinite = Annotated[float, AtMost(NUMBER.number, or_inf=True)]
SecondsOrInfinite = Annotated[float, AtMost(366 * 86_400.0, " seconds (a year)", or_inf=True)]


def check_types(instance: Any) -> None:
    """Refuse fields whose values are not of their declared types. Lists are accepted for tuples, and paths for text."""
    kind: Any = type(instance)
    hints, limits = hints_of(kind), _limits_of(kind)
    for field in fields(instance):
        given = getattr(instance, field.name)
        converted = _convert(field.name, given, hints[field.name])
        _check_limits(field.name, converted, limits[field.name])
        if converted is not given:  # lists are not hashable
            object.__setattr__(instance, field.name, converted)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse an argument that is not of the type `hint`."""
    _convert(name, value, hint)


def check_positive(record: Any, *names: str, path: str = "") -> None:
    """Refuse fields of a record that are below 1. `path` precedes their names in the message."""
    for name in names:
        if getattr(record, name) < 1:
            raise ConfigError(f"{path}{name}={getattr(record, name)}: at least 1 is needed. Give a positive number.")


def _check_limits(name: str, value: Any, most: AtMost) -> None:
    """Refuse a number or a text beyond its limits, also in a list."""
    if isinstance(value, tuple):
        for at, item in enumerate(value):
            _check_limits(f"{name}[{at}]", item, most)
    elif isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, Integral) else float(value)
        if most is NUMBER and not abs(number) < math.inf:
            return
        if number != number or (abs(number) > most.number and not (most.or_inf and number == math.inf)):
            largest = f"{most.number:,.0f}" if most.number < 1e15 else f"{most.number:g}"
            bound = f"at least -{largest}" if number < 0 else f"at most {largest}"
            raise ConfigError(
                f"{name}={shown(value)}: it is {bound}{most.of}{', or inf' if most.or_inf else ''}. Give such a number."
            )


def _check_text(name: str, value: str) -> None:
    if len(value) > _LONGEST_TEXT:
        raise ConfigError(
            f"{name}={shown(value)} has {len(value)} characters, and a text has at most {_LONGEST_TEXT}. Give a shorter one."
        )
    odd = next((character for character in value if category(character) in ("Cc", "Cs")), None)
    if odd is not None:
        raise ConfigError(
            f"{name}={shown(value)} has the control character or half of a character {odd!a}, and names and paths have none. Leave "
            f"it out, or rename the file."
        )


@cache
def _limits_of(kind: type) -> Mapping[str, AtMost]:
    """The limits of a record's fields: those that it declares, or those of their types."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: next(_limits_in(hint), COUNT) for name, hint in hints.items()}


def _limits_in(hint: Any) -> Iterator[AtMost]:
    yield from (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, AtMost))
    for inner in get_args(hint):
        yield from _limits_in(inner)
    if hint in (float, Any):
        yield NUMBER


def _convert(name: str, value: Any, hint: Any) -> Any:
    """The value, converted where a list or path was given; an error if it does not fit."""
    expected = _expected(hint)
    if any(fits(value) for fits in expected.tests):
        return value
    if expected.lists and isinstance(value, list | tuple):
        kinds = item_hints(hint, len(value))
        if kinds is None:
            raise ConfigError(
                f"{name}={shown(value)} has {len(value)} entries, and takes {len(get_args(expected.lists[0]))}. Give as many."
            )
        converted = tuple(_convert(f"{name}[{at}]", value[at], kind) for at, kind in enumerate(kinds))
        unchanged = isinstance(value, tuple) and all(map(operator.is_, converted, value))
        return value if unchanged else converted
    if expected.lists == (tuple[str, ...],) and isinstance(value, str):  # its class reports a single pattern itself
        return value
    if "text" in expected.names and isinstance(value, PathLike):
        return fspath(value)
    raise ConfigError(f"{name}{_refusal(value, expected)}")


# ------------------------------------------------------------------------------------------------------------ accepted values


class _Expected(NamedTuple):
    """The values that a hint accepts."""

    tests: Sequence[Callable[[Any], bool]]  # a value fits if one of these returns true
    choices: tuple[Any, ...]  # words
    lists: tuple[Any, ...]  # tuples, if their entries fit
    kinds: tuple[type, ...]  # classes and Protocols
    names: Sequence[str]  # of all of these, for messages


@cache
def _expected(hint: Any) -> _Expected:
    members = members_of(hint)
    choices = choices_of(hint)
    lists = tuple(member for member in members if get_origin(member) is tuple)
    kinds = tuple(get_origin(member) or member for member in members if _is_class(member))
    plain = [_PLAIN[member] for member in members if member in _PLAIN]
    tests = [fits for _, fits in plain]
    tests += [partial(_is_instance, kind) for kind in kinds]
    if choices:
        tests.append(lambda value: isinstance(value, str) and value in choices)
    if Any in members:
        tests.append(lambda value: True)
    names = [name for name, _ in plain if name != "None"] + [f"{_article(kind.__name__)} {kind.__name__}" for kind in kinds]
    names += [f"one of {', '.join(map(repr, choices))}"] if choices else []
    names += ["a list"] if lists else []
    return _Expected(tests, choices, lists, kinds, names)


def _is_class(member: Any) -> bool:
    """Whether it is a class or a Protocol, with or without type arguments."""
    kind = get_origin(member) or member
    return isinstance(kind, type) and kind not in _PLAIN and kind not in (tuple, Any)


def _is_instance(kind: type, value: Any) -> bool:
    return not isinstance(value, type) and not missing(value, kind) if is_protocol(kind) else isinstance(value, kind)


def missing(value: Any, protocol: type) -> list[str]:
    """The members of a Protocol that a value lacks."""
    # The class is checked first, so that no property is computed.
    return [name for name in _members(protocol) if not hasattr(type(value), name) and not hasattr(value, name)]


def allows_class(hint: Any, kind: type) -> bool:
    """Whether instances of a dataclass may stand where the hint is, as far as the class tells: it is a subclass, or has the members
    of a Protocol."""
    expected, own = _expected(hint), {*dir(kind), *settable(kind)}
    return Any in members_of(hint) or any(
        own.issuperset(_members(known)) if is_protocol(known) else issubclass(kind, known) for known in expected.kinds
    )


@cache
def _members(protocol: type) -> list[str]:
    bases = [base for base in reversed(protocol.__mro__) if is_protocol(base) and base.__module__ != "typing"]
    names = dict.fromkeys(name for base in bases for name in [*get_annotations(base), *vars(base)])
    return [name for name in names if not name.startswith("_")]


# ------------------------------------------------------------------------------------------------------------------- messages


def _refusal(value: Any, expected: _Expected) -> str:
    """The message after the setting's name."""
    *others, last = expected.names or ["None"]
    wanted = f"{', '.join(others)} or {last}" if others else last
    if expected.choices and isinstance(value, str):
        return f"={shown(value)} is none of {', '.join(map(repr, expected.choices))}. Use one of them."
    if expected.lists and not isinstance(value, str):
        return f"={shown(value)} is not a list. Give one, such as [{shown(value)}]."
    if isinstance(value, str) and _is_number(value) and {"a whole number", "a number"} & {*expected.names}:
        return f"={shown(value)} is text, not {wanted}. Leave out the quotation marks."
    if isinstance(value, type):
        return f" is the class {value.__name__}, not {wanted}. {_advice(expected, value)}"
    if callable(value) and hasattr(value, "__name__"):
        return f" is the function {value.__name__}, not {wanted}. If it returns one, call it: {value.__name__}(...)."
    if isinstance(value, Real) or type(value).__module__ == "builtins":
        if len(expected.kinds) == len(expected.names) > 1 and not any(map(is_protocol, expected.kinds)):
            return f"={shown(value)} is none of {', '.join(map(_example, expected.kinds))}. Use one of them."
        return f"={shown(value)} is not {wanted}. {_advice(expected)}"
    package = type(value).__module__.partition(".")[0]
    kind = type(value).__name__ if package in ("__main__", "atoll") else f"{type(value).__module__}.{type(value).__name__}"
    nearest = min((missing(value, protocol) for protocol in expected.kinds if is_protocol(protocol)), key=len, default=[])
    lacks = f": it has no {', '.join(nearest)}" if nearest else ""
    return f" is {_article(kind)} {kind}, not {wanted}{lacks}. {_advice(expected)}"


def _advice(expected: _Expected, given: type | None = None) -> str:
    """What to give instead. If a class was given where its instance fits, an instance of it."""
    if given is not None and any(not missing(given, k) if is_protocol(k) else issubclass(given, k) for k in expected.kinds):
        return f"Give one: {given.__name__}(...)."
    if len(expected.names) > len(expected.kinds):  # a number needs no example
        return "Give one."
    unknown = [kind for kind in expected.kinds if is_protocol(kind) and kind.__name__ not in _EXAMPLES]
    if unknown:
        return f"Give something that has {', '.join(_members(unknown[0]))}."
    return f"Give one, such as {' or '.join(map(_example, expected.kinds))}."


def _example(kind: type) -> str:
    named = f"atoll.{kind.__name__}" if kind.__name__ in dir(atoll) else kind.__name__  # torch has optimizers of the same names
    return _EXAMPLES.get(kind.__name__, f"{named}(...)")


def shown(value: Any) -> str:
    """The value in a message, of bounded length and on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4300 digits
        return "a number of too many digits"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_text(text: str) -> str:
    """What a user has written, without quotation marks where it is short and printable."""
    return text if len(text) <= 4 * _SHOWN and text.isprintable() else shown(text)


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


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that its Literals allow."""
    return tuple(choice for member in members_of(hint) if get_origin(member) is Literal for choice in get_args(member))


def item_hints(hint: Any, length: int) -> list[Any] | None:
    """The types of the items of a tuple of this length; none if the hint allows no such tuple."""
    for shape in (get_args(member) for member in members_of(hint) if get_origin(member) is tuple):
        if Ellipsis in shape or len(shape) == length:
            return [shape[0]] * length if Ellipsis in shape else list(shape)
    return None


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of {kind.__name__}'s fields cannot be read: {error}. Settings are read by their types: "
            f"import what they name at run time, not under TYPE_CHECKING only."
        ) from error


def settable(kind: type) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(kind) if f.init}


def default_of(f: Field[Any]) -> Any:
    """MISSING if the field has none."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def missing_fields(kind: type, given: Collection[str]) -> list[str]:
    """The fields without a default that are not given."""
    return [name for name, f in settable(kind).items() if name not in given and f.default is f.default_factory is MISSING]


def is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def joined(at: str, name: str | int) -> str:
    return f"{at}.{name}" if at else str(name)
