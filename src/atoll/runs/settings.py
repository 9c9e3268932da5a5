"""Settings: a Run as plain data for a file, and as dotted paths for the command line.

A Run is a tree of frozen dataclasses. In a file each of them is a dictionary that names its class:

>>> from atoll.protocols import Work
>>> work = Work(shard=0, start=0, schedule=0, examples=512)
>>> to_json(work)
{'type': 'atoll.protocols.Work', 'shard': 0, 'start': 0, 'schedule': 0, 'examples': 512, 'pieces': 1}
>>> from_json(to_json(work)) == work
True

On the command line each field has a path, and its type says how its new value is read:

>>> override(work, ["start=20", "examples=1e3"])
Work(shard=0, start=20, schedule=0, examples=1000, pieces=1)
>>> override(work, ["exmples=1e3"])
Traceback (most recent call last):
atoll.errors.ConfigError: exmples: Work has no such setting. Near it: examples. ...

A value is a number, `true`, `none`, text (in quotes if it needs them), `[a, b]`, or `Name` and `Name(field=value)` for a dataclass
that may stand there. All changes to one dataclass are made at once, so that settings which are valid only together can be given
together, in any order. Nothing is ever evaluated as code, and a file cannot make us import anything.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import keyword
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from atoll.errors import ConfigError

Candidates = Callable[[Any], Sequence[type]]
"""Which dataclasses may stand where a Protocol is asked for. A generic Protocol is asked about without its arguments."""

R = TypeVar("R")


def no_candidates(_protocol: Any) -> Sequence[type]:
    """Only the class that stands there now may stand there."""
    return ()


# ----------------------------------------------------------------------------------------------------------- as plain data


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
        return [_to_json(item, _join(at, i)) for i, item in enumerate(value)]
    if _is_record(value) and "type" not in _settable(type(value)):
        return {"type": full_name(type(value)), **{n: _to_json(getattr(value, n), _join(at, n)) for n in _settable(type(value))}}
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
        return tuple(_from_json(item, _join(at, i)) for i, item in enumerate(node))
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
        return kind(**{key: _from_json(item, _join(at, key)) for key, item in given.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{here} cannot be made from {node}: {error}. Correct the file, or write it again with atoll.") from error


def _check_fields(kind: type, given: Iterable[str], here: str) -> None:
    known, given = _settable(kind), set(given)
    unknown, missing = sorted(given - known.keys()), [n for n, f in known.items() if n not in given and not _has_default(f)]
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


# ---------------------------------------------------------------------------------------------------------- as dotted paths


class Setting(NamedTuple):
    """One setting of a Run.

    Attributes:
        path: how `override` calls it.
        value: what it is now.
        kind: what may stand there, in words.
    """

    path: str
    value: Any
    kind: str

    @property
    def text(self) -> str:
        """The value as `override` reads it. Of a dataclass only the name, since its fields are settings of their own."""
        return _text(self.value)


def describe(run: Any, candidates: Candidates = no_candidates) -> list[Setting]:
    """All settings, in order: a dataclass or tuple before what is in it. Given to `override` they make the same Run again."""
    return list(_settings(run, candidates, ""))


def paths(run: Any) -> list[str]:
    """All dotted paths of this Run."""
    return [setting.path for setting in describe(run)]


def _settings(value: Any, candidates: Candidates, at: str) -> Iterator[Setting]:
    hints = _hints(type(value))
    for name in _settable(type(value)):
        yield from _setting(getattr(value, name), hints[name], candidates, _join(at, name))


def _setting(value: Any, hint: Any, candidates: Candidates, at: str) -> Iterator[Setting]:
    yield Setting(at, value, _type_text(hint, candidates))
    if _is_record(value):
        yield from _settings(value, candidates, at)
    elif isinstance(value, tuple) and any(map(_is_record, value)):  # a tuple of numbers is one line, not one for each
        for i, inner in enumerate(_item_hints(hint, len(value)) or [Any] * len(value)):
            yield from _setting(value[i], inner, candidates, _join(at, i))


def _text(value: Any) -> str:
    if _is_record(value):
        return type(value).__name__
    if isinstance(value, tuple):
        # Among brackets a keyword of Python would not be read as text.
        return f"[{', '.join(repr(item) if item in keyword.kwlist else _text(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isidentifier() and value.islower() and value not in _WORDS else repr(value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)


def _type_text(hint: Any, candidates: Candidates) -> str:
    return " | ".join(dict.fromkeys(_member_text(member, candidates) for member in _members(hint)))


def _member_text(member: Any, candidates: Candidates) -> str:
    origin, args = get_origin(member) or member, get_args(member)
    if origin is NoneType or member is Any:
        return "none" if origin is NoneType else "any value"
    if origin is Literal:
        return " | ".join(map(_text, args))
    if origin is tuple:
        return f"[{', '.join('...' if item is Ellipsis else _type_text(item, candidates) for item in args)}]"
    names = [kind.__name__ for kind in candidates(origin)] if _is_protocol(origin) else []
    return " | ".join(names) or str(getattr(origin, "__name__", origin))


# --------------------------------------------------------------------------------------------------------------- overrides


def override(run: R, assignments: Sequence[str], candidates: Candidates = no_candidates) -> R:
    """The Run with these settings changed, each written `path=value`. If a path is given twice, the last one counts.

    Raises:
        ConfigError: a path does not exist, a value does not fit there, or a dataclass refuses the whole.
    """
    edit = reduce(_merge, (_assignment(text, run) for text in assignments), _Edit())
    changed: R = _Editor(candidates, paths(run)).apply(edit, run, type(run), "")
    return changed


class _Expr(NamedTuple):
    """A value as it was written, and its syntax if it has the form of an expression, with all of the text that its positions count
    in. Nothing is evaluated."""

    text: str
    node: ast.expr | None
    whole: str

    def items(self) -> list[_Expr] | None:
        """The items of `[a, b]`, `(a, b)` or `a, b`; none of anything else."""
        return [self._part(item) for item in self.node.elts] if isinstance(self.node, ast.List | ast.Tuple) else None

    def keywords(self) -> dict[str, _Expr]:
        found = self.node.keywords if isinstance(self.node, ast.Call) else []
        return {argument.arg: self._part(argument.value) for argument in found if argument.arg}

    def _part(self, node: ast.expr) -> _Expr:
        return _Expr(ast.get_source_segment(self.whole, node) or "", node, self.whole)

    def called(self) -> str | None:
        """`Name` of `Name` or of `Name(field=value)`; else none."""
        node = self.node.func if isinstance(self.node, ast.Call) else self.node
        return node.id if isinstance(node, ast.Name) else None

    def literal(self) -> Any:
        """The number, text, bool or none that is written here, or MISSING."""
        try:
            value = ast.literal_eval(self.node) if self.node is not None else MISSING
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = MISSING
        return _WORDS.get(self.text.lower(), value)


_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null"), None),
    **{sign + word: float(sign + word) for sign in ("", "+", "-") for word in ("inf", "nan")},
}


@dataclass(frozen=True)
class _Edit:
    """What is to change at a path: a new value, and after it what is inside."""

    expr: _Expr | None = None
    inside: Mapping[str, _Edit] = field(default_factory=dict)


def _merge(base: _Edit, later: _Edit) -> _Edit:
    if later.expr is not None:
        return later
    return _Edit(base.expr, {**base.inside, **{n: _merge(base.inside.get(n, _Edit()), edit) for n, edit in later.inside.items()}})


def _assignment(text: str, run: Any) -> _Edit:
    path, equals, value = text.partition("=")
    if not equals:
        example = next((f"{s.path}={s.text}" for s in describe(run)), "seed=1")
        raise ConfigError(f"{text!r} has no '='. Settings are given as path=value. Write for example {example}.")
    edit = _Edit(_parse(value.strip()))
    for part in reversed(path.strip().split(".")):
        edit = _Edit(None, {part: edit})
    return edit


def _parse(text: str) -> _Expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in text that may not be meant as Python at all
            return _Expr(text, ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Expr(text, None, text)  # bare text, such as a file's name


@contextmanager
def _refusal_at(at: str) -> Iterator[None]:
    """Says where in the Run a dataclass refused its values: a run has more than one lr."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}" if at and not str(error).startswith(at) else str(error)) from error


@dataclass(frozen=True)
class _Editor:
    candidates: Candidates
    known: list[str]

    def apply(self, edit: _Edit, now: Any, hint: Any, at: str) -> Any:
        """The value at this path after the edit. `now` is MISSING where there is none yet."""
        expr, classes = edit.expr, self._classes(hint, now)
        if expr is None:
            return self._inside(edit, now, hint, at, classes)
        if (called := expr.called()) in classes:
            return self._construct(classes[str(called)], expr, edit, at)
        items = expr.items()
        if items is not None and _item_hints(hint, len(items)) is not None:
            given = _merge(_Edit(None, {str(i): _Edit(item) for i, item in enumerate(items)}), _Edit(None, edit.inside))
            return self._items(given, (MISSING,) * len(items), hint, at)
        value = next((v for member in _SCALARS if (v := _scalar(expr, member, hint)) is not MISSING), MISSING)
        if value is MISSING:
            raise ConfigError(self._not_allowed(expr, now, hint, at, classes))
        return self._inside(_Edit(None, edit.inside), value, hint, at, classes)

    def _inside(self, edit: _Edit, now: Any, hint: Any, at: str, classes: Mapping[str, type]) -> Any:
        if not edit.inside:
            return now
        if _is_record(now):
            values = self._values(edit, type(now), lambda f: getattr(now, f.name), at)
            with _refusal_at(at):
                return replace(now, **values)
        if isinstance(now, tuple):
            return self._items(edit, now, hint, at)
        inner, what = next(iter(edit.inside)), "not set" if now is MISSING else _text(now)
        example = next((f"{at}={n}({inner}=...)" for n, kind in classes.items() if inner in _settable(kind)), f"{at}=...")
        raise ConfigError(
            f"{at}.{inner}: {at} is {what} now, which has nothing inside. Allowed there: {_type_text(hint, self.candidates)}. "
            f"Give {at} as a whole, such as {example}."
        )

    def _construct(self, kind: type, expr: _Expr, edit: _Edit, at: str) -> Any:
        """A new dataclass from `Name(field=value)`, with what was given for its fields by later paths."""
        if isinstance(expr.node, ast.Call) and (expr.node.args or len(expr.keywords()) < len(expr.node.keywords)):
            raise ConfigError(
                f"{at}={expr.text}: values need names. Write {kind.__name__}({', '.join(_settable(kind))}) with name=value."
            )
        given = _merge(_Edit(None, {name: _Edit(part) for name, part in expr.keywords().items()}), _Edit(None, edit.inside))
        values = self._values(given, kind, _default, at)
        missing = [name for name, f in _settable(kind).items() if name not in values and not _has_default(f)]
        if missing:
            example = ", ".join(f"{name}=..." for name in missing)
            raise ConfigError(f"{at}={expr.text}: {kind.__name__} needs {', '.join(missing)}. Write {kind.__name__}({example}).")
        with _refusal_at(at):
            return kind(**values)

    def _values(self, edit: _Edit, kind: type, present: Callable[[Field[Any]], Any], at: str) -> dict[str, Any]:
        known, hints = _settable(kind), _hints(kind)
        for name, inner in edit.inside.items():
            if name not in known:
                raise ConfigError(self._unknown(".".join([_join(at, name), *_rest(inner)]), kind, at))
        return {n: self.apply(inner, present(known[n]), hints[n], _join(at, n)) for n, inner in edit.inside.items()}

    def _items(self, edit: _Edit, now: tuple[Any, ...], hint: Any, at: str) -> tuple[Any, ...]:
        items, hints = list(now), _item_hints(hint, len(now)) or [Any] * len(now)
        for key, inner in edit.inside.items():
            if not (key.isdecimal() and int(key) < len(items)):
                allowed = f"allowed are {at}.0 to {at}.{len(items) - 1}" if items else "it is empty"
                raise ConfigError(f"{at}.{key}: {at} has {len(items)} items: {allowed}. To change how many, give {at}=[...] whole.")
            items[int(key)] = self.apply(inner, items[int(key)], hints[int(key)], f"{at}.{key}")
        return tuple(items)

    def _classes(self, hint: Any, now: Any) -> dict[str, type]:
        """The dataclasses that may stand here, by name."""
        origins: list[Any] = [get_origin(member) or member for member in _members(hint)]
        found: list[type] = [type(now)] if _is_record(now) else []
        for origin in origins:
            if _is_protocol(origin):
                found += self.candidates(origin)
            elif isinstance(origin, type) and is_dataclass(origin):
                found.append(origin)
        return {kind.__name__: kind for kind in found}

    def _not_allowed(self, expr: _Expr, now: Any, hint: Any, at: str, classes: Mapping[str, type]) -> str:
        near = difflib.get_close_matches(expr.called() or "", classes, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"It is {_text(now)} now." if now is not MISSING else "Correct the value."
        allowed = " | ".join(dict.fromkeys([*_type_text(hint, self.candidates).split(" | "), *classes]))
        return f"{at}={expr.text}: this value cannot stand here. Allowed: {allowed}. {advice}"

    def _unknown(self, path: str, kind: type, at: str) -> str:
        known = dict.fromkeys([*self.known, *(_join(at, name) for name in _settable(kind))])
        same = [other for other in known if other.rpartition(".")[2] == path.rpartition(".")[2]]
        near = list(dict.fromkeys([*same[:3], *difflib.get_close_matches(path, known, n=3)]))
        hint = f"Near it: {', '.join(near)}" if near else f"It has: {', '.join(_settable(kind))}"
        return f"{path}: {kind.__name__} has no such setting. {hint}. `atoll show` lists all settings."


# ------------------------------------------------------------------------------------------------------- values and types

_SCALARS = (NoneType, bool, Literal, int, float, Path, str)  # in this order: text last, since everything is text


def _scalar(expr: _Expr, kind: Any, hint: Any) -> Any:
    """The value as one of this kind, or MISSING if it is none or if the hint does not allow the kind."""
    value = expr.literal()
    if kind is Literal:
        options = [option for member in _members(hint) if get_origin(member) is Literal for option in get_args(member)]
        same = (o for o in options if (type(o) is type(value) and o == value) or (isinstance(o, str) and o == expr.text))
        return next(same, MISSING)
    if kind not in _members(hint) and Any not in _members(hint):
        return MISSING
    if kind in (NoneType, bool):
        return value if type(value) is kind else MISSING
    if kind is int:
        whole = isinstance(value, float) and value.is_integer()  # 1e6 is a usual way to write a count
        return int(value) if type(value) is int or whole else MISSING
    if kind is float:
        return float(value) if type(value) in (int, float) else MISSING
    text = value if isinstance(value, str) else expr.text
    return Path(text) if kind is Path else text


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of anything else, itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(inner for member in get_args(hint) for inner in _members(member))
    return (hint,)


def _item_hints(hint: Any, length: int) -> list[Any] | None:
    """What the items of a tuple of this length may be, or none if the hint allows no such tuple."""
    for shape in (get_args(member) for member in _members(hint) if get_origin(member) is tuple):
        if Ellipsis in shape or len(shape) == length:
            return [shape[0]] * length if Ellipsis in shape else list(shape)
    return None


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of {kind.__name__}'s fields cannot be read: {error}. Settings are read by their types: "
            f"import what they name at run time, not under TYPE_CHECKING only."
        ) from error


def _settable(kind: type) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(kind) if f.init}


def _has_default(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _rest(edit: _Edit) -> list[str]:
    """The path from here to the first new value."""
    name = None if edit.expr is not None else next(iter(edit.inside), None)
    return [] if name is None else [name, *_rest(edit.inside[name])]


def _join(at: str, name: str | int) -> str:
    return f"{at}.{name}" if at else str(name)
