"""Sharded state when islands come and go: slices for another number of ranks, and what must be sent for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.core.pytree import trees


def recut(slices: Sequence[Any], size: int) -> list[Any]:
    """What every rank holds a slice of, cut anew for another number of ranks. `slices` are in the order of the old ranks; what is
    no Tree in them is the same everywhere."""
    return [_recut(slices, rank, size) for rank in range(size)]


def _recut(slices: Sequence[Any], rank: int, size: int) -> Any:
    first = slices[0]
    if isinstance(first, Tree):
        return Tree.join(list(slices)).shard(rank, size).copy()
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{f.name: _recut([getattr(s, f.name) for s in slices], rank, size) for f in fields(first)})
    if isinstance(first, Mapping):
        return {name: _recut([s[name] for s in slices], rank, size) for name in first}
    if isinstance(first, tuple):
        items = [_recut(items, rank, size) for items in zip(*slices, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return first


def missing_bytes(before: Mapping[int, Any], now: Sequence[int]) -> dict[int, int]:
    """How many bytes each island that is there now sends, so that all have the slices they lack. `before` are the slices by island,
    in the order of the old ranks; those of islands that left are sent by nobody."""
    sent = dict.fromkeys(now, 0)
    for slices in zip(*(trees(held) for held in before.values()), strict=True):  # of one tree, by old rank
        numel, item_bytes = sum(tree.numel for tree in slices), slices[0].flat.element_size()
        for rank, island in enumerate(now):
            start, stop = shard_range(numel, rank, len(now))
            for other_rank, other in enumerate(before):
                low, high = shard_range(numel, other_rank, len(before))
                if other in sent and other != island:
                    sent[other] += max(0, min(stop, high) - max(start, low)) * item_bytes
    return sent
