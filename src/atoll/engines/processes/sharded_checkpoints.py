"""Checkpoints of several ranks: each rank writes the tensors that it holds, and any number of ranks can read them.

The folder of a round is written as engines/checkpoints.py says. In it, meta.json has rank 0's accounting, the structure of each
part, and the index: which ranks have written which elements of each tensor. `rank-0.safetensors` has the tensors of rank 0, and so
on. Nothing in the folder is executed: it is JSON and safetensors.

State that all islands share is written once. A tensor that islands hold in slices is one tensor in the index, and is cut again for
the ranks that read it. A rank's own state is stored under its rank. Machines without a common disk each write a copy of the shared
state and of the index, so that each can resume from its own disk.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import leaves
from atoll.core.serialization import Packed, layout_to_json, pack, unpack, write_tensors
from atoll.engines.checkpoints import Checkpoint, CheckpointPart, Checkpoints, PartLoader, ShardSlice, digests_of
from atoll.engines.processes.rank_context import RankContext
from atoll.engines.processes.torch_checkpoint_files import INDEX, TorchFiles

Lengths = Mapping[str, Mapping[str, int]]
"""Numbers of elements of tensors, by part and path."""


def rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


class ShardedCheckpoints:
    """The newest `keep` checkpoints of a run on several ranks, in a folder of this machine. All ranks call the same methods at the
    same time."""

    def __init__(self, folder: Path, keep: int, context: RankContext) -> None:
        self._store, self._context = Checkpoints(folder, keep), context
        folder.mkdir(parents=True, exist_ok=True)
        for remains in folder.glob(".seen-by-*"):  # of processes that were killed in this method
            remains.unlink(missing_ok=True)
        context.barrier()
        mark = folder / f".seen-by-{context.rank}"
        mark.touch()
        context.barrier()
        self._writer = min(int(path.name.rpartition("-")[2]) for path in folder.glob(".seen-by-*"))
        """The lowest rank that sees the same files as this one. It creates, seals and renames the folders."""
        self._separate_disks = any(writer for (writer,) in context.all_ranks.all_gather_numbers(float(self._writer)))
        """Whether some machines do not see rank 0's files."""
        mark.unlink()
        context.barrier()

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self, round: int, parts: Mapping[str, CheckpointPart], metadata: Mapping[str, Any]) -> None:
        """Save the parts of all ranks, with the metadata of rank 0."""
        packed = {name: pack(part.value) for name, part in parts.items()}
        gathered = self._all_gather([{name: one.structure for name, one in packed.items()}, _lengths(packed), dict(metadata)])
        structures = {name: structure for theirs, _, _ in reversed(gathered) for name, structure in theirs.items()}
        ranges = self._ranges(parts, packed, [theirs for _, theirs, _ in gathered])
        index, mine = _index(self._all_gather([self._writer, ranges]), self._context.rank)
        tensors = {f"{name}/{path}": tensor.detach() for name, one in packed.items() for path, tensor in one.tensors.items()}
        tensors = {name: tensors[name] for name in mine}
        content = {**gathered[0][2], "structures": structures, "index": index}
        if self._context.rank != self._writer:
            self._context.barrier()
            self._write(self._store.unfinished(round), tensors, content)
        else:
            with self._store.writing(round, content) as folder:
                self._context.barrier()
                self._write(folder, tensors, content)
        self._context.barrier()

    def _all_gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, which JSON can hold, in rank order."""
        return [json.loads(text) for text in self._context.all_ranks.all_gather_text(json.dumps(mine))]

    def _ranges(
        self, parts: Mapping[str, CheckpointPart], packed: Mapping[str, Packed], lengths: Sequence[Lengths]
    ) -> dict[str, tuple[int, int, int]]:
        """The elements that this rank holds of each tensor: where they start, their number, and that of the whole tensor. `lengths`
        are those of all ranks' tensors."""
        found: dict[str, tuple[int, int, int]] = {}
        for name, one in packed.items():
            cut = parts[name].cut
            trees = {node["tensor"] for node in _nodes(one.structure) if node["kind"] == "tree"}
            for path, tensor in one.tensors.items():
                start, whole = 0, tensor.numel()
                if cut is not None and path in trees:
                    start, whole = self._slice_range(name, path, cut, lengths)
                found[f"{name}/{path}"] = start, tensor.numel(), whole
        return found

    def _slice_range(self, name: str, path: str, cut: ShardSlice, lengths: Sequence[Lengths]) -> tuple[int, int]:
        """Where this rank's slice starts, and the length of the whole tensor. Slices may be unequal: FSDP2 cuts rows."""
        context = self._context
        ranks = [context.island * context.devices_per_island + number for number in range(cut.count)]
        if cut.over == "islands":
            ranks = [number * context.devices_per_island + context.device for number in range(cut.count)]
        sizes = [lengths[rank][name][path] for rank in ranks]
        return sum(sizes[: cut.number]), sum(sizes)

    def _write(self, folder: Path, tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
        """Write this rank's file. If one rank cannot, all of them fail. Machines without a common disk add the digests of all files
        to the content, so that a folder into which their files are copied can be verified."""
        error: Exception | None = None
        file, digests = folder / rank_file(self._context.rank), {}
        try:
            write_tensors(file, tensors)
            digests = digests_of([file]) if self._separate_disks else {}
        except Exception as caught:  # also what is no error of the disk, such as a tensor without data
            error = caught
        gathered = self._all_gather([repr(error) if error is not None else "", digests])
        failed = {rank: text for rank, (text, _) in enumerate(gathered) if text}
        if failed:
            ranks = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise CheckpointError(f"a checkpoint could not be written to {folder}: {ranks}") from error
        if self._separate_disks:
            content["all_files"] = {name: entry for _, theirs in gathered for name, entry in theirs.items()}

    # --------------------------------------------------------------------------------------------------------- reading

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that all machines have; none if there is none."""
        rounds = self._store.rounds()
        gathered = self._all_gather(rounds)
        common = set(gathered[0]).intersection(*gathered[1:])
        if not any(gathered):
            return None
        if not common:
            raise CheckpointError(
                f"ranks 0 to {self._context.size - 1} see checkpoints of rounds {', '.join(map(str, gathered))}, and none "
                f"that all of them see: machines without a common disk need the files that they wrote themselves. Restore them in "
                f"{self._store.folder}, or start a new run in another folder."
            )
        checkpoint = self._with_copied_files(self._store.at(max(common)))
        if self._context.rank == self._writer:
            for name in checkpoint.files:
                self._store.verify(checkpoint, name)
        self._context.barrier()
        return checkpoint

    def _with_copied_files(self, checkpoint: Checkpoint) -> Checkpoint:
        """With the files of other machines that were copied into its folder."""
        recorded = checkpoint.metadata.get("all_files", {}).items()
        copied = {name: (int(size), str(digest)) for name, (size, digest) in recorded if (checkpoint.path / name).is_file()}
        return replace(checkpoint, files={**copied, **checkpoint.files})

    def loader(self, checkpoint: Checkpoint, parts: Mapping[str, CheckpointPart]) -> PartLoader:
        """A loader of a checkpoint's parts. `parts` are this rank's present ones, whose slices the loaded tensors are cut into."""
        saved = TorchFiles(checkpoint, self._writer) if INDEX in checkpoint.files else RankFiles(checkpoint)
        lengths = self._all_gather(_lengths({name: pack(part.value) for name, part in parts.items()}))

        def load(name: str, like: CheckpointPart) -> Any:
            try:
                return self._load(checkpoint, saved, lengths, name, like)
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{checkpoint.path}: the record of {name} cannot be read ({error!r:.200}). Use an older checkpoint."
                ) from error

        return load

    def _load(
        self, checkpoint: Checkpoint, saved: RankFiles | TorchFiles, lengths: Sequence[Lengths], name: str, like: CheckpointPart
    ) -> Any:
        if name not in checkpoint.metadata["structures"]:
            return None
        structure = copy.deepcopy(checkpoint.metadata["structures"][name])
        known = {path.lstrip("."): leaf for path, leaf in leaves(like.value) if isinstance(leaf, Tree)}
        tensors: dict[str, Tensor] = {}
        for node in _nodes(structure):
            path = node["tensor"]
            if like.cut is None or node["kind"] != "tree":
                tensors[path] = saved.whole(name, path)
                continue
            start, numel = self._slice_range(name, path, like.cut, lengths) if path in known else (0, 0)
            if numel != saved.numel(name, path):
                raise CheckpointError(
                    f"{checkpoint.path}: {name}/{path} has {saved.numel(name, path)} numbers, where this run has "
                    f"{numel if path in known else 'none'}: it is the checkpoint of another run or version."
                )
            tensors[path] = saved.elements(name, path, start, start + known[path].numel)
            node["pieces"] = layout_to_json(known[path].layout)  # the slices of the present number of ranks
        return unpack(Packed(structure, tensors), like.value)


class RankFiles:
    """The tensors of a checkpoint, in the files of its ranks that this machine has."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._index = checkpoint.path, checkpoint.metadata["index"]
        self._files = {name for name in checkpoint.files if (checkpoint.path / name).is_file()}

    def numel(self, part: str, path: str) -> int:
        numel: int = self._entry(f"{part}/{path}")["numel"]
        return numel

    def whole(self, part: str, path: str) -> Tensor:
        """A tensor that one rank has written."""
        name = f"{part}/{path}"
        rank, _, _ = self._piece(name, None)
        return self._read(name, rank)

    def elements(self, part: str, path: str, start: int, stop: int) -> Tensor:
        """The elements of a flat tensor from `start` to `stop`, which several ranks may have written."""
        name, pieces = f"{part}/{path}", list[Tensor]()
        while start < stop or not pieces:
            rank, first, numel = self._piece(name, start if start < stop else None)
            end = min(stop, first + numel)
            piece = self._read(name, rank)
            if piece.shape != (numel,):
                raise CheckpointError(f"{self._folder}: {name!r} of rank {rank} has another size than its index says.")
            pieces.append(piece[start - first : end - first] if start < stop else piece[:0])
            start = max(start, end)
        if len({piece.dtype for piece in pieces}) > 1:
            raise CheckpointError(f"{self._folder}: ranks have written {name!r} in different dtypes. Use an older checkpoint.")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._index:
            raise CheckpointError(f"{self._folder} lacks the tensor {name!r}. Use an older checkpoint.")
        entry: Mapping[str, Any] = self._index[name]
        return entry

    def _piece(self, name: str, at: int | None) -> tuple[int, int, int]:
        """A rank that has written this element, or any, into a file that this machine has; where its elements start, and their
        number."""
        for rank, first, numel in self._entry(name)["pieces"]:
            if rank_file(rank) in self._files and (at is None or first <= at < first + numel):
                return rank, first, numel
        ranks = sorted({rank for rank, _, _ in self._entry(name)["pieces"]})
        raise CheckpointError(
            f"{self._folder} has not all of {name!r}, which ranks {ranks} have written. If machines do not share a disk, copy the "
            f"files of this checkpoint from all of them into one folder, or start the ranks on the machines of before."
        )

    def _read(self, name: str, rank: int) -> Tensor:
        """The elements that this rank has written. They are mapped from its file, and read when they are copied."""
        path = self._folder / rank_file(rank)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {name!r} cannot be read ({error}). Use an older checkpoint.") from error


def _index(gathered: Sequence[tuple[int, Mapping[str, Sequence[int]]]], rank: int) -> tuple[dict[str, Any], list[str]]:
    """Which ranks write which elements of each tensor, and the tensors that this rank writes. `gathered` has for each rank the
    writer of its disk and its ranges. Of ranks with the same disk and the same elements the first one writes them."""
    index: dict[str, Any] = {}
    written: set[tuple[int, str, int]] = set()
    mine = []
    for number, (writer, ranges) in enumerate(gathered):
        for name, (start, numel, whole) in ranges.items():
            entry = index.setdefault(name, {"numel": whole, "pieces": []})
            if (writer, name, start) in written or (whole and not numel):  # the offset of an empty slice is that of the next one
                continue
            written.add((writer, name, start))
            entry["pieces"].append([number, start, numel])
            if number == rank:
                mine.append(name)
    return index, mine


def _lengths(packed: Mapping[str, Packed]) -> Lengths:
    return {name: {path: tensor.numel() for path, tensor in one.tensors.items()} for name, one in packed.items()}


def _nodes(structure: Any) -> Iterator[dict[str, Any]]:
    """The nodes of a packed structure that refer to tensors."""
    if isinstance(structure, dict):
        if "tensor" in structure and structure.get("kind") in ("tree", "tensor"):
            yield structure
        else:
            for item in structure.values():
                yield from _nodes(item)
    elif isinstance(structure, list):
        for item in structure:
            yield from _nodes(item)
