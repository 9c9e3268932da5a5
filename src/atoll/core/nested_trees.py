"""Nested values (a State, a rule's state, part of a checkpoint): the Trees and tensors in them, and the reuse of their buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from atoll.core.flat_tree import Tree

_VALUES = frozenset({Tree, Tensor, int, float, bool, str, type(None)})


def items_in(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container with their names; None of anything else. A Tree is none, but a value."""
    if type(value) in _VALUES:  # most are, and a Mapping's isinstance is slow
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    return None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nested value that is not itself a container, with its dotted path."""
    items = items_in(value)
    if items is None:
        yield path, value
    else:
        for name, item in items:
            yield from leaves(item, f"{path}.{name}")


def trees(value: Any) -> Iterator[Tree]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tree))


def trees_in(value: Any) -> Iterator[Tree]:
    """The Trees in a Tree or in nested tuples, in order: `trees` for the states of rules, at a fraction of the time."""
    if type(value) is Tree:
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from trees_in(item)


def with_trees(value: Any, trees: Iterator[Tree]) -> Any:
    """The same nested tuples with the Trees in them replaced, one after the other."""
    if type(value) is Tree:
        return next(trees)
    if not isinstance(value, tuple):
        return value
    items = [with_trees(item, trees) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def tree_bytes(value: Any) -> int:
    """Bytes of all Trees in a value: the payload to send it."""
    return sum(tree.nbytes for tree in trees(value))


def memories(value: Any) -> set[int]:
    """The addresses of the Trees and tensors in a value."""
    return {memory for _, leaf in leaves(value) if (memory := memory_of(leaf)) is not None}


def recycle(old: Iterable[Any], live: Iterable[Any]) -> None:
    """Releases the Trees in `old` whose memory no Tree or tensor in `live` uses."""
    used = {memory for value in live for memory in memories(value)}
    for tree in (tree for value in old for tree in trees(value)):
        memory = memory_of(tree)
        if memory is not None and memory not in used:
            used.add(memory)  # two Trees may share a buffer, which must return to the pool once
            tree.release()


def memory_of(leaf: Any) -> int | None:
    """The address of a Tree or a tensor; None for anything else, and for a Tree that was donated."""
    if isinstance(leaf, Tree):
        return None if leaf.deleted else leaf.flat.untyped_storage().data_ptr()
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else None


class WeightLeases:
    """The weights each worker was dispatched with. A buffer returns to the pool when neither the State nor a worker uses it."""

    def __init__(self, leased: Mapping[int, Tree] | None = None) -> None:
        self.leased = dict(leased or {})
        self._count = Counter(memory_of(tree) for tree in self.leased.values())

    def lease(self, worker: int, params: Tree) -> None:
        self.leased[worker] = params
        self.pin([params])

    def end(self, worker: int, state: Any) -> None:
        params = self.leased.pop(worker, None)
        if params is not None:
            self.unpin([params], state)

    def pin(self, trees: Iterable[Tree]) -> None:
        self._count.update(memory_of(tree) for tree in trees)

    def unpin(self, trees: Iterable[Tree], state: Any) -> None:
        for tree in trees:
            self._count[memory_of(tree)] -= 1
            self.recycle([tree], state)

    def recycle(self, trees: Iterable[Tree], state: Any) -> None:
        used = memories(state)
        for tree in trees:
            memory = memory_of(tree)
            if memory is not None and memory not in used and not self._count[memory]:
                del self._count[memory]
                tree.release()
