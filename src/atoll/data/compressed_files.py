"""Files as bytes, line by line, whether compressed or not. A damaged file is an error, never a shorter text."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from atoll.core.errors import DataError
from atoll.core.optional_imports import require

SUFFIXES = (".xz", ".gz", ".zst")
_CHUNK_BYTES = 1 << 20


def plain_suffix(path: Path) -> str:
    """The suffix without that of a compression.

    >>> plain_suffix(Path("a/train.jsonl.xz")), plain_suffix(Path("a/train.txt"))
    ('.jsonl', '.txt')
    """
    return Path(path.stem).suffix if path.suffix in SUFFIXES else path.suffix


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The file, opened and unpacked as it is read.

    Raises:
        DataError: it cannot be read, or is damaged or cut short.
    """
    damaged: tuple[type[Exception], ...] = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, _DamagedFrame)
    try:
        with _open(path) as file:
            yield file
    except damaged as error:
        raise DataError(f"{path} is a damaged or cut-short {path.suffix} file ({error}). Copy it again from its source.") from error
    except OSError as error:
        raise DataError(f"could not read {path}: {error.strerror or error}. Check the path and its permissions.") from error


def read_bytes(path: Path) -> bytes:
    """The whole file, unpacked."""
    with reading(path) as file:
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
    """A .zst file that does not unpack."""


class _ZstdFile(io.RawIOBase):
    """A .zst file of one or more frames. The library's own reader takes a file that was cut short for a complete one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._zstandard: Any = require("zstandard", extra="zstd", purpose=".zst files")
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unpack():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack some more; False at the end of the file."""
        self._packed = self._packed or self._file.read(_CHUNK_BYTES)
        if not self._packed:
            if self._frame is not None:
                raise _DamagedFrame("it ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._packed))
        except self._zstandard.ZstdError as error:
            raise _DamagedFrame(str(error)) from error
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
