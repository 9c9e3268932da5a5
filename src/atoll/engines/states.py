"""What engines do with algorithms' States: look at what is shared in them, and hold it equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ExchangeFailed
from atoll.leaves import leaves
from atoll.protocols import Owner, fields_owned
from atoll.tree import Tree


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


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tree):
        return isinstance(theirs, Tree) and mine.same_bits(theirs)
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    return bool(mine == theirs)
