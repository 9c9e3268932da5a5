"""Pack: a State as a structure that JSON can hold and a handful of tensors, and back.

>>> import torch
>>> from atoll.core.protocols import Gradient
>>> from atoll.core.flat_tree import Tree
>>> gradient = Gradient(sum=Tree.of({"w": torch.ones(2)}), weight=3.0, tokens=24)
>>> packed = pack(gradient)
>>> packed.tensors
{'sum': tensor([1., 1.])}
>>> unpack(packed, like=gradient)
Gradient(sum=Tree(1 tensors, 2 x float32, cpu), weight=3.0, tokens=24)

A State may hold frozen dataclasses, NamedTuples, tuples, lists, dictionaries with text as keys, Trees, tensors, numbers, bools,
text and none. To unpack one needs a value of the same kind, such as a State that was just initialised: it says what the records
are, and a checkpoint of another algorithm is noticed at the first field that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.config.json_records import find_type, type_name
from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.serialization import layout_from_json, layout_to_json


class Packed(NamedTuple):
    """A packed value.

    Attributes:
        structure: everything but the tensors. JSON keeps it exactly: NaN and infinity are written as words.
        tensors: by the path at which they stand. They share memory with what was packed.
    """

    structure: Any
    tensors: dict[str, Tensor]


# ----------------------------------------------------------------------------------------------------------------- packing


def pack(value: Any) -> Packed:
    """The value as a structure and tensors. Nothing is copied.

    Raises:
        CheckpointError: there is something in it that cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(_pack(value, "", tensors), tensors)


def _pack(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"kind": "float", "value": repr(float(value))}
    if isinstance(value, Tree):
        return {"kind": "tree", "tensor": _put(value.flat, at, tensors), "pieces": layout_to_json(value.layout)}
    if isinstance(value, Tensor):
        return {"kind": "tensor", "tensor": _put(value.detach(), at, tensors)}
    record = _fields(value)
    if record is not None:
        inside = {name: _pack(item, _join(at, name), tensors) for name, item in record.items()}
        return {"kind": "record", "type": type_name(type(value)), "fields": inside}
    if type(value) in (tuple, list):
        items = [_pack(item, _join(at, i), tensors) for i, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"kind": "dict", "items": {key: _pack(item, _join(at, key), tensors) for key, item in value.items()}}
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


def unpack(packed: Packed, like: Any, *, check_layout: bool = True, device: torch.device | str | None = None) -> Any:
    """The value that was packed. Its tensors have memory of their own.

    Args:
        packed: what `pack` gave, also after JSON and a file.
        like: a value of the same kind. Where it has none, anything may come, and none may come anywhere. Lists, tuples and
            dictionaries may have another length.
        check_layout: whether Trees must have the layout that they have in `like`. They differ if the number of shards does.
        device: where tensors go for which `like` has none; others go where they are in `like`. None leaves them.

    Raises:
        CheckpointError: the value is of another kind than `like`; says at which field.
    """
    return _Unpacker(packed.tensors, check_layout, device).value(packed.structure, like, "")


@dataclass(frozen=True)
class _Unpacker:
    tensors: Mapping[str, Tensor]
    check_layout: bool
    device: torch.device | str | None

    def value(self, node: Any, like: Any, at: str) -> Any:
        if not isinstance(node, dict):
            return self._plain(node, like, at)
        readers: Mapping[Any, Callable[[dict[str, Any], Any, str], Any]] = {
            "float": lambda node, like, at: self._plain(float(node["value"]), like, at),
            "tree": self._tree,
            "tensor": self._tensor,
            "record": self._record,
            "tuple": self._items,
            "list": self._items,
            "dict": self._dict,
        }
        try:
            return readers[node["kind"]](node, like, at)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{at or 'the value'} cannot be read: its record in the checkpoint is damaged ({error!r}). Use an older checkpoint."
            ) from error

    def _plain(self, node: Any, like: Any, at: str) -> Any:
        numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (node, like))
        if node is None or like is None or numbers or type(node) is type(like):
            return node
        raise _foreign(at, f"{node!r:.100}", like)

    def _tree(self, node: dict[str, Any], like: Any, at: str) -> Tree:
        if not isinstance(like, Tree | None):
            raise _foreign(at, "a Tree", like)
        layout, flat = layout_from_json(node["pieces"]), self._get(node, None if like is None else like.flat, at)
        if flat.shape != (layout.numel,):
            raise CheckpointError(
                f"{at or 'the value'} has {flat.numel()} numbers in the checkpoint and its layout needs {layout.numel}: "
                f"one of them was changed after it was saved. Use an older checkpoint."
            )
        if like is not None and self.check_layout and layout != like.layout:
            raise _foreign(at, f"a Tree with {_difference(layout, like.layout)}", like)
        return Tree(layout, flat)

    def _tensor(self, node: dict[str, Any], like: Any, at: str) -> Tensor:
        if not isinstance(like, Tensor | None):
            raise _foreign(at, "a tensor", like)
        return self._get(node, like, at)

    def _get(self, node: dict[str, Any], like: Tensor | None, at: str) -> Tensor:
        if node["tensor"] not in self.tensors:
            raise CheckpointError(
                f"{at or 'the value'}: the checkpoint lacks the tensor {node['tensor']!r}. Use an older checkpoint."
            )
        tensor = self.tensors[node["tensor"]]
        # Always a copy: tensors read from a file are windows on it, and a Tree's buffer must have no other reader.
        return tensor.to(like.device if like is not None else self.device or tensor.device, copy=True)

    def _record(self, node: dict[str, Any], like: Any, at: str) -> Any:
        saved = node["fields"]
        kind = find_type(node["type"]) if like is None else type(like)
        known = _fields(like) if like is not None else _field_names(kind)
        if like is None and known is None:
            raise CheckpointError(
                f"{at or 'the value'} is a {node['type']} in the checkpoint, which is not a known record. "
                f"Import the module that defines it, then resume; or use the version of atoll that saved it."
            )
        if known is None or kind is None:
            raise _foreign(at, f"a {node['type']}", like)
        if saved.keys() != known.keys():
            only = ", ".join(_join(at, name) for name in sorted(saved.keys() ^ known.keys()))
            raise _foreign(at, f"a {node['type']} with {', '.join(saved) or 'no fields'} (in one of them only: {only})", like)
        return kind(**{name: self.value(item, known[name], _join(at, name)) for name, item in saved.items()})

    def _items(self, node: dict[str, Any], like: Any, at: str) -> Any:
        kind = {"tuple": tuple, "list": list}[node["kind"]]
        if like is not None and type(like) is not kind:
            raise _foreign(at, f"a {node['kind']}", like)
        likes = [*(like or ()), *[None] * len(node["items"])]
        return kind(self.value(item, likes[i], _join(at, i)) for i, item in enumerate(node["items"]))

    def _dict(self, node: dict[str, Any], like: Any, at: str) -> Any:
        if not isinstance(like, dict | None):
            raise _foreign(at, "a dictionary", like)
        return {key: self.value(item, (like or {}).get(key), _join(at, key)) for key, item in node["items"].items()}


def _foreign(at: str, saved: str, like: Any) -> CheckpointError:
    names = _fields(like)
    expected = f"a {type(like).__name__} with {', '.join(names) or 'no fields'}" if names is not None else f"{like!r:.100}"
    return CheckpointError(
        f"{at or 'the value'} is {saved} in the checkpoint, where this run has {expected}: it is the checkpoint of another run or "
        f"version. Resume with the settings it was saved with, or start afresh in another folder."
    )


def _difference(saved: Layout, expected: Layout) -> str:
    """Where two layouts begin to differ."""
    for one, two in zip(saved.pieces, expected.pieces, strict=False):
        if one != two:
            return f"{one} instead of {two}"
    return f"{len(saved.pieces)} pieces instead of {len(expected.pieces)}"


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or NamedTuple, by name; none of anything else."""
    names = _field_names(type(value))
    return None if names is None else {name: getattr(value, name) for name in names}


def _field_names(kind: type | None) -> dict[str, Any] | None:
    if kind is not None and is_dataclass(kind):
        return {f.name: None for f in fields(kind) if f.init}
    if kind is not None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return dict.fromkeys(kind._fields)
    return None


def _join(at: str, name: str | int) -> str:
    return f"{at}.{name}" if at else str(name)
