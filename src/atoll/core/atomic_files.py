"""Files that appear whole or not at all: a crash, a kill or a full disk leaves what was there before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from atoll.core.errors import AtollError


@contextmanager
def replacing(path: Path, error: type[AtollError]) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when it is complete and on the disk, and is removed if it fails.

    Raises:
        error: it cannot be written. What was there is untouched.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as cause:
        raise error(
            f"could not write {path}: {cause.strerror or cause}. What was there before is untouched. "
            f"Make room there, or write to another folder."
        ) from cause
    finally:
        # After the rename there is nothing to remove. A removal that fails must not hide the first error.
        with suppress(OSError):
            unfinished.unlink()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can: some refuse, and the file itself is safe already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
