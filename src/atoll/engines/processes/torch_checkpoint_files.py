"""Reads the files of torch.distributed.checkpoint, which sharded checkpoints of earlier versions consist of.

torch's index is a pickle, and torch unpickles it without restrictions. This reader builds the classes of torch's index and nothing
else, takes only files whose digests meta.json has, and compares every tensor with the index.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from atoll.core.errors import CheckpointError
from atoll.engines.checkpoints import Checkpoint

INDEX = ".metadata"
_CLASSES = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
}
"""What an index consists of, by module."""


class IndexUnpickler(pickle.Unpickler):
    """Refuses everything but the classes of torch's index, before it is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"it refers to {module}.{name}, which is no part of torch's index: the file is damaged or forged")
        return PurePath if module.startswith("pathlib") else super().find_class(module, name)


class TorchFiles:
    """The tensors of a checkpoint that torch.distributed.checkpoint wrote. `writer` is the first rank with this machine's disk."""

    def __init__(self, checkpoint: Checkpoint, writer: int) -> None:
        self._checkpoint, self._writer = checkpoint, writer
        path = checkpoint.path / INDEX
        try:
            found = IndexUnpickler(io.BytesIO(path.read_bytes())).load()
            self._tensors, self._places = _checked(found)
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{path} cannot be read: {error}. Use an older checkpoint, or start a new run.") from error

    def numel(self, part: str, path: str) -> int:
        _, entry = self._entry(part, path)
        return entry.size.numel()

    def whole(self, part: str, path: str) -> Tensor:
        """A tensor that one rank has written."""
        name, entry = self._entry(part, path)
        return self._read(name, [0] * len(entry.size), entry.size)

    def elements(self, part: str, path: str, start: int, stop: int) -> Tensor:
        """The elements of a flat tensor from `start` to `stop`, which several ranks may have written."""
        name, entry = self._entry(part, path)
        elements = torch.empty(stop - start, dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            first, end = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first < end:
                piece = self._read(name, chunk.offsets, chunk.sizes)
                elements[first - start : end - start] = piece[first - chunk.offsets[0] : end - chunk.offsets[0]]
                filled += end - first
        if filled != stop - start:
            raise CheckpointError(f"{self._checkpoint.path} has not all of {name!r}. Use an older checkpoint.")
        return elements

    def _entry(self, part: str, path: str) -> tuple[str, TensorStorageMetadata]:
        """The copy of this machine, if machines without a common disk have written one each."""
        for name in (f"{part}@{self._writer}/{path}", f"{part}/{path}"):
            if name in self._tensors:
                return name, self._tensors[name]
        raise CheckpointError(f"{self._checkpoint.path} lacks the tensor {f'{part}/{path}'!r}. Use an older checkpoint.")

    def _read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        place = self._places.get((name, tuple(offsets)))
        if place is None or place.relative_path not in self._checkpoint.files:
            raise CheckpointError(
                f"{self._checkpoint.path} has not all of {name!r}. If machines do not share a disk, start the ranks on the "
                f"machines of before."
            )
        path = self._checkpoint.path / place.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                tensor = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types
            raise CheckpointError(f"{path}: {name!r} cannot be read ({error}). Use an older checkpoint.") from error
        dtype = self._tensors[name].properties.dtype
        if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(sizes) or tensor.dtype != dtype:
            raise CheckpointError(f"{path}: {name!r} differs from its entry in {INDEX}. Use an older checkpoint.")
        return tensor


def _checked(found: Any) -> tuple[dict[str, TensorStorageMetadata], dict[tuple[str, tuple[int, ...]], _StorageInfo]]:
    """The tensors of an index, and where each piece of them lies."""
    assert isinstance(found, Metadata), f"it holds a {type(found).__name__}"
    tensors = {str(name): entry for name, entry in found.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    places = {}
    for at, place in found.storage_data.items():
        assert isinstance(at, MetadataIndex), f"it holds a {type(at).__name__}"
        assert isinstance(place, _StorageInfo), f"it holds a {type(place).__name__}"
        offset = tuple(at.offset) if at.offset is not None else (0,) * len(tensors[at.fqn].size) if at.fqn in tensors else ()
        places[at.fqn, offset] = place
    return tensors, places
