"""Updates that compute in the buffers of the weights and moments that they replace.

`rule.update` is pure: it keeps its arguments. Many rules also have `update_in_place`, which does the same work in the buffers of
the rule's state, and of `params` if these are donated; else the new weights lie in a buffer from the pool, because a hub's workers
may still read the old ones. It keeps nothing of the gradient; a donated gradient's buffer returns to the pool.

`update_in_place` takes a quarter (AdamW) to two thirds (Nesterov) of the time of `update`; with donated weights a sixth to a half,
and no further memory (benchmarks/hub_step.py). No algorithm chooses between the two. `@rule_update` does, by what the engine
donated, and `hub_algorithm` does for a hub, which owns its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from atoll.core.chunked_elementwise import CHUNK, trees_in
from atoll.core.flat_tree import Tree, empty
from atoll.core.memoize import once
from atoll.core.protocols import Arrival, AsyncAlgorithm

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")


@runtime_checkable
class InPlaceRule(Protocol):
    """A rule that can compute in place."""

    def init(self, params: Tree) -> Any: ...

    def update_in_place(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        """`update`, computed in the buffers of `state`, and of `params` if these are donated."""


def rule_update(update: F) -> F:
    """For a rule's `update`. Donated weights and state are updated in place by a rule with `exact = True`, whose `update_in_place`
    has the bits of `update`. Else islands of one process that hold the very same objects compute the update once."""

    @wraps(update)
    def updated(self: Any, params: Tree, gradient: Tree, state: Any) -> tuple[Tree, Any]:
        if params.donated and getattr(self, "exact", False) and all(tree.donated for tree in trees_in(state)):
            new: tuple[Tree, Any] = self.update_in_place(params, gradient, state)
            return new
        once_for_all: tuple[Tree, Any] = once(update, self, params, gradient, state)
        return once_for_all

    return cast(F, updated)


# ------------------------------------------------------------------------------------------------------------------ a hub's


@dataclass(frozen=True)
class HubRule:
    """A rule as a hub applies it: its state is the hub's own, so it is always updated in place."""

    rule: InPlaceRule
    gradients: list[Tree] = field(default_factory=list)
    """What the last update was computed from."""

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        self.gradients[:] = [gradient]
        return self.rule.update_in_place(params, gradient, state)


def hub_algorithm(algorithm: A, state: Any) -> A:
    """The algorithm with its rules updated in place, if its State declares fields that are donated; else itself."""
    if not (is_dataclass(algorithm) and is_dataclass(state) and any(f.metadata.get("donated") for f in fields(state))):
        return algorithm
    rules = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    in_place = {name: HubRule(rule) for name, rule in rules.items() if isinstance(rule, InPlaceRule)}
    return cast(A, replace(cast(Any, algorithm), **in_place))


class HubStep:
    """A hub's step for one arrival, in the buffers that the hub owns.

    A pure algorithm, which declares nothing donated, may read the delta more than once: it gets a plain handle.
    """

    def __init__(self, algorithm: AsyncAlgorithm[Any], state: Any) -> None:
        self._algorithm = hub_algorithm(algorithm, state)
        self._is_pure = self._algorithm is algorithm
        self._rules = [] if self._is_pure else [rule for rule in vars(self._algorithm).values() if isinstance(rule, HubRule)]

    def __call__(self, state: Any, arrival: Arrival) -> tuple[Any, list[Tree]]:
        """The next State, and Trees that nothing but this step needed."""
        delta = arrival.delta
        temporary = [delta] if delta.donated else []
        if self._is_pure:
            arrival = arrival._replace(delta=Tree(delta.layout, delta.flat))
        for rule in self._rules:
            rule.gradients.clear()
        state = self._algorithm.step(state, arrival)
        return state, [*temporary, *(tree for rule in self._rules for tree in rule.gradients if tree is not delta)]


# ---------------------------------------------------------------------------------------------------- what rules are made of


def kept(tree: Tree) -> Tree:
    """A Tree that an update leaves as it is: itself, or its buffer under a plain name if it is donated."""
    return tree.claim() if tree.donated else tree


def old_and_new(params: Tree) -> tuple[Tree, Tree]:
    """The weights to read, and those to write: the same buffer if `params` is donated, else one from the pool."""
    if params.donated:
        mine = params.claim()
        return mine, mine
    flat = params.flat
    return params, Tree(params.layout, empty(flat.numel(), flat.dtype, flat.device))


def check_layouts(*trees: Tree) -> None:
    """Refuse Trees that do not match or cannot be read, before any of them is claimed."""
    layouts = [tree.layout for tree in trees if tree.flat is not None]  # reading a Tree that was donated raises
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(f"these Trees have different layouts: {', '.join(map(repr, trees))}. A rule needs those of one model.")


def windows(*trees: Tree, start: int = 0) -> Iterator[list[Tensor]]:
    """Slices of the buffers side by side, small enough for a CPU's cache; the last of each row is a temporary of that size."""
    flats = [tree.flat[start:] for tree in trees]
    numel = flats[0].numel()
    size = min(CHUNK, numel) if flats[0].device.type == "cpu" else numel
    temporary = torch.empty(size, dtype=flats[0].dtype, device=flats[0].device)
    for at in range(0, numel, max(size, 1)):
        parts = [flat[at : at + size] for flat in flats]
        yield [*parts, temporary[: parts[0].numel()]]


def release_donated(gradient: Tree, but: Tree | None = None) -> None:
    """Return a donated gradient's buffer to the pool, unless it is that of `but`."""
    if gradient.donated and (but is None or gradient.flat.data_ptr() != but.flat.data_ptr()):
        gradient.release()
