"""Elementwise mathematics, chunk by chunk.

In eager PyTorch each operator is a pass over memory. An elementwise rule that is applied to a chunk which fits in cache keeps its
temporaries there, so that its text can stay that of the equation and still run at a few passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeVar, cast

from atoll.tree import Tree, empty

CHUNK = 1 << 17
"""Elements at a time. A multiple of every vector width, so that cutting changes no bit."""

F = TypeVar("F", bound=Callable[..., Any])


def elementwise(method: F) -> F:
    """Applies a method over Trees chunk by chunk, where that pays.

    For methods whose results at a position depend on arguments at that position alone. Arguments and results may be Trees,
    numbers, and tuples (also named ones) of them; all Trees have one layout. A Tree that was given is put back into circulation.
    """

    @wraps(method)
    def chunked(self: Any, first: Tree, *rest: Any) -> Any:
        if first.flat.device.type != "cpu" or first.numel <= CHUNK:
            return method(self, first, *rest)
        arguments = (first, *rest)
        whole: Any = None
        for start in range(0, first.numel, CHUNK):
            stop = min(start + CHUNK, first.numel)
            part = method(self, *_replace_trees(partial(_window, start, stop), arguments))
            whole = _replace_trees(partial(_blank, first), part) if whole is None else whole
            whole = _fill(whole, part, start, stop)
        for tree in _trees(arguments):
            if tree.spare:
                tree.release()
        return whole

    return cast(F, chunked)


def _window(start: int, stop: int, tree: Tree) -> Tree:
    return tree.slice(start, stop)


def _blank(model: Tree, tree: Tree) -> Tree:
    return Tree(model.layout, empty(model.numel, tree.flat.dtype, tree.flat.device))


def _replace_trees(function: Callable[[Tree], Tree], value: Any) -> Any:
    """The same value with every Tree in it replaced."""
    if isinstance(value, Tree):
        return function(value)
    return _rebuild(value, [_replace_trees(function, item) for item in value]) if isinstance(value, tuple) else value


def _fill(whole: Any, part: Any, start: int, stop: int) -> Any:
    """`whole` with this chunk of each Tree written, and everything else as the chunk has it."""
    if isinstance(whole, Tree):
        whole.flat[start:stop].copy_(part.flat)
        return whole
    if isinstance(whole, tuple):
        return _rebuild(whole, [_fill(w, p, start, stop) for w, p in zip(whole, part, strict=True)])
    return part


def _rebuild(model: tuple[Any, ...], items: list[Any]) -> Any:
    return type(model)(*items) if hasattr(model, "_fields") else tuple(items)


def _trees(value: Any) -> Iterator[Tree]:
    if isinstance(value, Tree):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _trees(item)
