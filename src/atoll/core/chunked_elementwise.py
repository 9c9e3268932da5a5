"""Elementwise mathematics, chunk by chunk.

In eager PyTorch each operator is a pass over memory. An elementwise rule that is applied to a chunk which fits in cache keeps its
temporaries there, so that its text can stay that of the equation and still run at a few passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from atoll.core.flat_tree import Tree, empty
from atoll.core.nested_trees import trees_in, with_trees

CHUNK = 1 << 18
"""Elements at a time. A multiple of every vector width, so that cutting changes no bit."""

F = TypeVar("F", bound=Callable[..., Any])


def elementwise(method: F) -> F:
    """Applies a method over Trees chunk by chunk, on a CPU and above one chunk.

    For methods whose results at a position depend on arguments at that position alone. Arguments and results are Trees of one
    layout, numbers, and tuples (also named ones) of them. The buffer of a donated Tree returns to the pool.
    """

    @wraps(method)
    def chunked(self: Any, first: Tree, *rest: Any) -> Any:
        arguments = (first, *rest)
        trees = list(trees_in(arguments))
        if first.flat.device.type != "cpu" or first.numel <= CHUNK:
            result = method(self, *arguments)
        else:
            parts = (
                method(self, *with_trees(arguments, iter(part))) for part in zip(*(t.windows(CHUNK) for t in trees), strict=True)
            )
            result = _joined(first, parts)
        kept = {tree.flat.data_ptr() for tree in trees_in(result)}
        for tree in trees:
            if tree.donated and tree.flat.data_ptr() not in kept:
                tree.release()
        return result

    return cast(F, chunked)


def _joined(model: Tree, parts: Iterator[Any]) -> Any:
    """The results of all chunks as one: Trees laid end to end, and everything else as the last chunk has it."""
    part = next(parts)
    wholes = [Tree(model.layout, empty(model.numel, tree.flat.dtype, tree.flat.device)) for tree in trees_in(part)]
    for windows in zip(*(torch.split(whole.flat, CHUNK) for whole in wholes), strict=True):
        for window, tree in zip(windows, trees_in(part), strict=True):
            window.copy_(tree.flat)
        part = next(parts, part)
    return with_trees(part, iter(wholes))
