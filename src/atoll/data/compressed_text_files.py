"""Text and JSON files, plain or compressed (.xz, .gz, .zst). A damaged file raises DataError and is never read in part."""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, cast

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import DataError
from atoll.core.optional_imports import require
from atoll.core.verified_files import expanded

COMPRESSED_SUFFIXES = (".xz", ".gz", ".zst")
_CHUNK_BYTES = 1 << 20


def uncompressed_suffix(path: Path) -> str:
    """The suffix without that of a compression.

    >>> uncompressed_suffix(Path("a/train.jsonl.xz")), uncompressed_suffix(Path("a/train.txt"))
    ('.jsonl', '.txt')
    """
    return Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """The file, decompressed as it is read. Raises DataError if it cannot be read or is damaged."""
    try:
        with _open(path) as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, _DamagedFrame) as error:
        raise DataError(f"{path} is a damaged or cut-short {path.suffix} file ({error}). Copy it again from its source.") from error
    except OSError as error:
        raise DataError(f"could not read {path}: {error.strerror or error}. Check the path and its permissions.") from error


def read_text(path: Path) -> str:
    with open_file(path) as file:
        return decode_utf8(path, file.read())


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(_ChunkReader(_zstd_chunks(path)), _CHUNK_BYTES)
    return open(path, "rb")


class _DamagedFrame(Exception):
    pass


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """The contents of a .zst file of one or more frames. Unlike the library's own reader this refuses a truncated file."""
    zstandard: Any = require("zstandard", extra="zstd", purpose=".zst files")
    frame: Any = None
    compressed = b""
    with open(path, "rb") as file:
        while compressed := compressed or file.read(_CHUNK_BYTES):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise _DamagedFrame(str(error)) from error
            compressed = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise _DamagedFrame("it ends in the middle of a frame")


class _ChunkReader(io.RawIOBase):
    """A file of these chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._ready = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The value of each line that is not blank, with the number of the line from 1."""
    at = 0
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                advice = "A .jsonl file has one JSON object on each line."
                yield number, parse_json(decode_utf8(path, line, at), f"{path}:{number}", advice)
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


def decode_utf8(path: Path, data: bytes, at: int = 0) -> str:
    """The text of the bytes that begin at byte `at` of a file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {at + error.start} is 0x{data[error.start]:02x} ({error.reason}). "
            f"Convert it, or leave it out with a glob such as FOLDER/**/*.txt."
        ) from error


def find_files(path: str, suffixes: Sequence[str] = ()) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files of a path in order: one file, those in a folder, or those that a glob
    matches and those in folders that it matches. Folders are read recursively without hidden files. Of the files in folders only
    those with one of these suffixes count; none: all."""
    try:
        return _find_files(expanded(path), suffixes)
    except OSError as error:
        raise DataError(
            f"could not read {shown_text(path)}: {error.strerror or error}. Check the path and its permissions."
        ) from error


def _find_files(target: Path, suffixes: Sequence[str]) -> tuple[Path, list[Path]]:
    if target.is_file():
        _refuse_kernel_files([target])
        return target.parent, [target]
    root, matches = target, [target]
    if not target.is_dir():
        root = Path(*takewhile(lambda part: not glob.has_magic(part), target.parts[:-1]))
        matches = [Path(match) for match in glob.glob(str(target), recursive=True)]
    _refuse_kernel_files(matches)
    inside = {file for match in matches for file in match.rglob("*") if not suffixes or uncompressed_suffix(file) in suffixes}
    files = sorted(file for file in {*inside, *matches} if file.is_file())
    found = [file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    _refuse_kernel_files(found)
    return root, found


def _refuse_kernel_files(paths: Sequence[Path]) -> None:
    """Refuse files of /proc and /sys: some never end, and reading others has effects."""
    devices = {os.stat(folder).st_dev: folder for folder in ("/proc", "/sys") if os.path.isdir(folder)}
    devices.pop(os.stat("/").st_dev, None)
    for path in paths:
        with suppress(OSError):  # a path that does not exist is reported elsewhere
            if (folder := devices.get(path.stat().st_dev)) is not None:
                raise DataError(f"{path} belongs to {folder}, where the kernel shows its own state and not text. Give other files.")
