"""Checkpoints: what a run needs to go on, saved whole or not at all.

    checkpoints/
      00000012/                the round after which it was saved
        meta.json              format, round, sizes and digests of the files, and what the caller wants to know on resume
        shared.safetensors     one file per part; its structure is in the file's own metadata
        island-0.safetensors

A checkpoint is written into a hidden folder, put on the disk, and then renamed: under its own name it is complete. Older ones are
removed only when the new one stands, so a kill, a power cut or a full disk at any moment leaves the last one. What is damaged later
is noticed by its digest and refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.serialization import read_tensors, sync_folder, write_tensors
from atoll.core.state_packing import Packed, pack, unpack

FORMAT = 1
_META = "meta.json"
_SUFFIX = ".safetensors"
_SAVING, _REPLACED, _REMOVING = ".saving", ".replaced", ".removing"  # endings of the hidden folders


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on the disk.

    Attributes:
        path: its folder.
        round: the round after which it was saved.
        metadata: what the caller wanted to know.
        files: size in bytes and digest of each file, by name.
    """

    path: Path
    round: int
    metadata: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]

    @property
    def parts(self) -> list[str]:
        return [name.removesuffix(_SUFFIX) for name in self.files]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. One process at a time saves; others may read.

    Args:
        folder: where they are. Made when the first one is saved.
        keep: how many of the newest are kept.
    """

    folder: Path
    keep: int

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} checkpoints: at least 1 must be kept, or a run cannot be resumed. Use 1 or more.")

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        round: int,
        parts: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        before_it_counts: Callable[[], object] = lambda: None,
    ) -> Path:
        """Save what `pack` can pack, part by part, then remove the oldest checkpoints. Returns the folder.

        A checkpoint of the same round is replaced.

        Args:
            round: after which it is saved.
            parts: by name.
            metadata: what the caller wants to know on resume.
            before_it_counts: see `writing`.

        Raises:
            CheckpointError: it could not be written. The older ones are untouched.
        """
        for name in parts:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"a part cannot be called {name!r}: it is a file's name. Use letters, digits, '_', '-' and '.'.")
        packed = {name: pack(value) for name, value in parts.items()}
        with self.writing(round, metadata or {}, before_it_counts) as folder:
            for part, (structure, tensors) in packed.items():
                write_tensors(folder / f"{part}{_SUFFIX}", tensors, {"structure": json.dumps(structure, allow_nan=False)})
        return self._path(round)

    @contextmanager
    def writing(
        self, round: int, metadata: Mapping[str, Any], before_it_counts: Callable[[], object] = lambda: None
    ) -> Iterator[Path]:
        """A new folder to write a checkpoint's files into. When they are there, it is sealed and put in its place, and the oldest
        are removed; if they are not, it is removed itself.

        Args:
            round: after which it is saved.
            metadata: what the caller wants to know on resume.
            before_it_counts: called when it is complete, right before it is put in its place; what it raises leaves all as it was.

        Raises:
            CheckpointError: it could not be written. The older ones are untouched.
        """
        if not 0 <= round < 10**8:
            raise ValueError(f"round {round}: rounds are counted from 0 and have at most 8 digits.")
        target, saving = self._path(round), self.unfinished(round)
        with self._explained(round):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            try:
                saving.mkdir()
                yield saving
                _seal(saving, round, metadata)
                before_it_counts()
                self._put_in_place(saving, target)
            except BaseException:
                shutil.rmtree(saving, ignore_errors=True)
                raise
        self._prune(target)

    def unfinished(self, round: int) -> Path:
        """Where the checkpoint of this round lies as long as it is being written."""
        return _hidden(self._path(round), _SAVING)

    @contextmanager
    def _explained(self, round: int) -> Iterator[None]:
        """Says what stands and what to do where a checkpoint cannot be written."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            # A full disk is named by the first error in the chain; what wraps it speaks of one file only.
            cause = error if isinstance(error, OSError) else error.__cause__ or error
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
            rounds = self.rounds()
            stands = f"The checkpoint of round {rounds[-1]} is untouched" if rounds else "There is no older one"
            raise CheckpointError(
                f"the checkpoint of round {round} could not be written to {self.folder}: {reason} "
                f"({_free_bytes(self.folder)} bytes are free there). {stands}. Make room, then resume from the run's folder; "
                f"to save, the disk needs room for one checkpoint more than are kept ({self.keep})."
            ) from error

    def _put_in_place(self, saving: Path, target: Path) -> None:
        replaced = _hidden(target, _REPLACED)
        if target.exists():
            # A folder cannot be renamed onto another. Should we die between the two renames, the replaced one counts again.
            os.rename(target, replaced)
        os.rename(saving, target)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, saved: Path) -> None:
        """Keep the newest, and what was just saved even if the run went back to an older round."""
        found = self._folders()
        kept = sorted(found, key=lambda round: (found[round] == saved, round))[-self.keep :]
        self.remove(found.keys() - set(kept))

    def remove(self, rounds: Iterable[int]) -> None:
        """Remove the checkpoints of these rounds, where there are any."""
        found = self._folders()
        for round in found.keys() & set(rounds):
            removing = _hidden(self._path(round), _REMOVING)
            # Renamed first: a kill in the middle must not leave half a checkpoint under its name. What cannot go now goes later.
            with suppress(OSError):
                os.rename(found[round], removing)
                shutil.rmtree(removing)

    def _clean(self) -> None:
        """Remove what a killed save left, and put back a checkpoint whose replacement never came."""
        for round, path in self._folders().items():
            if path.suffix == _REPLACED:
                os.rename(path, self._path(round))
        for path in self.folder.glob(".*"):
            if path.suffix in (_SAVING, _REPLACED, _REMOVING):
                shutil.rmtree(path, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- reading

    @staticmethod
    def name(round: int) -> str:
        """What the checkpoint of this round is called."""
        return f"{round:08d}"

    def rounds(self) -> list[int]:
        """The rounds of which there is a checkpoint, oldest first."""
        return sorted(self._folders())

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, or none if nothing was saved yet. What a killed save left does not count.

        Raises:
            CheckpointError: it is damaged; says which file, and how to use an older one.
        """
        rounds = self.rounds()
        return self.at(rounds[-1]) if rounds else None

    def at(self, round: int) -> Checkpoint:
        """The checkpoint of this round.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path = self._folders().get(round)
        if path is None:
            raise CheckpointError(
                f"there is no checkpoint of round {round} in {self.folder}. There are: {self.rounds() or 'none'}. Use one of them."
            )
        checkpoint = self._read_meta(path, round)
        for name, (size_bytes, _) in checkpoint.files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size_bytes:
                why = "is missing" if found is None else f"has {found} bytes instead of {size_bytes}: it was cut short or changed"
                raise self._damaged(path / name, why, round)
        return checkpoint

    def load(
        self, checkpoint: Checkpoint, part: str, like: Any, *, check_layout: bool = True, device: torch.device | str | None = None
    ) -> Any:
        """A part of a checkpoint, checked against its digest. For `like` and the rest see `unpack`.

        Raises:
            CheckpointError: there is no such part, its file is damaged, or it is of another kind than `like`.
        """
        name = part + _SUFFIX
        if name not in checkpoint.files:
            raise CheckpointError(
                f"{checkpoint.path} has no part {part!r}. It has: {', '.join(checkpoint.parts)}. "
                f"It is the checkpoint of another run or version: resume with the settings it was saved with."
            )
        path = checkpoint.path / name
        self.verify(checkpoint, name)
        tensors, metadata = read_tensors(path)
        packed = Packed(json.loads(metadata["structure"]), tensors)
        try:
            return unpack(packed, like, check_layout=check_layout, device=device)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def verify(self, checkpoint: Checkpoint, name: str) -> None:
        """Check a file against its digest.

        Raises:
            CheckpointError: it was changed, or cannot be read.
        """
        path = checkpoint.path / name
        try:
            if _digest(path) != checkpoint.files[name][1]:
                raise self._damaged(path, "does not match its digest: some of its bits have changed", checkpoint.round)
        except OSError as error:
            raise self._damaged(path, f"cannot be read: {error.strerror}", checkpoint.round) from error

    def _folders(self) -> dict[int, Path]:
        """The folder of each round's checkpoint."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        # One that was about to be replaced counts as long as its replacement has not come: so it comes first and is overwritten.
        replaced = {int(name[1:9]): self.folder / name for name in names if re.fullmatch(rf"\.\d{{8}}\{_REPLACED}", name)}
        return replaced | {int(name): self.folder / name for name in names if re.fullmatch(r"\d{8}", name)}

    def _path(self, round: int) -> Path:
        return self.folder / self.name(round)

    def _read_meta(self, path: Path, round: int) -> Checkpoint:
        try:
            meta = json.loads((path / _META).read_text("utf-8"))
            content = meta["content"]
            intact = meta["blake2b"] == _hash(_canonical(content))
        except FileNotFoundError as error:
            raise self._damaged(path / _META, "is missing", round) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(path / _META, f"cannot be read ({error})", round) from error
        if not intact:
            raise self._damaged(path / _META, "does not match its digest: some of its bits have changed", round)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, and this version of atoll reads format {FORMAT}. "
                f"Resume with the version that saved it (see source.txt in the run's folder)."
            )
        files = {name: (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in content["files"].items()}
        return Checkpoint(path=path, round=content["round"], metadata=content["metadata"], files=files)

    def _damaged(self, file: Path, why: str, round: int) -> CheckpointError:
        older = [other for other in self.rounds() if other < round]
        advice = (
            f"There is an older one, of round {older[-1]}: to go on from it, remove the folder {file.parent} and resume again."
            if older
            else f"There is no older one: copy {file.name} from a backup, or start the run afresh in another folder."
        )
        return CheckpointError(f"the checkpoint of round {round} is damaged: {file} {why}. {advice}")


def check_origin(checkpoint: Checkpoint, origin: Mapping[str, str | None], who: object) -> None:
    """A checkpoint goes on only with the Run and the data that it comes from.

    Args:
        checkpoint: that is to be gone on from.
        origin: digests of the Run (`run`) and of the data (`data`), as they are now.
        who: has them now.
    """
    for what, found in (("run", "its settings"), ("data", "its data or how they are dealt out")):
        if checkpoint.metadata.get(what) != origin[what]:
            raise CheckpointError(
                f"{checkpoint.path} was saved by another run: {found} differ from what {who} has now. Bring back what it was saved "
                f"with, or start afresh in another folder."
            )


# ------------------------------------------------------------------------------------------------------------ on the disk


def _seal(folder: Path, round: int, metadata: Mapping[str, Any]) -> None:
    """Write down what a checkpoint consists of; on the disk when this returns."""
    files = {p.name: {"bytes": p.stat().st_size, "blake2b": _digest(p)} for p in sorted(folder.iterdir())}
    # Through JSON and back, so that the digest is that of what will be read: tuples are lists there, and keys text.
    content = json.loads(json.dumps({"format": FORMAT, "round": round, "files": files, "metadata": dict(metadata)}))
    with open(folder / _META, "x", encoding="utf-8") as file:
        json.dump({"blake2b": _hash(_canonical(content)), "content": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _hidden(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free
