"""Settings as a TOML file: what `atoll show --toml` writes and `atoll run FILE` reads.

A table is a dataclass, whose class `type` names. Text is read as `--set` reads it, so that "none" stands for no value. TOML has no
word for it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from atoll.core.config.describe_settings import WORDS, Setting, text_of
from atoll.core.config.type_checks import is_record, joined, shown_text
from atoll.core.errors import ConfigError, one_line

_BARE = re.compile(r"|[\w./~](?:[\w ./:@#*~+()-]*[\w./:@#*~+()-])?", re.ASCII)
"""Text that `--set` reads as itself where it is no number and no word."""
_LONGEST_BYTES = 1 << 20


def to_toml(settings: Sequence[Setting]) -> str:
    """The settings of `describe`, each with its explanation. `assignments` of it, given to `override`, make the same record."""
    return "\n".join(_lines(settings, "", [])).strip() + "\n"


def _lines(settings: Sequence[Setting], at: str, head: Sequence[str]) -> Iterator[str]:
    """The table at this path: TOML wants its own values before the tables inside it."""
    own = [one for one in settings if one.path.rpartition(".")[0] == at]
    plain = [one for one in own if not _is_table(one.value)]
    yield from head
    for one in plain:
        yield f"{one.path.rpartition('.')[2]} = {_value(one.value)}{f'  # {one.about}' if one.about else ''}"
    for one in own:
        if is_record(one.value):
            yield from _lines(settings, one.path, _head(f"[{_key(one.path)}]", one))
        elif _is_table(one.value):
            for index, item in enumerate(one.value):
                path = f"{one.path}.{index}"
                inside = one._replace(path=path, value=item)
                yield from _lines(settings, path, _head(f"[[{_key(one.path)}]]", inside))


def _head(brackets: str, table: Setting) -> list[str]:
    return ["", f"{brackets}{f'  # {table.about}' if table.about else ''}", f"type = {_quoted(text_of(table.value))}"]


def _key(path: str) -> str:
    """The path of a table; TOML does not number the tables of an array."""
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def _is_table(value: Any) -> bool:
    return is_record(value) or (isinstance(value, tuple) and bool(value) and all(map(is_record, value)))


def _value(value: Any) -> str:
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    text = "none" if value is None else str(value)
    return _quoted(text if value is None or _is_bare(text) else repr(text))


def _is_bare(text: str) -> bool:
    """Whether `--set` reads this text as itself.

    >>> [_is_bare(text) for text in ("127.0.0.1:0", "files:my text", "sqrt(k)/k", "none", "7", "[a]")]
    [True, True, True, False, False, False]
    """
    if not _BARE.fullmatch(text) or text.lower() in WORDS:
        return False
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return True
    return False


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_BYTES + 1)
        if len(content) > _LONGEST_BYTES:
            raise ValueError(f"it has more than {_LONGEST_BYTES} bytes")
        return tomllib.loads(content.decode())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}. Give a TOML file, such as `atoll show RECIPE --toml > {path}` writes."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as TOML ({one_line(error)}). Correct it, or begin with `atoll show RECIPE --toml`."
        ) from error


def assignments(table: Any, at: str = "") -> Iterator[str]:
    """The settings of a file as `override` takes them."""
    for name, value in table.items():
        path = joined(at, name)
        if isinstance(value, dict):
            yield from _record(value, path)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield f"{path}=[{', '.join(str(item.get('type')) for item in value)}]"
            for index, item in enumerate(value):
                yield from assignments({k: v for k, v in item.items() if k != "type"}, f"{path}.{index}")
        else:
            yield f"{path}={_text(value, path)}"


def _record(table: dict[str, Any], path: str) -> Iterator[str]:
    if "type" in table:
        yield f"{path}={_text(table['type'], path)}"
    yield from assignments({name: value for name, value in table.items() if name != "type"}, path)


def _text(value: Any, path: str, *, inside: bool = False) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_text(item, path, inside=True) for item in value)}]"
    if isinstance(value, dict | date | time):
        raise ConfigError(
            f"{path}={shown_text(str(value))}: a setting is a number, true, false, text, a list of these, or a table."
        )
    if isinstance(value, str):
        return repr(value) if inside and value.lower() not in WORDS and not value.startswith(("'", '"')) else value
    return str(value).lower() if isinstance(value, bool) else repr(value)
