"""Replicated and sharded fields of an algorithm's State: compare replicas, reshard slices, mark buffers for a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.core.nested_trees import leaves, trees
from atoll.core.protocols import Gradient, Owner, fields_owned


def shared_fields(state: Any) -> dict[str, Any]:
    return fields_owned(state, Owner.SHARED)


def with_shared(state: Any, shared: Mapping[str, Any]) -> Any:
    """The State with its shared fields replaced."""
    return replace(state, **shared)


def residuals(state: Any) -> dict[str, Any]:
    """The error buffers: what exchanges have left out so far."""
    return {f.name: getattr(state, f.name) for f in fields(state) if f.metadata.get("residual")}


def restarted(state: Any) -> Any:
    """The State of an island that starts again from the shared fields. Its error buffers stay."""
    own = [f for f in fields(state) if f.metadata["owner"] is Owner.OWN and not f.metadata.get("residual")]
    return replace(state, **{f.name: f.default for f in own})


def donated(state: Any, *, shared: bool = False) -> Any:
    """The State for a round that will never be repeated: Trees of fields declared `donated` may be computed in, and no longer be
    read in the old State. Shared fields are donated only with `shared`: in the simulator all islands hold the same objects."""
    names = [f.name for f in fields(state) if f.metadata.get("donated") and (shared or f.metadata["owner"] is not Owner.SHARED)]
    return replace(state, **{name: map_trees(Tree.donate, getattr(state, name)) for name in names})


def borrowed(state: Any) -> Any:
    """The State for a round that may have to be repeated: what is this island's own is copied before anything is computed in it."""
    own = {name: value for name, value in fields_owned(state, Owner.OWN).items() if any(trees(value))}
    return replace(state, **{name: map_trees(Tree.borrow, value) for name, value in own.items()}) if own else state


def owned(state: Any) -> Any:
    """The State that a round returned, in buffers of its own: borrowed Trees are copied, donated ones are donated no longer."""
    values = {f.name: getattr(state, f.name) for f in fields(state)}
    others = {name: value for name, value in values.items() if any(tree.borrowed or tree.donated for tree in trees(value))}
    return replace(state, **{name: map_trees(_owned, value) for name, value in others.items()}) if others else state


def _owned(tree: Tree) -> Tree:
    return tree.claim() if tree.borrowed or tree.donated else tree


def trees_to_device(value: Any, device: torch.device | str) -> Any:
    """The value with all of its Trees on this device. Trees from a checkpoint are on the CPU."""
    return map_trees(lambda tree: tree.to(device), value)


def map_trees(function: Callable[..., Tree], *values: Any) -> Any:
    """The first nested value, with every Tree replaced by `function` of the Trees in its place in all of these values."""
    first = values[0]
    if isinstance(first, Tree):
        return function(*values)
    if isinstance(first, tuple):
        items = [map_trees(function, *items) for items in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if isinstance(first, Mapping):
        return {name: map_trees(function, *(value[name] for value in values)) for name in first}
    if is_dataclass(first) and not isinstance(first, type):
        of_field = {f.name: [getattr(value, f.name) for value in values] for f in fields(first)}
        return replace(first, **{name: map_trees(function, *found) for name, found in of_field.items()})
    return first


def pending_tokens(state: Any) -> int:
    """Tokens of gradients that the State keeps for a later update."""
    return sum(value.tokens for value in fields_owned(state, Owner.OWN).values() if isinstance(value, Gradient))


def adopt_shared(name: str, state: Any, shared: Mapping[str, Any]) -> Any:
    """Checks that the shared fields have the bits of `shared`, and returns the State with those objects. A process then holds them
    once for all islands, and finds a diverged island in the round in which it diverged."""
    for (path, mine), (_, theirs) in zip(leaves(shared_fields(state)), leaves(shared), strict=True):
        if not _same_bits(mine, theirs):
            raise ExchangeFailed(
                f"{name} holds another{path} than the islands it agreed with. Shared fields must have the same bits on every "
                f"island after a round: compute them from shared fields and from what an exchange returned, and from nothing else."
            )
    return with_shared(state, shared)


def _same_bits(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tree):
        return isinstance(theirs, Tree) and mine.same_bits(theirs)
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    return bool(mine == theirs)


def reshard(slices: Sequence[Any], size: int) -> list[Any]:
    """Cuts sharded values for another number of ranks. `slices` are in the order of the old ranks. Values that are not Trees are
    equal on all ranks."""

    def slices_of(rank: int) -> Any:
        return map_trees(lambda *old: Tree.join(list(old)).shard(rank, size).copy(), *slices)

    return [*map(slices_of, range(size))]


def reshard_bytes(before: Mapping[int, Any], now: Sequence[int]) -> dict[int, int]:
    """The bytes that each present island sends so that all get their new slices. `before` has the slices by island, in the order of
    the old ranks. Slices of islands that left are not sent."""
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
