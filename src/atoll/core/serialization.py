"""Tensors in a file: the safetensors format, written whole or not at all.

A file appears under its name only when it is complete and on the disk, so that a crash, a kill or a full disk leaves the old file
in place. Any safetensors reader can open it. The metadata hold a Tree's order, its tensors' own dtypes and the pieces it holds.

The format is a length, a JSON header and the raw bytes. This module writes it itself: the library refuses tensors that share
memory, changes its arguments between versions, and hides the system's error. A Tree's views are written without a copy, and tensors
on another device pass through memory one at a time.

A file has the digest of all its bytes in its metadata, which every reader verifies. Files of older versions and of other programs
have none.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.core.config.json_records import find_type, type_name
from atoll.core.config.type_checks import hints_of, joined, members_of, settable
from atoll.core.errors import CheckpointError, one_line
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout, Piece, difference, dtype_text
from atoll.core.verified_files import blake2b, parse_json, replacing

# --------------------------------------------------------------------------------------------------------------- safetensors

LAYOUT = "atoll.layout"  # the metadata key of the layout
DIGEST = "atoll.blake2b"  # the metadata key of the digest of all bytes of the file, with zeros in place of the digest
_UNKNOWN_DIGEST = "0" * 32
_LONGEST_HEADER = 100_000_000  # as the library has it

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


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, digest: bool = True
) -> None:
    """Write these tensors, replacing an old file in one step. CheckpointError if that fails: the old file stays. Without `digest`
    the caller keeps the file's digest elsewhere."""
    path = Path(path)
    # Widest first, as the library does: then every tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(ordered, {**({DIGEST: _UNKNOWN_DIGEST} if digest else {}), **(metadata or {})})
    state = blake2b(header)
    with replacing(path, CheckpointError) as file:
        file.write(header)
        for tensor in ordered.values():
            data = _bytes(tensor)
            file.write(data)
            if digest:
                state.update(data)
        if digest:
            file.seek(_digest_position(header) or 0)
            file.write(state.hexdigest().encode())


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, by name, and its metadata.

    The tensors are memory-mapped; writing to one does not change the file. CheckpointError if there is no such file, or it is
    truncated or not a safetensors file, or does not match its digest. A file that has none, as other programs write it, is not
    verified.
    """
    path = Path(path)
    try:
        _verify_tensors(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            metadata = dict(file.metadata() or {})
            metadata.pop(DIGEST, None)
            return tensors, metadata
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}. Check the path, or start the run afresh.") from None
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}. A safetensors file is needed here.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({one_line(error)}). Use an older one, or copy it again from its "
            f"source."
        ) from error


def _verify_tensors(path: Path) -> None:
    """CheckpointError if a file does not match its digest. The library refuses a file whose header is none."""
    with open(path, "rb") as file:
        length = file.read(8)
        header = length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))
        at = _digest_position(header)
        if at is None:
            return
        found, end = header[at : at + len(_UNKNOWN_DIGEST)], at + len(_UNKNOWN_DIGEST)
        state = blake2b(header[:at] + _UNKNOWN_DIGEST.encode() + header[end:])
        if hashlib.file_digest(file, lambda: state).hexdigest().encode() != found:
            raise CheckpointError(
                f"{path} does not match its digest: some of its bits have changed since it was written. Use an older one, or copy "
                f"it again from its source."
            )


def _digest_position(header: bytes) -> int | None:
    """Where the digest stands in a header that has one."""
    key = f'"{DIGEST}":"'.encode()  # quotation marks inside of names and values are escaped
    at = header.find(key)
    return None if at < 0 else at + len(key)


# ---------------------------------------------------------------------------------------------------------------- Trees


def save_tree(path: str | Path, tree: Tree, metadata: Mapping[str, str] | None = None) -> None:
    """Write a Tree with its exact bits: each piece in the buffer's dtype, with the layout in the metadata."""
    metadata = metadata or {}
    if LAYOUT in metadata:
        raise ValueError(f"metadata may not have the key {LAYOUT!r}: the Tree's layout is written under it. Rename yours.")
    layout = json.dumps({"dtype": dtype_text(tree.flat.dtype), "pieces": layout_to_json(tree.layout)})
    write_tensors(path, tree.layout.views(tree.flat), {**metadata, LAYOUT: layout})


def load_tree(path: str | Path) -> Tree:
    """The Tree that `save_tree` wrote, on the CPU: same names, order, shapes, dtypes, pieces and bits. CheckpointError if there is
    none."""
    return read_tree(path)[0]


def read_tree(path: str | Path) -> tuple[Tree, dict[str, str]]:
    """The Tree that `save_tree` wrote, and the metadata of its file."""
    tensors, metadata = read_tensors(path)
    if LAYOUT not in metadata:
        raise CheckpointError(f"{path} holds tensors but no Tree: its metadata has no {LAYOUT!r}. Read it with read_tensors.")
    try:
        record = parse_json(metadata[LAYOUT])
        layout, dtype = layout_from_json(record["pieces"]), _dtype(record["dtype"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} has a layout that cannot be read ({one_line(error)}). Use an older checkpoint.") from error
    for piece in layout.pieces:
        found, shape = tensors.get(piece.name), tuple(piece.shape)
        whole = piece.count == math.prod(shape)
        if found is None or found.shape != (shape if whole else (piece.count,)) or found.dtype != dtype:
            raise CheckpointError(
                f"{path} and its layout disagree about {piece.name:.200}. It was changed after it was saved. Use an older one."
            )
    flat = empty(layout.numel, dtype, torch.device("cpu"))
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return Tree(layout, flat), metadata


def layout_to_json(layout: Layout) -> list[Any]:
    """A Layout as plain lists, for a header or a manifest."""
    return [[p.name, list(p.shape), dtype_text(p.dtype), p.start, p.count] for p in layout.pieces]


def layout_from_json(pieces: list[Any]) -> Layout:
    """The Layout that `layout_to_json` wrote; ValueError or TypeError if it is none."""
    return Layout(
        tuple(Piece(str(n), tuple(map(int, shape)), _dtype(d), int(start), int(count)) for n, shape, d, start, count in pieces)
    )


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


# ----------------------------------------------------------------------------------------------------------------- packing


class Packed(NamedTuple):
    structure: Any  # everything but the tensors. JSON keeps it exactly: NaN and infinity are written as words
    tensors: dict[str, Tensor]  # by path. They share memory with the packed value


def pack(value: Any) -> Packed:
    """The value as a structure and tensors. Nothing is copied. CheckpointError if it has something that cannot be saved."""
    tensors: dict[str, Tensor] = {}
    return Packed(_pack(value, "", tensors), tensors)


def tensor_bytes(value: Any) -> int:
    """The bytes of the tensors in a value that can be packed."""
    return sum(tensor.nbytes for tensor in pack(value).tensors.values())


def _pack(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"kind": "float", "value": repr(float(value))}
    if isinstance(value, Tree):
        return {"kind": "tree", "tensor": _put(value.flat, at, tensors), "pieces": layout_to_json(value.layout)}
    if isinstance(value, Tensor):
        return {"kind": "tensor", "tensor": _put(value.detach(), at, tensors)}
    names = _field_names(type(value))
    if names is not None:
        inside = {name: _pack(getattr(value, name), joined(at, name), tensors) for name in names}
        return {"kind": "record", "type": type_name(type(value)), "fields": inside}
    if type(value) in (tuple, list):
        items = [_pack(item, joined(at, i), tensors) for i, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"kind": "dict", "items": {key: _pack(item, joined(at, key), tensors) for key, item in value.items()}}
    raise CheckpointError(
        f"{at or 'the value'} is {value!r:.200}, which cannot be saved. A State holds dataclasses, NamedTuples, tuples, lists, "
        f"dictionaries with text as keys, Trees, tensors, numbers, bools, text and none. Use one of these."
    )


def _put(tensor: Tensor, at: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its path, or one that is free: keys of dictionaries may have dots in them."""
    name = at or "value"
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


# --------------------------------------------------------------------------------------------------------------- unpacking


def unpack(packed: Packed, like: Any) -> Any:
    """The value that was packed, also after JSON and a file. Its tensors have memory of their own, on their devices in `like`.

    `like` is a value of the same kind. Where it is None, any value is accepted, and None is accepted everywhere. Lists, tuples and
    dictionaries may have another length. Raises CheckpointError, which names the field, if the value is of another kind.
    """
    return _unpack(packed.structure, like, "", packed.tensors, Any)


def _unpack(node: Any, like: Any, at: str, tensors: Mapping[str, Tensor], hint: Any) -> Any:
    """`hint` is the type of the field that the value is in, which decides which record may stand there if `like` is None."""
    if not isinstance(node, dict):
        return _plain(node, like, at)

    def inside(item: Any, like: Any, name: str | int, hint: Any = Any) -> Any:
        return _unpack(item, like, joined(at, name), tensors, hint)

    try:
        kind = node["kind"]
        if kind == "float":
            return _plain(float(node["value"]), like, at)
        if kind in ("tree", "tensor"):
            return _unpack_tensor(node, like, at, tensors)
        if kind == "record":
            record = _record_type(node, like, at, hint)
            fields = dict[str, Any]()
            for name, item in node["fields"].items():
                own = getattr(like, name, None)
                # The hints of a class may not be readable, and only a record without a model needs them.
                fields[name] = inside(item, own, name, hints_of(record)[name] if own is None and isinstance(item, dict) else Any)
            return record(**fields)
        if kind == "dict":
            if not isinstance(like, dict | None):
                raise _foreign(at, "a dictionary", like)
            return {key: inside(item, (like or {}).get(key), key) for key, item in node["items"].items()}
        sequence = {"tuple": tuple, "list": list}[kind]
        if like is not None and type(like) is not sequence:
            raise _foreign(at, f"a {kind}", like)
        likes = [*(like or ()), *[None] * len(node["items"])]
        return sequence(inside(item, likes[i], i) for i, item in enumerate(node["items"]))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{at or 'the value'} cannot be read: its record in the checkpoint is damaged ({error!r}). Use an older checkpoint."
        ) from error


def _plain(node: Any, like: Any, at: str) -> Any:
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (node, like))
    if node is None or like is None or numbers or type(node) is type(like):
        return node
    raise _foreign(at, f"{node!r:.100}", like)


def _unpack_tensor(node: dict[str, Any], like: Any, at: str, tensors: Mapping[str, Tensor]) -> Tree | Tensor:
    kind, what = (Tree, "a Tree") if node["kind"] == "tree" else (Tensor, "a tensor")
    if not isinstance(like, kind | None):
        raise _foreign(at, what, like)
    if node["tensor"] not in tensors:
        raise CheckpointError(f"{at or 'the value'}: the checkpoint lacks the tensor {node['tensor']!r}. Use an older checkpoint.")
    tensor, model = tensors[node["tensor"]], like.flat if isinstance(like, Tree) else like
    # Always a copy: tensors read from a file are windows on it, and a Tree's buffer must have no other reader.
    tensor = tensor.to(tensor.device if model is None else model.device, copy=True)
    if kind is Tensor:
        return tensor
    layout = layout_from_json(node["pieces"])
    if tensor.shape != (layout.numel,):
        raise CheckpointError(
            f"{at or 'the value'} has {tensor.numel()} numbers in the checkpoint and its layout needs {layout.numel}: "
            f"one of them was changed after it was saved. Use an older checkpoint."
        )
    if isinstance(like, Tree) and layout != like.layout:
        raise _foreign(at, f"a Tree of another layout ({difference(layout, like.layout)})", like)
    return Tree(layout, tensor)


def _record_type(node: dict[str, Any], like: Any, at: str, hint: Any) -> Any:
    """The type of a record, with the fields that were saved."""
    saved = node["fields"]
    kind: Any = find_type(node["type"]) if like is None else type(like)
    names = _field_names(kind)
    if like is None and names is None:
        raise CheckpointError(
            f"{at or 'the value'} is a {node['type']} in the checkpoint, which is not a known record. "
            f"Import the module that defines it, then resume; or use the version of atoll that saved it."
        )
    if like is None and "." in node["type"] and not _is_named(kind, hint):
        raise CheckpointError(
            f"{at or 'the value'} is a {node['type']:.200} in the checkpoint, which its field does not name as its type. Use an "
            f"older checkpoint; of a State of your own, declare the field's type."
        )
    if names is None:
        raise _foreign(at, f"a {node['type']}", like)
    if saved.keys() != set(names):
        only = ", ".join(joined(at, name) for name in sorted(saved.keys() ^ set(names)))
        raise _foreign(at, f"a {node['type']} with {', '.join(saved) or 'no fields'} (in one of them only: {only})", like)
    return kind


def _is_named(kind: type, hint: Any) -> bool:
    """Whether a hint names this class. A class of another package than atoll is not called otherwise."""
    return any(isinstance(member, type) and issubclass(kind, member) for member in members_of(hint))


def _foreign(at: str, saved: str, like: Any) -> CheckpointError:
    names = _field_names(type(like))
    expected = f"a {type(like).__name__} with {', '.join(names) or 'no fields'}" if names is not None else f"{like!r:.100}"
    return CheckpointError(
        f"{at or 'the value'} is {saved} in the checkpoint, where this run has {expected}: it is the checkpoint of another run or "
        f"version. Resume with the settings it was saved with, or start afresh in another folder."
    )


def _field_names(kind: Any) -> list[str] | None:
    """The fields of a dataclass or NamedTuple; None of anything else."""
    if is_dataclass(kind):
        return list(settable(kind))  # type: ignore[arg-type]
    is_named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return list(kind._fields) if is_named_tuple else None
