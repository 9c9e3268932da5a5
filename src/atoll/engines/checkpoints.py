"""Checkpoints of a run: written atomically, verified by digests, and removed when they are too old.

    checkpoints/
      00000012/                the round after which it was saved
        meta.json              format, round, sizes and digests of the files, and the caller's metadata
        shared.safetensors     one file per part, with its structure in the file's own metadata
        island-0.safetensors

A checkpoint is written into a hidden folder, synced to the disk, and then renamed. Under its own name it is therefore complete.
Older ones are removed after the rename, so a kill, a power cut or a full disk at any moment leaves a complete checkpoint. A file
that is damaged later does not match its digest and is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import CheckpointError, one_line
from atoll.core.serialization import Packed, pack, read_tensors, unpack, write_tensors
from atoll.core.verified_files import file_digest, json_digest, parse_json, sync_folder

FORMAT = 3
_META = "meta.json"
_SUFFIX = ".safetensors"
_SAVING, _REPLACED, _REMOVING = ".saving", ".replaced", ".removing"  # suffixes of hidden folders


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    round: int  # after which it was saved
    metadata: Mapping[str, Any]  # the caller's
    files: Mapping[str, tuple[int, str]]  # size in bytes and digest of each file, by name


@dataclass(frozen=True)
class ShardSlice:
    """Slice `number` of `count`, one on each island, or on each device of an island."""

    number: int
    count: int
    over: Literal["islands", "devices"]


class CheckpointPart(NamedTuple):
    """A part of a checkpoint. Trees in its value are slices if `cut` is given."""

    value: Any
    cut: ShardSlice | None = None


PartLoader = Callable[[str, CheckpointPart], Any]
"""Loads the value of a part, with the types of the given one; None if the checkpoint has no such part."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. One process at a time saves; others may read."""

    folder: Path  # created with the first checkpoint
    keep: int  # number of checkpoints that are kept, 1 or more

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        round: int,
        parts: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        before_rename: Callable[[], object] = lambda: None,
    ) -> Path:
        """Save values that `pack` can pack, by the names of their parts. A checkpoint of the same round is replaced. Returns the
        folder. See `writing` for `before_rename` and errors."""
        for name in parts:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"a part cannot be called {name!r}: it is a file's name. Use letters, digits, '_', '-' and '.'.")
        packed = {name: pack(value) for name, value in parts.items()}
        with self.writing(round, metadata or {}, before_rename) as folder:
            for part, (structure, tensors) in packed.items():
                structure_json = json.dumps(structure, allow_nan=False)
                # meta.json has the digest.
                write_tensors(folder / f"{part}{_SUFFIX}", tensors, {"structure": structure_json}, digest=False)
        return self._path(round)

    @contextmanager
    def writing(
        self, round: int, metadata: Mapping[str, Any], before_rename: Callable[[], object] = lambda: None
    ) -> Iterator[Path]:
        """A new folder for the files of a checkpoint. At the end of the context it is sealed and renamed to its place, and the
        oldest are removed. If the context fails, or `before_rename`, which is called when the checkpoint is complete, the folder is
        removed and the older checkpoints are untouched. Raises CheckpointError if it cannot be written."""
        if not 0 <= round < 10**8:
            raise ValueError(f"round {round}: a round is 0 or more, with at most 8 digits.")
        target, saving = self._path(round), self.unfinished(round)
        with self._write_errors(round):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            try:
                saving.mkdir()
                yield saving
                _seal(saving, round, metadata)
                before_rename()
                self._rename(saving, target)
            except BaseException:
                shutil.rmtree(saving, ignore_errors=True)
                raise
        self._prune(target)

    def unfinished(self, round: int) -> Path:
        """The folder of this round's checkpoint while it is being written."""
        return _hidden(self._path(round), _SAVING)

    @contextmanager
    def _write_errors(self, round: int) -> Iterator[None]:
        """Turns errors of writing into one that says which checkpoint is still valid and what to do."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            # The first error of the chain names a full disk. The error that wraps it names one file only.
            cause = error if isinstance(error, OSError) else error.__cause__ or error
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
            rounds = self.rounds()
            stands = f"The checkpoint of round {rounds[-1]} is untouched" if rounds else "There is no older one"
            raise CheckpointError(
                f"the checkpoint of round {round} could not be written to {self.folder}: {reason} "
                f"({_free_bytes(self.folder)} bytes are free there). {stands}. Free disk space, then resume the run's folder: "
                f"the disk needs space for one checkpoint more than the {self.keep} that are kept."
            ) from error

    def _rename(self, saving: Path, target: Path) -> None:
        replaced = _hidden(target, _REPLACED)
        if target.exists():
            # A folder cannot be renamed onto another. After a kill between the two renames, the replaced one is valid again.
            os.rename(target, replaced)
        os.rename(saving, target)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, saved: Path) -> None:
        """Keep the newest, and the one just saved even if the run went back to an older round."""
        found = self._folders()
        kept = sorted(found, key=lambda round: (found[round] == saved, round))[-self.keep :]
        self.remove(found.keys() - set(kept))

    def remove(self, rounds: Iterable[int]) -> None:
        """Remove the checkpoints of these rounds, if they exist."""
        found = self._folders()
        for round in found.keys() & set(rounds):
            removing = _hidden(self._path(round), _REMOVING)
            # Renamed first: a kill must not leave half a checkpoint under its name. `_clean` retries a removal that fails.
            with suppress(OSError):
                os.rename(found[round], removing)
                shutil.rmtree(removing)

    def _clean(self) -> None:
        """Remove the remains of a killed save, and restore a checkpoint whose replacement was not completed."""
        for round, path in self._folders().items():
            if path.suffix == _REPLACED:
                os.rename(path, self._path(round))
        for path in self.folder.glob(".*"):
            if path.suffix in (_SAVING, _REPLACED, _REMOVING):
                shutil.rmtree(path, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def name(round: int) -> str:
        return f"{round:08d}"

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, oldest first."""
        return sorted(self._folders())

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; none if there is none. See `at` for errors."""
        rounds = self.rounds()
        return self.at(rounds[-1]) if rounds else None

    def at(self, round: int) -> Checkpoint:
        """The checkpoint of this round. Raises CheckpointError if there is none, or if it is damaged: then it names the file, and
        how to use an older checkpoint."""
        path = self._folders().get(round)
        if path is None:
            raise CheckpointError(
                f"there is no checkpoint of round {round} in {self.folder}. There are: {self.rounds() or 'none'}. Use one of them."
            )
        checkpoint = self._read_meta(path, round)
        for name, (size_bytes, _) in checkpoint.files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size_bytes:
                why = "is missing" if found is None else f"has {found} bytes instead of {size_bytes}: it was truncated or changed"
                raise self._damaged(path / name, why, round)
        return checkpoint

    def load(self, checkpoint: Checkpoint, part: str, like: Any) -> Any:
        """A part of a checkpoint, checked against its digest. For `like` see `unpack`. Raises CheckpointError if there is no such
        part, if its file is damaged, or if it is of another kind than `like`."""
        name = part + _SUFFIX
        if name not in checkpoint.files:
            parts = ", ".join(file.removesuffix(_SUFFIX) for file in checkpoint.files)
            raise CheckpointError(
                f"{checkpoint.path} has no part {part!r}. It has: {parts}. "
                f"It is the checkpoint of another run or version: resume with the settings it was saved with."
            )
        path = checkpoint.path / name
        self.verify(checkpoint, name)
        tensors, metadata = read_tensors(path)
        try:
            return unpack(Packed(parse_json(metadata["structure"]), tensors), like)
        except (CheckpointError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    def verify(self, checkpoint: Checkpoint, name: str) -> None:
        """Check a file against its digest. Raises CheckpointError if it was changed, or cannot be read."""
        path = checkpoint.path / name
        try:
            if file_digest(path) != checkpoint.files[name][1]:
                raise self._damaged(path, "does not match its digest: some of its bits have changed", checkpoint.round)
        except OSError as error:
            raise self._damaged(path, f"cannot be read: {error.strerror}", checkpoint.round) from error

    def _folders(self) -> dict[int, Path]:
        """The folder of each round's checkpoint."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        # A replaced checkpoint is valid until its replacement has its name.
        replaced = {int(name[1:9]): self.folder / name for name in names if re.fullmatch(rf"\.\d{{8}}\{_REPLACED}", name)}
        return replaced | {int(name): self.folder / name for name in names if re.fullmatch(r"\d{8}", name)}

    def _path(self, round: int) -> Path:
        return self.folder / self.name(round)

    def _read_meta(self, path: Path, round: int) -> Checkpoint:
        try:
            meta = parse_json((path / _META).read_bytes())
            content = meta["content"]
            intact, format = meta["blake2b"] == json_digest(content), content["format"]
        except FileNotFoundError as error:
            raise self._damaged(path / _META, "is missing", round) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(path / _META, f"cannot be read ({one_line(error)})", round) from error
        if not intact:
            raise self._damaged(path / _META, "does not match its digest: some of its bits have changed", round)
        if format != FORMAT:
            raise CheckpointError(
                f"{path} has format {shown_text(str(format))}, and this version of atoll reads format {FORMAT}. "
                f"Resume with the version that saved it (see source.txt in the run's folder)."
            )
        try:
            files = {name: (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in content["files"].items()}
            return Checkpoint(path=path, round=content["round"], metadata=dict(content["metadata"]), files=files)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._damaged(path / _META, f"lacks what a checkpoint needs ({one_line(error)})", round) from error

    def _damaged(self, file: Path, why: str, round: int) -> CheckpointError:
        older = [other for other in self.rounds() if other < round]
        advice = (
            f"There is an older one, of round {older[-1]}: to resume from it, remove the folder {file.parent} and resume again."
            if older
            else f"There is no older one: copy {file.name} from a backup, or start a new run in another folder."
        )
        return CheckpointError(f"the checkpoint of round {round} is damaged: {file} {why}. {advice}")


def check_origin(checkpoint: Checkpoint, origin: Mapping[str, str | None], owner: object) -> None:
    """Refuse a checkpoint of another Run or other data. `origin` has the digests of the Run (`run`) and of the data (`data`) that
    `owner` has now."""
    for what, found in (("run", "its settings"), ("data", "its data or their partition")):
        if checkpoint.metadata.get(what) != origin[what]:
            raise CheckpointError(
                f"{checkpoint.path} was saved by another run: {found} differ from those that {owner} has now. Restore them, or "
                f"start a new run in another folder."
            )


# ------------------------------------------------------------------------------------------------------------ on the disk


def digests_of(files: Iterable[Path]) -> dict[str, tuple[int, str]]:
    """The size in bytes and the digest of each file, by name."""
    return {path.name: (path.stat().st_size, file_digest(path)) for path in files}


def _seal(folder: Path, round: int, metadata: Mapping[str, Any]) -> None:
    """Write meta.json with the digests of all files, and sync it to the disk."""
    files = {name: {"bytes": size, "blake2b": digest} for name, (size, digest) in digests_of(sorted(folder.iterdir())).items()}
    # Through JSON and back, so that the digest is that of the content as it is read: tuples become lists, and keys text.
    content = json.loads(json.dumps({"format": FORMAT, "round": round, "files": files, "metadata": dict(metadata)}))
    with open(folder / _META, "x", encoding="utf-8") as file:
        json.dump({"blake2b": json_digest(content), "content": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _hidden(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free
