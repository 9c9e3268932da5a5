"""What engines do with algorithms' States: look into them, hold them equal, put their buffers back into circulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ExchangeFailed
from atoll.protocols import Owner, fields_owned
from atoll.tree import Tree


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nested value that is not itself a container, with its dotted path."""
    if isinstance(value, Tree):
        yield path, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from leaves(item, f"{path}.{name}")
    else:
        yield path, value


def trees(value: Any) -> Iterator[Tree]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tree))


def tree_bytes(value: Any) -> int:
    """Bytes of all Trees in a value: what it takes to send it."""
    return sum(tree.nbytes for tree in trees(value))


def shared_fields(state: Any) -> dict[str, Any]:
    return fields_owned(state, Owner.SHARED)


def with_shared(state: Any, shared: Mapping[str, Any]) -> Any:
    """The State with its shared fields replaced."""
    return replace(state, **shared)


def agree(name: str, state: Any, shared: Mapping[str, Any]) -> Any:
    """Checks that the shared fields have the bits of `shared`, and returns the State with those very objects.

    Islands that hold the same bits then hold them once, and a replica that has come apart is found in the round it happened.
    """
    for (path, mine), (_, theirs) in zip(leaves(shared_fields(state)), leaves(shared), strict=True):
        if not _same(mine, theirs):
            raise ExchangeFailed(
                f"{name} holds another{path} than the islands it agreed with. Shared fields must have the same bits on every "
                f"island after a round: compute them from shared fields and from what an exchange returned, and from nothing else."
            )
    return with_shared(state, shared)


def recycle(old: Iterable[Any], live: Iterable[Any]) -> None:
    """Releases the Trees in `old` whose memory nothing in `live` uses, neither a Tree nor a tensor."""
    used = {memory for value in live for _, leaf in leaves(value) if (memory := _memory(leaf)) is not None}
    for tree in (tree for value in old for tree in trees(value)):
        memory = _memory(tree)
        if memory is not None and memory not in used:
            used.add(memory)  # two Trees may share a buffer, which must circulate once
            tree.release()


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tree):
        return isinstance(theirs, Tree) and mine.same_bits(theirs)
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    return bool(mine == theirs)


def _memory(leaf: Any) -> int | None:
    """Where a Tree or a tensor lies; none of anything else, and of a Tree that was given away."""
    if isinstance(leaf, Tree):
        return None if leaf.given else leaf.flat.untyped_storage().data_ptr()
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else None
