"""Tensors in a file: the safetensors format, written whole or not at all.

A file appears under its name only when it is complete and on the disk, so that a crash, a kill or a full disk leaves the old file
in place. Any safetensors reader can open it. The metadata hold a Tree's order, its tensors' own dtypes and the pieces it holds.

The format is a length, a JSON header and the raw bytes. This module writes it itself: the library refuses tensors that share
memory, changes its arguments between versions, and hides the system's error. A Tree's views are written without a copy, and tensors
on another device pass through memory one at a time.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.core.errors import AtollError, CheckpointError
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout, Piece


@contextmanager
def replacing(path: Path, error: type[AtollError]) -> Iterator[IO[bytes]]:
    """A file to write to. It replaces `path` when it is complete and on the disk. If it cannot be written, it is removed, the old
    file stays, and `error` is raised."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
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


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can. Some refuse; the file itself is on the disk already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


LAYOUT = "atoll.layout"  # the metadata key of the layout

_CODES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT = 8  # of the data, for the widest dtype


# -------------------------------------------------------------------------------------------------------------- tensors


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write these tensors, replacing an old file in one step. CheckpointError if that fails: the old file stays."""
    path = Path(path)
    # Widest first, as the library does: then every tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(ordered, metadata or {})
    with replacing(path, CheckpointError) as file:
        file.write(header)
        for tensor in ordered.values():
            file.write(_bytes(tensor))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, by name, and its metadata.

    The tensors are memory-mapped; writing to one does not change the file. CheckpointError if there is no such file, or it is
    truncated or not a safetensors file.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            return tensors, dict(file.metadata() or {})
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}. Check the path, or start the run afresh.") from None
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}. A safetensors file is needed here.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Use an older one, or copy it again from its source."
        ) from error


# ---------------------------------------------------------------------------------------------------------------- Trees


def save_tree(path: str | Path, tree: Tree, metadata: Mapping[str, str] | None = None) -> None:
    """Write a Tree with its exact bits: each piece in the buffer's dtype, with the layout in the metadata."""
    metadata = metadata or {}
    if LAYOUT in metadata:
        raise ValueError(f"metadata may not have the key {LAYOUT!r}: the Tree's layout is written under it. Rename yours.")
    layout = json.dumps({"dtype": _name(tree.flat.dtype), "pieces": layout_to_json(tree.layout)})
    write_tensors(path, tree.layout.views(tree.flat), {**metadata, LAYOUT: layout})


def load_tree(path: str | Path) -> Tree:
    """The Tree that `save_tree` wrote, on the CPU: same names, order, shapes, dtypes, pieces and bits. CheckpointError if there is
    none."""
    tensors, metadata = read_tensors(path)
    if LAYOUT not in metadata:
        raise CheckpointError(f"{path} holds tensors but no Tree: its metadata has no {LAYOUT!r}. Read it with read_tensors.")
    try:
        record = json.loads(metadata[LAYOUT])
        layout, dtype = layout_from_json(record["pieces"]), _dtype(record["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has a layout that cannot be read ({error}). Use an older checkpoint.") from error
    for piece in layout.pieces:
        found = tensors.get(piece.name)
        if found is None or found.numel() != piece.count or found.dtype != dtype:
            raise CheckpointError(f"{path} and its layout disagree about {piece.name}. It was changed after it was saved.")
    flat = empty(layout.numel, dtype, torch.device("cpu"))
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return Tree(layout, flat)


def layout_to_json(layout: Layout) -> list[Any]:
    """A Layout as plain lists, for a header or a manifest."""
    return [[p.name, list(p.shape), _name(p.dtype), p.start, p.count] for p in layout.pieces]


def layout_from_json(pieces: list[Any]) -> Layout:
    """The Layout that `layout_to_json` wrote; ValueError or TypeError if it is none."""
    return Layout(
        tuple(Piece(str(n), tuple(map(int, shape)), _dtype(d), int(start), int(count)) for n, shape, d, start, count in pieces)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


# ---------------------------------------------------------------------------------------------------------- on the disk


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON header and the header, padded so that the data begin aligned."""
    if "__metadata__" in tensors:
        raise ValueError("a tensor may not be called '__metadata__': safetensors files keep that name for themselves. Rename it.")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("metadata values must be text, or no safetensors reader opens the file. Write others as JSON.")
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise TypeError(f"{name} is {tensor.dtype}, which safetensors files do not hold. Convert it, or leave it out.")
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory; a copy only if it is on another device or not contiguous."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
