"""For the twins of the rules that compute in place.

`update` keeps its arguments. Where nobody will read the state again, `update_taking` does the same work in the state's buffers,
which can then no longer be read. Weights are another matter: a hub's workers may still hold those that they were sent off with. So
`params` is computed in place only if it was marked by `give()`; else the new weights lie in a recycled buffer. The gradient can be
read as before, and a twin keeps nothing of it; if it was given, it goes back into circulation.

It takes a quarter (AdamW) to two thirds (Nesterov) of the time of `update`; with weights that were given a sixth to a half, and no
further memory. A step costs no more than a copy of each buffer that it touches, or a little (benchmarks/hub_step.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.flat_tree import Tree, empty
from atoll.core.memoize import once
from atoll.core.protocols import Rule


@runtime_checkable
class Taking(Protocol):
    """A rule that has such a twin."""

    def update_taking(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        """`update`, computed in the buffers of `state`, and of `params` if it was given."""


@runtime_checkable
class TakingExactly(Taking, Protocol):
    """One whose twin has the bits of `update`. Adam's has not: it is torch's fused kernel, which rounds otherwise."""

    exact: ClassVar[bool]


def advance(rule: Rule, params: Tree, gradient: Tree, state: Any, *, taking: bool) -> tuple[Tree, Any]:
    """A step of a rule, with the bits of `update`: in the buffers of `params` and `state`, if that is allowed and the rule can."""
    if taking and isinstance(rule, TakingExactly):
        return rule.update_taking(params.give(), gradient, state)
    return once(_update, rule, params, gradient, state)


def _update(rule: Rule, params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
    return rule.update(params, gradient, state)


def take(tree: Tree) -> Tree:
    """The same buffer under a new name, to be written to. `tree` itself can no longer be read."""
    given = tree.give()
    return Tree(given.layout, given.flat)


def kept(tree: Tree) -> Tree:
    """A Tree that goes on as it is: itself, or under a plain name if it was given (what was given is read once)."""
    return take(tree) if tree.spare else tree


def old_and_new(params: Tree) -> tuple[Tree, Tree]:
    """The weights to read, and those to write: the same buffer if `params` was given, else a fresh one."""
    if params.spare:
        taken = take(params)
        return taken, taken
    flat = params.flat
    return params, Tree(params.layout, empty(flat.numel(), flat.dtype, flat.device))


def check_layouts(*trees: Tree) -> None:
    """Refuse Trees that do not match or cannot be read. It comes before anything is taken, so that nothing is lost."""
    layouts = [tree.layout for tree in trees if tree.flat is not None]  # reading one that was given away raises
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(f"these Trees have different layouts: {', '.join(map(repr, trees))}. A rule needs those of one model.")


def windows(*trees: Tree, start: int = 0) -> Iterator[list[Tensor]]:
    """The buffers side by side, as much of them at a time as stays in cache; and last, as much room for what is passing."""
    flats = [tree.flat[start:] for tree in trees]
    numel = flats[0].numel()
    size = min(CHUNK, numel) if flats[0].device.type == "cpu" else numel
    room = torch.empty(size, dtype=flats[0].dtype, device=flats[0].device)
    for at in range(0, numel, max(size, 1)):
        parts = [flat[at : at + size] for flat in flats]
        yield [*parts, room[: parts[0].numel()]]


def release_given(*trees: Tree, but: Tree | None = None) -> None:
    """Put those that were given back into circulation, unless their memory is that of `but`."""
    for tree in trees:
        if tree.spare and (but is None or tree.flat.data_ptr() != but.flat.data_ptr()):
            tree.release()
