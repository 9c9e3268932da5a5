"""What engines do with algorithms' States: look at what is shared in them, and hold it equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Owner, fields_owned
from atoll.core.pytree import leaves


def shared_fields(state: Any) -> dict[str, Any]:
    return fields_owned(state, Owner.SHARED)


def with_shared(state: Any, shared: Mapping[str, Any]) -> Any:
    """The State with its shared fields replaced."""
    return replace(state, **shared)


def given(state: Any) -> Any:
    """The State with what a round may take marked as given; the one that came in can no longer be read there."""
    taken = {f.name: _given(getattr(state, f.name)) for f in fields(state) if f.metadata.get("taken")}
    return replace(state, **taken)


def _given(value: Any) -> Any:
    return _with_trees(value, Tree.give)


def on_device(value: Any, device: torch.device | str) -> Any:
    """The value with all of its Trees there: what comes from a file lies elsewhere, where the fresh State had nothing."""
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    return _with_trees(value, lambda tree: tree.to(device))


def _with_trees(value: Any, change: Callable[[Tree], Tree]) -> Any:
    """The same Tree, tuple or NamedTuple with every Tree in it changed."""
    if isinstance(value, Tree):
        return change(value)
    if isinstance(value, tuple):
        items = [_with_trees(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def waiting_tokens(state: Any) -> int:
    """Tokens whose gradients wait in the State for a later update."""
    return sum(value.tokens for value in fields_owned(state, Owner.OWN).values() if isinstance(value, Gradient))


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


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tree):
        return isinstance(theirs, Tree) and mine.same_bits(theirs)
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    return bool(mine == theirs)
