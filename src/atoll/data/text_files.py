"""Text and JSON files, plain or compressed (.xz, .gz, .zst), and the corpus of a file, a folder or a glob.

A plain text file is one document, or several that each end with a line `<|endoftext|>`. A `.jsonl` file has one document per line,
in a named field. A folder is read recursively without hidden files; its sub-folders are the domains. A glob is read in the same
way, from its last folder without a wildcard on. A damaged file raises DataError; it is never read as a shorter text.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from atoll.core.errors import DataError
from atoll.core.optional_imports import require
from atoll.data.documents import END_OF_TEXT, Corpus, Document

COMPRESSED_SUFFIXES = (".xz", ".gz", ".zst")
_CHUNK_BYTES = 1 << 20


# --------------------------------------------------------------------------------------------------------- decompression


def uncompressed_suffix(path: Path) -> str:
    """The suffix without that of a compression.

    >>> uncompressed_suffix(Path("a/train.jsonl.xz")), uncompressed_suffix(Path("a/train.txt"))
    ('.jsonl', '.txt')
    """
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """The file, decompressed as it is read. Raises DataError if it cannot be read or is damaged."""
    damaged: tuple[type[Exception], ...] = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, _DamagedFrame)
    try:
        with _open(path) as file:
            yield file
    except damaged as error:
        raise DataError(f"{path} is a damaged or cut-short {path.suffix} file ({error}). Copy it again from its source.") from error
    except OSError as error:
        raise DataError(f"could not read {path}: {error.strerror or error}. Check the path and its permissions.") from error


def read_bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path), _CHUNK_BYTES)
    return open(path, "rb")


class _DamagedFrame(Exception):
    pass


class _ZstdFile(io.RawIOBase):
    """A .zst file of one or more frames. Unlike the library's own reader it refuses a truncated file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._zstandard: Any = require("zstandard", extra="zstd", purpose=".zst files")
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._decompress():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> bool:
        """Decompress the next chunk; False at the end of the file."""
        self._compressed = self._compressed or self._file.read(_CHUNK_BYTES)
        if not self._compressed:
            if self._frame is not None:
                raise _DamagedFrame("it ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._compressed))
        except self._zstandard.ZstdError as error:
            raise _DamagedFrame(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


# ---------------------------------------------------------------------------------------------------------- JSON records


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The value of each line that is not blank, with the number of the line from 1."""
    at = 0
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                advice = "A .jsonl file has one JSON object on each line."
                yield number, parse_json(_decode(path, line, at), f"{path}:{number}", advice)
            at += len(line)


def parse_json(text: str, where: str, advice: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). {advice}") from error


def text_field(record: Mapping[str, Any], field: str, where: str, advice: str) -> str:
    """The text in a field of a record. Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes a question mark."""
    if field not in record:
        raise DataError(f"{where} has no field {field!r}; it has {', '.join(record) or 'none'}. {advice}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} holds {type(text).__name__}, not text. {advice}")
    return text if text.isascii() else text.encode(errors="replace").decode()


def _decode(path: Path, data: bytes, at: int) -> str:
    """The text of the bytes that begin at byte `at` of a file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {at + error.start} is 0x{data[error.start]:02x} ({error.reason}). "
            f"Convert it, or leave it out with a glob such as FOLDER/**/*.txt."
        ) from error


# ---------------------------------------------------------------------------------------------------------------- corpus


def files_corpus(given: str) -> Corpus:
    """The corpus of `PATH` or `PATH#field`, where PATH is a file, a glob or a folder."""
    # A '#' may also be part of a file's name.
    path, _, field = (given, "", "") if Path(given).exists() else given.partition("#")
    spec = f"files:{given}"
    root, paths = _find_files(path, spec)
    by_domain: dict[str, list[Path]] = defaultdict(list)
    for found in paths:
        inside = found.relative_to(root)
        by_domain[inside.parts[0] if len(inside.parts) > 1 else root.resolve().name].append(found)
    read = partial(_read_documents, root, field or "text")
    return Corpus(spec=spec, domains={name: partial(read, name, by_domain[name]) for name in sorted(by_domain)})


def visible_files(folder: Path) -> list[Path]:
    """The files under a folder, except hidden ones and those in hidden folders."""
    return [path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder))]


def _find_files(path: str, spec: str) -> tuple[Path, list[Path]]:
    """The folder whose sub-folders are domains, and the files in the order of their paths."""
    target = Path(path).expanduser()
    if not path:
        raise DataError(f"{spec} names no file. Give a file, a glob or a folder: files:PATH.")
    if target.is_file():
        return target.parent, [target]
    if target.is_dir():
        root, paths = target, visible_files(target)
    elif glob.has_magic(path):
        root = _without_wildcards(target)
        matches = sorted(map(Path, glob.glob(str(target), recursive=True)))
        paths = [found for match in matches for found in ([match] if match.is_file() else match.rglob("*"))]
        paths = [found for found in paths if found.is_file() and not _is_hidden(found.relative_to(root))]
    else:
        raise DataError(f"{spec}: there is no file or folder {target}. Check the path; it is relative to {Path.cwd()}.")
    if not paths:
        raise DataError(f"{spec}: nothing was found there. Give a file, a folder with files in it, or a glob that matches some.")
    return root, sorted(set(paths))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _without_wildcards(pattern: Path) -> Path:
    """The folders before the first wildcard."""
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _read_documents(root: Path, field: str, domain: str, paths: list[Path]) -> Iterator[Document]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        if uncompressed_suffix(path) == ".jsonl":
            yield from _read_jsonl(path, name, domain, field)
        else:
            yield from _read_text(path, name, domain)


def _read_jsonl(path: Path, name: str, domain: str, field: str) -> Iterator[Document]:
    for number, record in read_json_lines(path):
        where = f"{path}:{number}"
        if not isinstance(record, dict):
            raise DataError(f"{where} is a JSON {type(record).__name__}, not an object. Each line needs a field with the text.")
        yield Document(f"{name}#{number}", domain, text_field(record, field, where, "Name the field with the text: PATH#field."))


def _read_text(path: Path, name: str, domain: str) -> Iterator[Document]:
    """The documents of a text file. The first has the name of the file, the others have a number besides."""
    end, lines, number, at = END_OF_TEXT.encode(), list[bytes](), 0, 0

    def document() -> Document:
        text = _decode(path, b"".join(lines), at)
        text = text.removeprefix("\ufeff") if at == 0 else text  # a byte-order mark is no text
        return Document(f"{name}#{number}" if number else name, domain, text)

    with open_file(path) as file:
        for line in file:
            if line.startswith(end) and line.strip() == end:
                yield document()
                at += sum(map(len, lines)) + len(line)
                lines, number = [], number + 1
            else:
                lines.append(line)
        yield document()
