"""Records: a prompt and an answer, or plain text, one JSON object each, from files on disk.

    {"text": "..."}                                          plain text: all of it is the answer
    {"prompt": "...", "completion": "..."}                   taken as they are, one after the other
    {"instruction": "...", "input": "...", "output": "..."}  Alpaca's; `input` may be empty or missing

Other fields are passed over. A record with the fields of two forms is of the more particular one, the last in this list.
A `.jsonl` file has one object on each line, a `.json` file one array of them. Both may be compressed (.xz, .gz, .zst).

>>> record_of({"instruction": "Name an atoll.", "output": "Bikini."}).prompt.splitlines()[-1]
'### Response:'
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import DataError
from atoll.data.compressed_files import plain_suffix, reading

_SUFFIXES = (".jsonl", ".json")
_FORMS = '{"text"}, {"prompt", "completion"} or {"instruction", "input", "output"}'


@dataclass(frozen=True, slots=True)
class Record:
    """What a model is shown and what it should say. A plain text has an empty prompt."""

    prompt: str
    answer: str


def read_records(path: str, setting: str = "data.path") -> Iterator[tuple[str, Record]]:
    """All records, each with the name of its file and its number in it, in the order of the files' paths.

    Args:
        path: a file, a glob, or a folder, which is read with all .jsonl and .json files under it except hidden ones.
        setting: what the path is called where it is set.

    Raises:
        DataError: there is nothing there, or something that is no record.
    """
    for name, file in _files(path, setting):
        for number, found in _objects(file):
            yield f"{name}#{number}", record_of(found, f"{file}, record {number}")


def record_of(found: Any, where: str = "the record") -> Record:
    """The record of a JSON object in one of the three forms."""
    if not isinstance(found, Mapping):
        raise DataError(f"{where} is a JSON {type(found).__name__}, not an object. Each record is one of {_FORMS}.")
    if {"instruction", "output"} <= found.keys():
        instruction, context = _text(found, "instruction", where), _text(found, "input", where) if found.get("input") else ""
        return Record(_alpaca(instruction, context), _text(found, "output", where))
    if {"prompt", "completion"} <= found.keys():
        return Record(_text(found, "prompt", where), _text(found, "completion", where))
    if "text" in found:
        return Record("", _text(found, "text", where))
    raise DataError(f"{where} has the fields {', '.join(found) or 'none'}. Each record is one of {_FORMS}. Rename the fields.")


def _alpaca(instruction: str, context: str) -> str:
    """The prompt with which Alpaca was trained, as in the `text` of its dataset."""
    task = "Below is an instruction that describes a task"
    paired = ", paired with an input that provides further context" if context else ""
    request = f"{task}{paired}. Write a response that appropriately completes the request."
    parts = [request, f"### Instruction:\n{instruction}", *([f"### Input:\n{context}"] if context else []), "### Response:\n"]
    return "\n\n".join(parts)


def _text(found: Mapping[str, Any], field: str, where: str) -> str:
    text = found[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} holds {type(text).__name__}, not text. Put it in quotes, or leave it out.")
    # JSON can spell half a surrogate pair, which no encoding can write.
    return text if text.isascii() else text.encode(errors="replace").decode()


# ---------------------------------------------------------------------------------------------------------------- files


def _files(path: str, setting: str) -> list[tuple[str, Path]]:
    """The files, each with a name that does not depend on where the whole lies."""
    place = Path(path).expanduser()
    if place.is_file():
        return [(place.name, place)]
    if place.is_dir():
        inside = [found for found in place.rglob("*") if not any(part.startswith(".") for part in found.relative_to(place).parts)]
        found = [(file.relative_to(place).as_posix(), file) for file in inside if plain_suffix(file) in _SUFFIXES]
    else:
        found = [(Path(match).name, Path(match)) for match in glob.glob(str(place), recursive=True)]
    found = sorted((name, file) for name, file in found if file.is_file())
    if not found:
        raise DataError(
            f"{setting}={path!r}: there is no {' or '.join(_SUFFIXES)} file (it is taken from {Path.cwd()}). Give a file, a folder "
            f"with such files, or a glob that matches some."
        )
    return found


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, counted from 1: by line, or in its array."""
    if plain_suffix(path) == ".json":
        yield from enumerate(_array(path), start=1)
        return
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, _parsed(line, f"{path}, line {number}", "A .jsonl file has one JSON object on each line.")


def _array(path: Path) -> list[Any]:
    with reading(path) as file:
        whole = _parsed(
            file.read(), str(path), "A .json file is one array of objects; with an object on each line, call it .jsonl."
        )
    if not isinstance(whole, list):
        raise DataError(
            f"{path} is a JSON {type(whole).__name__}, not an array. Give an array of records, or one per line in .jsonl."
        )
    return whole


def _parsed(data: bytes, where: str, advice: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error}). Convert it.") from error
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). {advice}") from error
