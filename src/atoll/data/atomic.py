"""Files that appear whole or not at all: a crash, a kill or a full disk leaves what was there before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from atoll.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when it is complete and on the disk, and is removed if it fails."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise DataError(
            f"could not write {path}: {error.strerror or error}. What was there before is untouched. "
            f"Make room there, or write to another folder."
        ) from error
    finally:
        # After the rename there is nothing to remove. A removal that fails must not hide the first error.
        with suppress(OSError):
            unfinished.unlink()
    with suppress(OSError):  # some file systems refuse to sync a folder; the file itself is safe already
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
