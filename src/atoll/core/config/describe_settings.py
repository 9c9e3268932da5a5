"""Settings: each field of a Run by its path, with its value and what may stand there."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from atoll.core.config.type_checks import hints_of, is_protocol, is_record, item_hints, joined, members_of, settable

Candidates = Mapping[Any, Sequence[type]]
"""Which dataclasses may stand where a Protocol, without type arguments, is asked for; else only the class that stands there now."""

Presets = Mapping[str, Mapping[str, Callable[[], Any]]]
"""Values that have names: for the path of a setting, what each name that may stand there makes."""

WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null"), None),
    **{sign + word: float(sign + word) for sign in ("", "+", "-") for word in ("inf", "nan")},
}
"""Words that are values and not text."""
NO_PRESETS: Presets = {}
NO_CANDIDATES: Candidates = {}


class Setting(NamedTuple):
    """One setting of a Run."""

    path: str  # by which `override` finds it
    value: Any
    kind: str  # the allowed values, in words
    about: str = ""  # what it does, in one sentence

    @property
    def text(self) -> str:
        """The value as `override` reads it. Of a dataclass only the name, since its fields are settings of their own."""
        return text_of(self.value)


def describe(run: Any, candidates: Candidates = NO_CANDIDATES, presets: Presets = NO_PRESETS) -> list[Setting]:
    """All settings, in order: a dataclass or tuple before what is in it. Given to `override` they make the same Run again."""
    settings = _inside(run, type(run), candidates, "")
    return [setting._replace(kind=" | ".join([setting.kind, *presets.get(setting.path, ())])) for setting in settings]


def _inside(value: Any, hint: Any, candidates: Candidates, at: str) -> Iterator[Setting]:
    """The settings inside the value at this path."""
    parts: list[tuple[str | int, Any, Any]] = []
    about: Mapping[str, str] = {}
    kind: Any = type(value)
    if is_record(value):
        parts = [(name, getattr(value, name), hints_of(kind)[name]) for name in settable(kind)]
        about = explanations(kind)
    elif isinstance(value, tuple) and any(map(is_record, value)):  # a tuple of numbers is one line, not one for each
        hints = item_hints(hint, len(value)) or [Any] * len(value)
        parts = [(i, item, hints[i]) for i, item in enumerate(value)]
    for name, item, inner in parts:
        said = about.get(str(name)) or (inspect.getdoc(type(item)) or "" if is_record(item) else "")
        yield Setting(joined(at, name), item, type_text(inner, candidates), first_sentence(said))
        yield from _inside(item, inner, candidates, joined(at, name))


@cache
def explanations(kind: type) -> Mapping[str, str]:
    """What the docstrings of a class and its bases say about each setting, under `Args:`."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", _arguments(base), re.MULTILINE):
            found = {**dict.fromkeys(names.split(", "), " ".join(text.split())), **found}
    return found


def _arguments(kind: type) -> str:
    return inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Args:\n")[2]


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("auto; bf16 for a forward pass. auto is bf16 where there is one (e.g. on CUDA).")
    'auto; bf16 for a forward pass'
    """
    return re.split(r"(?<=[.])(?<!e\.g\.)(?<!i\.e\.)\s+|\n\n", text, maxsplit=1)[0].replace("\n", " ").removesuffix(".")


def text_of(value: Any) -> str:
    if is_record(value):
        return type(value).__name__
    if isinstance(value, tuple):
        # Among brackets a keyword of Python would not be read as text.
        return f"[{', '.join(repr(item) if item in keyword.kwlist else text_of(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isidentifier() and value.islower() and value not in WORDS else repr(value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)


def type_text(hint: Any, candidates: Candidates) -> str:
    return " | ".join(dict.fromkeys(_member_text(member, candidates) for member in members_of(hint)))


def _member_text(member: Any, candidates: Candidates) -> str:
    origin, args = get_origin(member) or member, get_args(member)
    if origin is NoneType or member is Any:
        return "none" if origin is NoneType else "any value"
    if origin is Literal:
        return " | ".join(map(text_of, args))
    if origin is tuple:
        return f"[{', '.join('...' if item is Ellipsis else type_text(item, candidates) for item in args)}]"
    names = [kind.__name__ for kind in candidates.get(origin, ())] if is_protocol(origin) else []
    return " | ".join(names) or str(getattr(origin, "__name__", origin))
