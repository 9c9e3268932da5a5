"""Checkpoints of many processes: each writes what it holds, with torch.distributed.checkpoint, and any number of them can read it.

    checkpoints/
      00000012/            the round after which it was saved; written whole or not at all, as any other (see `checkpoint`)
        meta.json          sizes and digests of the files, the first rank's books, and the structure of each part
        __0_0.distcp       what rank 0 wrote; and so on
        .metadata          torch's own index: which slice of what lies where

What all islands share is written once; what they hold slices of is one whole on the disk, cut anew for whoever reads it. What is a
process's own goes by its rank. Machines that do not see each other's files write a copy of what is shared each, and the index, so
that each can go on from its own disk.
"""

from __future__ import annotations

import base64
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.core.errors import CheckpointError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.pytree import leaves
from atoll.core.serialization import Packed, layout_to_json, pack, unpack
from atoll.engines.checkpoints import Checkpoint, CheckpointPart, Checkpoints, PartLoader, ShardSlice
from atoll.engines.processes.collectives import LOST
from atoll.engines.processes.process_group import RankContext

_INDEX = ".metadata"
Lengths = Mapping[str, Mapping[str, int]]
"""Of tensors, by part and path."""


class ShardedCheckpoints:
    """The checkpoints of a run on many processes. All of them call the same methods at the same time.

    Args:
        folder: where they are, on this machine.
        keep: how many of the newest are kept.
        world: this process among all.
    """

    def __init__(self, folder: Path, keep: int, world: RankContext) -> None:
        self._kept, self._world = Checkpoints(folder, keep), world
        self._lead = self._find_lead(folder)
        self._apart = any(lead for (lead,) in world.all_ranks.all_gather_numbers(float(self._lead)))
        """Whether there are machines that do not see the first rank's files."""

    def _find_lead(self, folder: Path) -> int:
        """The lowest rank that sees the same files as this one: it looks after the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for left_behind in folder.glob(".seen-by-*"):  # by processes that were killed right here
            left_behind.unlink(missing_ok=True)
        self._world.barrier()
        mark = folder / f".seen-by-{self._world.rank}"
        mark.touch()
        self._world.barrier()
        lead = min(int(path.name.rpartition("-")[2]) for path in folder.glob(".seen-by-*"))
        self._world.barrier()
        mark.unlink()
        self._world.barrier()
        return lead

    # ---------------------------------------------------------------------------------------------------------- saving

    def save(self, round: int, parts: Mapping[str, CheckpointPart], metadata: Mapping[str, Any]) -> None:
        """Save what all processes hold. `metadata` is the first rank's."""
        packed = {name: pack(part.value) for name, part in parts.items()}
        told = self._told(({name: one.structure for name, one in packed.items()}, _lengths(packed), dict(metadata)))
        structures = {name: structure for theirs, _, _ in reversed(told) for name, structure in theirs.items()}
        content = {**told[0][2], "structures": structures}
        tensors = self._tensors(parts, packed, [theirs for _, theirs, _ in told])
        if self._world.rank != self._lead:
            self._world.barrier()
            self._write(self._kept.unfinished(round), tensors)
        else:
            with self._kept.writing(round, content) as folder:
                self._world.barrier()
                self._write(folder, tensors)
                self._spread_index(folder, round)
        self._world.barrier()
        if self._apart and self._world.is_rank_zero:
            self._world.delete(f"index/{round}")

    def _told(self, mine: Any) -> list[Any]:
        """Everybody's, in rank order."""
        told: list[Any] = [None] * self._world.size
        try:
            dist.all_gather_object(told, mine)
        except RuntimeError as error:
            raise ExchangeFailed(
                f"rank {self._world.rank} missed another while all told what their checkpoint holds: {LOST} for this limit. "
                f"What was saved before stands. ({error})"
            ) from error
        return told

    def _tensors(
        self, parts: Mapping[str, CheckpointPart], packed: Mapping[str, Packed], lengths: Sequence[Mapping[str, Mapping[str, int]]]
    ) -> dict[str, Any]:
        """What this process writes, by the names that torch's index has. `lengths` are those of everybody's tensors."""
        found: dict[str, Any] = {}
        for name, one in packed.items():
            cut = parts[name].cut
            sliced = _trees_of(one.structure) if cut is not None else set()
            for path, tensor in one.tensors.items():
                written: Any = tensor.detach()
                if cut is not None and path in sliced:
                    written = Slice.of(written, *self._place(name, path, cut, lengths))
                found[f"{self._name(name)}/{path}"] = written
        return found

    def _name(self, part: str) -> str:
        """Machines that do not see the first rank's files keep a copy of their own of what is shared."""
        return f"{part}@{self._lead}" if self._lead and part.endswith("shared") else part

    def _place(self, name: str, path: str, cut: ShardSlice, lengths: Sequence[Lengths]) -> tuple[int, int]:
        """Where this process's slice begins, and how long the whole is. Slices need not be equally long: FSDP2 cuts rows."""
        world = self._world
        ranks = [world.island * world.devices_per_island + number for number in range(cut.count)]
        if cut.over == "islands":
            ranks = [number * world.devices_per_island + world.device for number in range(cut.count)]
        all_of_them = [lengths[rank][name][path] for rank in ranks]
        return sum(all_of_them[: cut.number]), sum(all_of_them)

    def _write(self, folder: Path, tensors: dict[str, Any]) -> None:
        try:
            save(tensors, checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:  # torch wraps what any rank ran into, not as an Exception
            raise CheckpointError(f"a checkpoint could not be written to {folder}: {error}") from error

    def _spread_index(self, folder: Path, round: int) -> None:
        """torch has the first rank write the index. Other machines need it too."""
        if self._world.is_rank_zero and self._apart:
            self._world.set(f"index/{round}", base64.b64encode((folder / _INDEX).read_bytes()).decode())
        elif not self._world.is_rank_zero and not (folder / _INDEX).exists():
            (folder / _INDEX).write_bytes(base64.b64decode(self._world.get(f"index/{round}", of=0)))

    # --------------------------------------------------------------------------------------------------------- reading

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that all machines have; none if there is none."""
        rounds = self._kept.rounds()
        told = self._told(rounds)
        common = set(told[0]).intersection(*told[1:])
        if not any(told):
            return None
        if not common:
            raise CheckpointError(
                f"ranks 0 to {self._world.size - 1} see checkpoints of rounds {', '.join(map(str, told))}, and none that all of "
                f"them see: machines without a common disk need the files that they wrote themselves. Bring these back to "
                f"{self._kept.folder}, or start afresh in another folder."
            )
        checkpoint = self._kept.at(max(common))
        if self._world.rank == self._lead:
            for name in checkpoint.files:
                self._kept.verify(checkpoint, name)
        self._world.barrier()
        return checkpoint

    def loader(self, checkpoint: Checkpoint, parts: Mapping[str, CheckpointPart]) -> PartLoader:
        """Reads parts of a checkpoint. `parts` are such as this process has now: they tell how slices are cut."""
        index = FileSystemReader(str(checkpoint.path)).read_metadata().state_dict_metadata
        lengths = self._told(_lengths({name: pack(part.value) for name, part in parts.items()}))
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
                start, numel = self._place(name, path, like.cut, lengths)
                if path not in known or numel != entry.size[0]:
                    raise CheckpointError(
                        f"{checkpoint.path}: {name}/{path} has {entry.size[0]} numbers, where this run has "
                        f"{numel if path in known else 'none'}: it is the checkpoint of another run or version."
                    )
                mine = torch.empty(known[path].numel, dtype=entry.properties.dtype)
                wanted[key] = Slice.of(mine, start, numel)
                node["pieces"] = layout_to_json(known[path].layout)  # cut for so many as there are now
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads what it needs, by itself
                if wanted:
                    load(wanted, checkpoint_id=str(checkpoint.path), no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{checkpoint.path}: {name} cannot be read on rank {self._world.rank}: {error}. If machines do not share a disk, "
                f"put the files of this checkpoint from all of them into one folder, or start the processes where they were."
            ) from error
        tensors = {key.removeprefix(prefix): one.flat if isinstance(one, Slice) else one for key, one in wanted.items()}
        return unpack(Packed(structure, tensors), like.value)


class Slice(Tensor):
    """A slice of a flat buffer, in the words of torch.distributed.checkpoint: it asks tensors with these methods what to write, and
    where what it reads belongs. Nothing is computed with it."""

    flat: Tensor
    _start: int
    _numel: int

    @staticmethod
    def of(flat: Tensor, start: int, numel: int) -> Slice:
        """These are the elements from `start` on of so many."""
        this = flat.as_subclass(Slice)
        this.flat, this._start, this._numel = flat, start, numel
        return this

    def size(self) -> torch.Size:  # type: ignore[override]
        """Of the whole."""
        return torch.Size([self._numel])

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self._start]), sizes=torch.Size([self.flat.numel()]))

    def __create_write_items__(self, name: str, this: object) -> list[WriteItem]:
        if not self.flat.numel():  # it would go by the same place as the slice after it
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
    """The places of tensors in a packed structure."""
    if isinstance(structure, dict):
        if "tensor" in structure and structure.get("kind") in ("tree", "tensor"):
            yield structure
        else:
            for item in structure.values():
                yield from _nodes(item)
    elif isinstance(structure, list):
        for item in structure:
            yield from _nodes(item)


def _trees_of(structure: Any) -> set[str]:
    return {node["tensor"] for node in _nodes(structure) if node["kind"] == "tree"}
