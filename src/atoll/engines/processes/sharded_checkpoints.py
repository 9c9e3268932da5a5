"""Checkpoints of several ranks: each rank writes the tensors that it holds, with torch.distributed.checkpoint, and any number of
ranks can read them.

The folder of a round is written as engines/checkpoints.py says. In it, meta.json has rank 0's accounting and the structure of each
part, `__0_0.distcp` the tensors of rank 0 and so on, and `.metadata`, torch's index, the file and position of each slice.

State that all islands share is written once. A tensor that islands hold in slices is one tensor on disk, and is cut again for the
ranks that read it. A rank's own state is stored under its rank. Machines without a common disk each write a copy of the shared
state and of the index, so that each can resume from its own disk.
"""

from __future__ import annotations

import base64
import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import leaves
from atoll.core.serialization import Packed, layout_to_json, pack, unpack
from atoll.engines.checkpoints import Checkpoint, CheckpointPart, Checkpoints, PartLoader, ShardSlice
from atoll.engines.processes.rank_context import RankContext

_INDEX = ".metadata"
Lengths = Mapping[str, Mapping[str, int]]
"""Numbers of elements of tensors, by part and path."""


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
        content = {**gathered[0][2], "structures": structures}
        tensors = self._tensors(parts, packed, [theirs for _, theirs, _ in gathered])
        if self._context.rank != self._writer:
            self._context.barrier()
            self._write(self._store.unfinished(round), tensors)
        else:
            with self._store.writing(round, content) as folder:
                self._context.barrier()
                self._write(folder, tensors)
                self._copy_index(folder, round)
        self._context.barrier()
        if self._separate_disks and self._context.is_rank_zero:
            self._context.store.delete_key(f"index/{round}")

    def _all_gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, which JSON can hold, in rank order."""
        return [json.loads(text) for text in self._context.all_ranks.all_gather_text(json.dumps(mine))]

    def _tensors(
        self, parts: Mapping[str, CheckpointPart], packed: Mapping[str, Packed], lengths: Sequence[Lengths]
    ) -> dict[str, Any]:
        """The tensors that this rank writes, by their names in torch's index. `lengths` are those of all ranks' tensors."""
        found: dict[str, Any] = {}
        for name, one in packed.items():
            cut = parts[name].cut
            trees = {node["tensor"] for node in _nodes(one.structure) if node["kind"] == "tree"}
            for path, tensor in one.tensors.items():
                written = tensor.detach()
                if cut is not None and path in trees:
                    written = Slice.of(written, *self._slice_range(name, path, cut, lengths))
                found[f"{self._name(name)}/{path}"] = written
        return found

    def _name(self, part: str) -> str:
        """The name of a part. Machines that do not see rank 0's files keep their own copy of the shared parts."""
        return f"{part}@{self._writer}" if self._writer and part.endswith("shared") else part

    def _slice_range(self, name: str, path: str, cut: ShardSlice, lengths: Sequence[Lengths]) -> tuple[int, int]:
        """Where this rank's slice starts, and the length of the whole tensor. Slices may be unequal: FSDP2 cuts rows."""
        context = self._context
        ranks = [context.island * context.devices_per_island + number for number in range(cut.count)]
        if cut.over == "islands":
            ranks = [number * context.devices_per_island + context.device for number in range(cut.count)]
        sizes = [lengths[rank][name][path] for rank in ranks]
        return sum(sizes[: cut.number]), sum(sizes)

    def _write(self, folder: Path, tensors: dict[str, Any]) -> None:
        try:
            save(tensors, checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
            raise CheckpointError(f"a checkpoint could not be written to {folder}: {error}") from error

    def _copy_index(self, folder: Path, round: int) -> None:
        """Copy the index, which torch writes on rank 0 alone, to machines with another disk."""
        if self._context.is_rank_zero and self._separate_disks:
            self._context.store.set(f"index/{round}", base64.b64encode((folder / _INDEX).read_bytes()).decode())
        elif not self._context.is_rank_zero and not (folder / _INDEX).exists():
            (folder / _INDEX).write_bytes(base64.b64decode(self._context.get(f"index/{round}", of=0)))

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
        checkpoint = self._store.at(max(common))
        if self._context.rank == self._writer:
            for name in checkpoint.files:
                self._store.verify(checkpoint, name)
        self._context.barrier()
        return checkpoint

    def loader(self, checkpoint: Checkpoint, parts: Mapping[str, CheckpointPart]) -> PartLoader:
        """A loader of a checkpoint's parts. `parts` are this rank's present ones, whose slices the loaded tensors are cut into."""
        index = FileSystemReader(str(checkpoint.path)).read_metadata().state_dict_metadata
        lengths = self._all_gather(_lengths({name: pack(part.value) for name, part in parts.items()}))
        return lambda name, like: self._load(checkpoint, index, lengths, name, like)

    def _load(
        self, checkpoint: Checkpoint, index: Mapping[str, Any], lengths: Sequence[Lengths], name: str, like: CheckpointPart
    ) -> Any:
        if name not in checkpoint.metadata["structures"]:
            return None
        structure = copy.deepcopy(checkpoint.metadata["structures"][name])
        here = f"{self._name(name)}/"
        prefix = here if any(key.startswith(here) for key in index) else f"{name}/"
        wanted: dict[str, Any] = {}
        known = {path.lstrip("."): leaf for path, leaf in leaves(like.value) if isinstance(leaf, Tree)}
        for node in _nodes(structure):
            key, path = prefix + node["tensor"], node["tensor"]
            entry = index.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{checkpoint.path} lacks the tensor {key!r}. Use an older checkpoint.")
            wanted[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            if like.cut is not None and node["kind"] == "tree":
                start, numel = self._slice_range(name, path, like.cut, lengths)
                if path not in known or numel != entry.size[0]:
                    raise CheckpointError(
                        f"{checkpoint.path}: {name}/{path} has {entry.size[0]} numbers, where this run has "
                        f"{numel if path in known else 'none'}: it is the checkpoint of another run or version."
                    )
                mine = torch.empty(known[path].numel, dtype=entry.properties.dtype)
                wanted[key] = Slice.of(mine, start, numel)
                node["pieces"] = layout_to_json(known[path].layout)  # the slices of the present number of ranks
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads its own slices
                if wanted:
                    load(wanted, checkpoint_id=str(checkpoint.path), no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{checkpoint.path}: {name} cannot be read on rank {self._context.rank}: {error}. If machines do not share a disk, "
                f"copy the files of this checkpoint from all of them into one folder, or start the ranks on the machines of before."
            ) from error
        tensors = {key.removeprefix(prefix): one.flat if isinstance(one, Slice) else one for key, one in wanted.items()}
        return unpack(Packed(structure, tensors), like.value)


class Slice(Tensor):
    """A slice of a flat buffer for torch.distributed.checkpoint, which calls these methods to write and read a part of a tensor.
    Nothing is computed with it."""

    flat: Tensor
    _start: int
    _numel: int

    @staticmethod
    def of(flat: Tensor, start: int, numel: int) -> Slice:
        """The elements from `start` on of a tensor of `numel` elements."""
        this = flat.as_subclass(Slice)
        this.flat, this._start, this._numel = flat, start, numel
        return this

    def size(self) -> torch.Size:  # type: ignore[override]
        """The size of the whole tensor."""
        return torch.Size([self._numel])

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self._start]), sizes=torch.Size([self.flat.numel()]))

    def __create_write_items__(self, name: str, this: object) -> list[WriteItem]:
        if not self.flat.numel():  # its offset would be that of the next slice
            return []
        properties = TensorProperties.create_from_tensor(self.flat)
        data = TensorWriteData(chunk=self._chunk(), properties=properties, size=self.size())
        return [WriteItem(index=MetadataIndex(name, self._chunk().offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.flat.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.flat


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
