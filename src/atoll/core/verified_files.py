"""Files that are written whole or not at all, and verified when they are read.

A JSON record has the digest of its content under the key `blake2b`, and digests.json in a folder has those of the folder's other
files. A safetensors file has its own (core/serialization.py). Records of older versions have no digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import AtollError, CheckpointError, ConfigError, one_line

T = TypeVar("T")
UNFINISHED = ".unfinished"
"""Ends the names of files that are being written."""


@contextmanager
def replacing(path: Path, error: type[AtollError]) -> Iterator[IO[bytes]]:
    """A file to write to. It replaces `path` when it is complete and on the disk. If it cannot be written, it is removed, the old
    file stays, and `error` is raised."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as cause:
        raise error(
            f"could not write {path}: {cause.strerror or cause}. The file that was there before is untouched. "
            f"Make room there, or write to another folder."
        ) from cause
    finally:
        # After the rename there is nothing to remove. A removal that fails must not hide the first error.
        with suppress(OSError):
            unfinished.unlink()
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to. It is renamed to `path` when the block ends, and removed if the block raises."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} is there already, and is not overwritten. Use another --out.")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror or error}. Make room there, or use another --out.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_text(path: Path, text: str, error: type[AtollError] = ConfigError) -> None:
    """Replace a text file in one step; see `replacing`."""
    with replacing(path, error) as file:
        file.write(text.encode())


def expanded(path: str | Path) -> Path:
    """The path with `~` replaced. ConfigError if there is no such user, or if the system cannot look the path up."""
    try:
        found = Path(path).expanduser()
        found.exists()
    except (RuntimeError, OSError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ConfigError(f"{shown_text(str(path))}: this path cannot be used ({why}). Give one that can be read here.") from error
    return found


def open_to_append(path: Path) -> IO[bytes]:
    """A file to append to. OSError if it is a symbolic link: what a process appends to would lie outside of its folder."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "a+b")


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can. Some refuse; the file itself is on the disk already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ----------------------------------------------------------------------------------------------------- digests and JSON records

blake2b = partial(hashlib.blake2b, digest_size=16)
_SEAL = "blake2b"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DEEPEST = 200
"""Levels of nesting in JSON that is read. Python's own limit would end a reader with a RecursionError."""
DIGESTS = "digests.json"


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, blake2b).hexdigest()


def json_digest(content: Any) -> str:
    """The digest of data as JSON."""
    return blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_json(text: str | bytes) -> Any:
    """The data of a JSON text. ValueError if it is none, or is nested too deeply."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from error
    level = [found]
    for _ in range(_DEEPEST):
        level = [inner for node in level for inner in _inside(node)]
        if not level:
            return found
    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _inside(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def write_record(path: Path, record: Mapping[str, Any], error: type[AtollError] = ConfigError) -> None:
    """Write a JSON object with the digest of its content, in one step; see `replacing`."""
    write_text(path, sealed(record), error)


def sealed(record: Mapping[str, Any]) -> str:
    """The text of a JSON object with the digest of its content."""
    content = json.loads(json.dumps(record))  # the digest is that of the content as it is read: tuples are lists there
    return json.dumps({_SEAL: json_digest(content), **content}, indent=2) + "\n"


def read_record(path: Path) -> dict[str, Any]:
    """The object that `write_record` wrote. OSError if there is none. ValueError if it is no JSON object, if it does not match its
    digest, or if the key of the digest was changed. An object without a digest, as older versions wrote it, is not verified."""
    return unsealed(path.read_bytes())


def unsealed(text: str | bytes) -> dict[str, Any]:
    """The object of this text; see `read_record`."""
    record = parse_json(text)
    if not isinstance(record, dict):
        raise ValueError(f"it holds a {type(record).__name__} and should hold an object")
    first, value = next(iter(record.items()), ("", None))
    if _SEAL not in record and isinstance(value, str) and _DIGEST.fullmatch(value):  # `sealed` writes the digest first
        raise ValueError(
            f"its first key is {first[:40]!r} and should be {_SEAL!r}: it was changed. To use it all the same, remove that key"
        )
    digest = record.pop(_SEAL, None)
    if digest is not None and digest != json_digest(record):
        raise ValueError(f"its content does not match its digest: it was changed. To use it all the same, remove {_SEAL!r} from it")
    return record


def read_kept(path: Path, parse: Callable[[dict[str, Any]], T], default: T, remedy: str) -> T:
    """What `parse` makes of the record that an earlier process of a run kept in this file; the default if it kept none. ConfigError
    if the file is damaged, with what the user can do about it."""
    try:
        return parse(read_record(path))
    except FileNotFoundError:
        return default
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({one_line(error)}). {remedy}") from error


def is_verified(path: Path) -> bool:
    """Whether a record that `read_record` reads has a digest."""
    return _SEAL in parse_json(path.read_bytes())


def write_digests(folder: Path, names: Iterable[str], *, result: str) -> None:
    """Write digests.json with the sizes and digests of these files of a finished folder, and which are missing. A safetensors file
    has its own digest. Without the file `result` the folder counts as not finished."""
    files: dict[str, Any] = {}
    for path in (folder / name for name in names):
        own = path.suffix == ".safetensors"
        entry = {"bytes": path.stat().st_size, **({} if own else {_SEAL: file_digest(path)})} if path.is_file() else None
        files[path.name] = entry
    write_record(folder / DIGESTS, {"result": result, "files": files}, CheckpointError)


def check_digests(folder: Path) -> bool:
    """Verify the files of a finished folder against its digests.json. Returns whether it has one. CheckpointError if a file was
    changed."""
    listed = folder / DIGESTS
    if not os.path.lexists(listed):
        return False
    remedy = f"Restore it from a copy; or remove {listed}, and {folder} is read without being verified."
    try:
        record = read_record(listed)
        files, result = record["files"], str(record["result"])
        expected = {str(name): entry and (entry["bytes"], entry.get(_SEAL)) for name, entry in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{listed} cannot be read ({one_line(error)}). {remedy}") from error
    if not os.path.lexists(folder / result):
        return False
    for path, entry in ((folder / name, entry) for name, entry in expected.items()):
        try:
            size = path.stat().st_size if path.is_file() else None
            digest = file_digest(path) if entry and entry[1] and size == entry[0] else None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
        if entry is None and size is not None:
            raise CheckpointError(f"{path} was not there when the run finished. Remove it.")
        if entry is not None and (size != entry[0] or (entry[1] and digest != entry[1])):
            found = (
                "is missing" if size is None else "was changed" if size == entry[0] else f"has {size} bytes instead of {entry[0]}"
            )
            raise CheckpointError(f"{path} {found} since the run finished: it does not match {listed.name}. {remedy}")
    return True
