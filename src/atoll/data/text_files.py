"""Text files as a corpus: one file, a glob, or a folder.

Plain text is one document per file, or several where a line `<|endoftext|>` alone ends each. `.jsonl` has one document per line,
in a named field. Both may be compressed (.xz, .gz, .zst). A folder is read with all that is under it, except hidden files; its
sub-folders are the domains. For a glob the same holds from the last folder without a wildcard on.
"""

from __future__ import annotations

import glob
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from atoll.core.errors import DataError
from atoll.data.compressed_files import plain_suffix, reading
from atoll.data.documents import END_OF_TEXT, Corpus, Document

DEFAULT_FIELD = "text"


def files_corpus(given: str) -> Corpus:
    """The corpus of `PATH` or `PATH#field`, where PATH is a file, a glob or a folder."""
    path, _, field = _split_field(given)
    spec = f"files:{given}"
    root, paths = _find(path, spec)
    by_domain: dict[str, list[Path]] = defaultdict(list)
    for found in paths:
        by_domain[_domain(root, found)].append(found)
    read = partial(_read_all, root, field or DEFAULT_FIELD)
    return Corpus(spec=spec, domains={name: partial(read, name, by_domain[name]) for name in sorted(by_domain)})


def _split_field(given: str) -> tuple[str, str, str]:
    # A '#' may also be part of a file's name.
    return (given, "", "") if Path(given).exists() else given.partition("#")


def _find(path: str, spec: str) -> tuple[Path, list[Path]]:
    """The folder from which domains are counted, and the files in order of their paths."""
    place = Path(path).expanduser()
    if not path:
        raise DataError(f"{spec} names no file. Give a file, a glob or a folder: files:PATH.")
    if place.is_file():
        return place.parent, [place]
    if place.is_dir():
        root, paths = place, [found for found in place.rglob("*") if not _hidden(found.relative_to(place))]
    elif glob.has_magic(path):
        root = _fixed_part(place)
        matches = sorted(map(Path, glob.glob(str(place), recursive=True)))
        paths = [found for match in matches for found in ([match] if match.is_file() else match.rglob("*"))]
        paths = [found for found in paths if not _hidden(found.relative_to(root))]
    else:
        raise DataError(f"{spec}: there is no file or folder {place}. Check the path; it is taken from {Path.cwd()}.")
    files = sorted({found for found in paths if found.is_file()})
    if not files:
        raise DataError(f"{spec}: nothing was found there. Give a file, a folder with files in it, or a glob that matches some.")
    return root, files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _fixed_part(pattern: Path) -> Path:
    """The folders before the first wildcard."""
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _domain(root: Path, path: Path) -> str:
    inside = path.relative_to(root)
    return inside.parts[0] if len(inside.parts) > 1 else root.resolve().name


def _read_all(root: Path, field: str, domain: str, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        if plain_suffix(path) == ".jsonl":
            yield from _read_jsonl(path, name, domain, field)
        else:
            yield from _read_text(path, name, domain)


# ----------------------------------------------------------------------------------------------------------------- text


def _read_text(path: Path, name: str, domain: str) -> Iterator[Document]:
    """The documents of a text file: the first is named like the file, the others are numbered."""
    end, lines, number, at = END_OF_TEXT.encode(), list[bytes](), 0, 0
    with reading(path) as file:
        for line in file:
            if line.startswith(end) and line.strip() == end:
                yield _document(path, name, domain, lines, number, at)
                at += sum(map(len, lines)) + len(line)
                lines, number = [], number + 1
            else:
                lines.append(line)
        yield _document(path, name, domain, lines, number, at)


def _document(path: Path, name: str, domain: str, lines: list[bytes], number: int, at: int) -> Document:
    data = b"".join(lines)
    text = _decode(path, data, at)
    text = text.removeprefix("\ufeff") if at == 0 else text  # a byte-order mark is no text
    return Document(f"{name}#{number}" if number else name, domain, text)


def _decode(path: Path, data: bytes, at: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {at + error.start} is 0x{data[error.start]:02x} ({error.reason}). "
            f"Convert it, or leave it out with a glob such as files:FOLDER/**/*.txt."
        ) from error


# ---------------------------------------------------------------------------------------------------------------- jsonl


def _read_jsonl(path: Path, name: str, domain: str, field: str) -> Iterator[Document]:
    at = 0
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                record = _record(_decode(path, line, at), f"{path}:{number}")
                yield Document(f"{name}#{number}", domain, _field(record, field, f"{path}:{number}"))
            at += len(line)


def _record(line: str, where: str) -> dict[str, object]:
    try:
        record = json.loads(line.removeprefix("\ufeff"))
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). A .jsonl file has one JSON object on each line.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {type(record).__name__}, not an object. Each line needs a field with the text.")
    return record


def _field(record: dict[str, object], field: str, where: str) -> str:
    if field not in record:
        raise DataError(
            f"{where} has no field {field!r}; it has {', '.join(record) or 'none'}. Name the one with the text: PATH#field."
        )
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} holds {type(text).__name__}, not text. Name another one: PATH#field.")
    # JSON can spell half a surrogate pair, which no encoding can write.
    return text if text.isascii() else text.encode(errors="replace").decode()
