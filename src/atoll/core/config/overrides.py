"""Overrides: settings that are changed on the command line, by their paths. A field's type says how its new value is read.

>>> from atoll.core.protocols import Work
>>> work = Work(shard=0, start=0, schedule=0, examples=512)
>>> override(work, ["start=20", "examples=1e3"])
Work(shard=0, start=20, schedule=0, examples=1000, pieces=1, before=0)

A value is a number, `true`, `none`, text (in quotes if it needs them), `[a, b]`, or `Name` and `Name(field=value)` for a dataclass
that may stand there. All changes to one dataclass are made at once, so that settings which are valid only together can be given
together, in any order. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_origin

from atoll.core.config import type_checks as tc
from atoll.core.config.describe_settings import NO_CANDIDATES, NO_PRESETS, WORDS, Candidates, Presets, describe, text_of, type_text
from atoll.core.errors import ConfigError

R = TypeVar("R")
_LONGEST_PATH, _LONGEST_VALUE = 256, 1 << 17
"""Characters. Linux passes no longer argument to a command, and no path of a setting is nearly as long."""
_SCALARS = (NoneType, bool, Literal, int, float, Path, str)  # in this order: text last, since everything is text


def override(run: R, assignments: Sequence[str], candidates: Candidates = NO_CANDIDATES, presets: Presets = NO_PRESETS) -> R:
    """The Run with these settings changed, each written `path=value`. If a path is given twice, the last one counts.

    ConfigError if a path does not exist, a value does not fit there, or a dataclass refuses the whole.
    """
    edit = reduce(_merge, (_assignment(text, run) for text in assignments), _Edit())
    changed: R = _Editor(candidates, [setting.path for setting in describe(run)], presets).apply(edit, run, type(run), "")
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
        if self.whole.isascii() and node.lineno == node.end_lineno == 1:  # `get_source_segment` splits all of the text each time
            return _Expr(self.whole[node.col_offset : node.end_col_offset], node, self.whole)
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
        return WORDS.get(self.text.lower(), value)


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
    if len(path) > _LONGEST_PATH or len(value) > _LONGEST_VALUE:
        raise ConfigError(
            f"{tc.shown_text(text)} has {len(path)} characters before '=' and {len(value)} behind it. Settings are given as "
            f"path=value, with at most {_LONGEST_PATH} and {_LONGEST_VALUE} characters. Shorten it."
        )
    if not equals:
        raise ConfigError(
            f"{tc.shown(text)} has no '='. Settings are given as path=value. Write for example {_example(path.strip(), run)}."
        )
    edit = _Edit(_parse(value.strip()))
    for part in reversed(path.strip().split(".")):
        edit = _Edit(None, {part: edit})
    return edit


def _example(path: str, run: Any) -> str:
    """How the setting at this path is given, or else one with a similar name."""
    now = {setting.path: setting.text for setting in describe(run)}
    near = difflib.get_close_matches(path, now, n=1)
    meant = path if path in now else near[0] if near else ""
    return f"{meant}={tc.shown_text(now[meant])}" if meant else "seed=1"


def _parse(text: str) -> _Expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in text that may not be meant as Python at all
            return _Expr(text, ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Expr(text, None, text)  # bare text, such as a file's name


@contextmanager
def _refusal_at(at: str) -> Iterator[None]:
    """Adds the path at which a dataclass refused its values: a run has more than one lr."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}" if at and not str(error).startswith(at) else str(error)) from error


@dataclass(frozen=True)
class _Editor:
    candidates: Candidates
    known: list[str]
    presets: Presets

    def apply(self, edit: _Edit, now: Any, hint: Any, at: str) -> Any:
        """The value at this path after the edit. `now` is MISSING where there is none yet."""
        expr, classes = edit.expr, self._classes(hint, now)
        if expr is None:
            return self._inside(edit, now, hint, at, classes)
        if expr.text in (named := self.presets.get(at, {})):
            return self._inside(_Edit(None, edit.inside), named[expr.text](), hint, at, classes)
        if (called := expr.called()) in classes:
            return self._construct(classes[str(called)], expr, edit, at)
        items = expr.items()
        if items is not None and tc.item_hints(hint, len(items)) is not None:
            given = _merge(_Edit(None, {str(i): _Edit(item) for i, item in enumerate(items)}), _Edit(None, edit.inside))
            return self._items(given, (MISSING,) * len(items), hint, at)
        value = next((v for member in _SCALARS if (v := _scalar(expr, member, hint)) is not MISSING), MISSING)
        if value is MISSING:
            raise ConfigError(self._not_allowed(expr, now, hint, at, classes))
        return self._inside(_Edit(None, edit.inside), value, hint, at, classes)

    def _inside(self, edit: _Edit, now: Any, hint: Any, at: str, classes: Mapping[str, type]) -> Any:
        if not edit.inside:
            return now
        if tc.is_record(now):
            values = self._values(edit, type(now), now, at)
            with _refusal_at(at):
                return replace(now, **values)
        if isinstance(now, tuple):
            return self._items(edit, now, hint, at)
        inner, what = next(iter(edit.inside)), "not set" if now is MISSING else tc.shown_text(text_of(now))
        example = next((f"{at}={n}({inner}=...)" for n, kind in classes.items() if inner in tc.settable(kind)), f"{at}=...")
        raise ConfigError(
            f"{at}.{tc.shown_text(inner)}: {at} is {what} now, which has nothing inside. Allowed there: "
            f"{type_text(hint, self.candidates)}. Give {at} as a whole, such as {example}."
        )

    def _construct(self, kind: type, expr: _Expr, edit: _Edit, at: str) -> Any:
        """A new dataclass from `Name(field=value)`, with what was given for its fields by later paths."""
        if isinstance(expr.node, ast.Call) and (expr.node.args or len(expr.keywords()) < len(expr.node.keywords)):
            raise ConfigError(
                f"{at}={tc.shown_text(expr.text)}: values need names. Write {kind.__name__}({', '.join(tc.settable(kind))}) with "
                f"name=value."
            )
        given = _merge(_Edit(None, {name: _Edit(part) for name, part in expr.keywords().items()}), _Edit(None, edit.inside))
        values = self._values(given, kind, None, at)
        missing = tc.missing_fields(kind, values)
        if missing:
            example = ", ".join(f"{name}=..." for name in missing)
            raise ConfigError(
                f"{at}={tc.shown_text(expr.text)}: {kind.__name__} needs {', '.join(missing)}. Write {kind.__name__}({example})."
            )
        with _refusal_at(at):
            return kind(**values)

    def _values(self, edit: _Edit, kind: type, now: Any, at: str) -> dict[str, Any]:
        """The edited fields of a dataclass of this kind, from the values in `now`; without `now`, from the defaults."""
        known, hints = tc.settable(kind), tc.hints_of(kind)
        for name, inner in edit.inside.items():
            if name not in known:
                raise ConfigError(self._unknown(".".join([tc.joined(at, name), *_rest(inner)]), kind, at))
        present = {n: tc.default_of(known[n]) if now is None else getattr(now, n) for n in edit.inside}
        return {n: self.apply(inner, present[n], hints[n], tc.joined(at, n)) for n, inner in edit.inside.items()}

    def _items(self, edit: _Edit, now: tuple[Any, ...], hint: Any, at: str) -> tuple[Any, ...]:
        items, hints = list(now), tc.item_hints(hint, len(now)) or [Any] * len(now)
        for key, inner in edit.inside.items():
            if not (key.isdecimal() and int(key) < len(items)):
                allowed = f"allowed are {at}.0 to {at}.{len(items) - 1}" if items else "it is empty"
                raise ConfigError(
                    f"{at}.{tc.shown_text(key)}: {at} has {len(items)} items: {allowed}. To change how many, give {at}=[...] whole."
                )
            items[int(key)] = self.apply(inner, items[int(key)], hints[int(key)], f"{at}.{key}")
        return tuple(items)

    def _classes(self, hint: Any, now: Any) -> dict[str, type]:
        """The dataclasses that may stand here, by name."""
        origins: list[Any] = [get_origin(member) or member for member in tc.members_of(hint)]
        found: list[type] = [type(now)] if tc.is_record(now) else []
        for origin in origins:
            if tc.is_protocol(origin):
                found += self.candidates.get(origin, ())
            elif isinstance(origin, type) and is_dataclass(origin):
                found.append(origin)
        return {kind.__name__: kind for kind in found}

    def _not_allowed(self, expr: _Expr, now: Any, hint: Any, at: str, classes: Mapping[str, type]) -> str:
        named = self.presets.get(at, {})
        near = difflib.get_close_matches(expr.called() or "", [*classes, *named], n=1)
        advice = (
            f"Did you mean {near[0]}?"
            if near
            else f"It is {tc.shown_text(text_of(now))} now."
            if now is not MISSING
            else "Correct the value."
        )
        allowed = " | ".join(dict.fromkeys([*type_text(hint, self.candidates).split(" | "), *classes, *named]))
        return f"{at}={tc.shown_text(expr.text)}: this value cannot stand here. Allowed: {allowed}. {advice}"

    def _unknown(self, path: str, kind: type, at: str) -> str:
        known = dict.fromkeys([*self.known, *(tc.joined(at, name) for name in tc.settable(kind))])
        same = [other for other in known if other.rpartition(".")[2] == path.rpartition(".")[2]]
        near = list(dict.fromkeys([*same[:3], *difflib.get_close_matches(path, known, n=3)]))
        hint = f"Near it: {', '.join(near)}" if near else f"It has: {', '.join(tc.settable(kind))}"
        return f"{tc.shown_text(path)}: {kind.__name__} has no such setting. {hint}. `atoll show` lists all settings."


def _scalar(expr: _Expr, kind: Any, hint: Any) -> Any:
    """The value as one of this kind, or MISSING if it is none or if the hint does not allow the kind."""
    value = expr.literal()
    if kind is Literal:
        options = tc.choices_of(hint)
        same = (o for o in options if (type(o) is type(value) and o == value) or (isinstance(o, str) and o == expr.text))
        return next(same, MISSING)
    if kind not in tc.members_of(hint) and Any not in tc.members_of(hint):
        return MISSING
    if kind in (NoneType, bool):
        return value if type(value) is kind else MISSING
    if kind is int:
        whole = isinstance(value, float) and value.is_integer()  # 1e6 is a usual way to write a count
        return int(value) if type(value) is int or whole else MISSING
    if kind is float:
        try:
            return float(value) if type(value) in (int, float) else MISSING
        except OverflowError:  # a whole number of hundreds of digits, which its record refuses
            return value
    text = value if isinstance(value, str) else expr.text
    return Path(text) if kind is Path else text


def _rest(edit: _Edit) -> list[str]:
    """The path from here to the first new value."""
    name = None if edit.expr is not None else next(iter(edit.inside), None)
    return [] if name is None else [name, *_rest(edit.inside[name])]
