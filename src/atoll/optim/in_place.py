"""Updates that compute in the buffers of the weights and moments that they replace.

`rule.update` is pure. Many rules also have `update_in_place`, which computes in the buffers of the rule's state, and of `params` if
these are donated. Else it takes a buffer from the pool for the new weights, because a hub's workers may still read the old ones. A
donated gradient's buffer returns to the pool.

`update_in_place` takes a quarter (AdamW) to two thirds (Nesterov) of the time of `update`; with donated weights a sixth to a half,
and no further memory (benchmarks/hub_step.py). No algorithm chooses between the two. `@rule_update` does, by what the engine
donated, and `HubStep` for a hub, which owns its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache, partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.flat_tree import Tree, empty
from atoll.core.memoize import once
from atoll.core.nested_trees import trees_in
from atoll.core.protocols import Arrival, AsyncAlgorithm

F = TypeVar("F", bound=Callable[..., Any])


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
    gradients: list[Tree] = field(default_factory=list)  # of the last update

    def init(self, params: Tree) -> Any:
        return self.rule.init(params)

    def update(self, params: Tree, gradient: Tree, state: Any, /) -> tuple[Tree, Any]:
        self.gradients[:] = [gradient]
        return self.rule.update_in_place(params, gradient, state)


class HubStep:
    """A hub's step for one arrival. If the State declares donated fields, rules update in place, in buffers that the hub owns.

    Else the algorithm is pure and may read the delta more than once: it gets a plain handle.
    """

    def __init__(self, algorithm: AsyncAlgorithm[Any], state: Any) -> None:
        donates = is_dataclass(algorithm) and is_dataclass(state) and any(f.metadata.get("donated") for f in fields(state))
        settings = {f.name: getattr(algorithm, f.name) for f in fields(cast(Any, algorithm))} if donates else {}
        rules = {name: HubRule(rule) for name, rule in settings.items() if isinstance(rule, InPlaceRule)}
        self._algorithm: Any = replace(cast(Any, algorithm), **rules) if donates else algorithm
        self._rules, self._is_pure = list(rules.values()), not donates

    def __call__(self, state: Any, arrival: Arrival) -> tuple[Any, list[Tree]]:
        """The next State, and the temporary Trees of this step."""
        delta = arrival.delta
        temporary = [delta] if delta.donated else []
        if self._is_pure:
            arrival = arrival._replace(delta=Tree(delta.layout, delta.flat))
        for rule in self._rules:
            rule.gradients.clear()
        state = self._algorithm.step(state, arrival)
        return state, [*temporary, *(tree for rule in self._rules for tree in rule.gradients if tree is not delta)]


# ------------------------------------------------------------------------------------------------- building blocks of rules


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


# ---------------------------------------------------------------------------------------------------- torch's fused kernels
# A fused kernel reads and writes each number once: AdamW's takes the time of about two copies, the readable form that of ten. It
# rounds differently in the last elements, which fill no vector, so a shard would not have the bits of the whole. Those elements
# are padded to a whole vector (AdamW), or updated by the readable form (SGD).

VECTOR = 64  # elements; a multiple of every vector width


class Moments(NamedTuple):
    """Flat buffers of one length (or windows on them). All but the gradient are changed in place."""

    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


def fused_adamw(
    moments: Moments,
    ranges: Iterable[tuple[int, int]],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's update number `step` (the first is 1) on these ranges of the buffers."""
    bodies, ends = _cut(moments, ranges)
    padded = [Moments(*(pad(end, (0, VECTOR - end.numel())) for end in row)) for row in ends]
    rows = bodies + padded
    if not rows:
        return
    steps = [_number(float(step), moments.weights.device)] * len(rows)
    kernel = partial(torch._fused_adamw_, *map(list, zip(*rows, strict=True)), [], steps, amsgrad=False, maximize=False)
    kernel(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps)
    for row, updated in zip(ends, padded, strict=True):
        for end, values in ((row.weights, updated.weights), (row.mean, updated.mean), (row.square, updated.square)):
            end.copy_(values[: end.numel()])


@lru_cache(maxsize=4)
def _number(value: float, device: torch.device) -> Tensor:
    """The count of steps, which the kernel only reads. Islands of one process share it, since each costs a GPU a launch."""
    return torch.full((), value, device=device)


def _cut(moments: Moments, ranges: Iterable[tuple[int, int]]) -> tuple[list[Moments], list[Moments]]:
    """The whole vectors of each range, and the rest at its end. On a GPU all of a range is rounded alike."""
    bodies, ends = [], []
    for start, stop in ranges:
        middle = stop - (stop - start) % VECTOR if moments.weights.device.type == "cpu" else stop
        if start < middle:
            bodies.append(Moments(*(flat[start:middle] for flat in moments)))
        if middle < stop:
            ends.append(Moments(*(flat[middle:stop] for flat in moments)))
    return bodies, ends


_fused_sgd = partial(torch._fused_sgd_, dampening=0.0, maximize=False, is_first_step=False)


def fused_momentum(
    weights: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> int:
    """A step of SGD with momentum in place, on whole vectors. Returns the number of elements, from the first on, that it updated:
    0 where the kernel has not the bits of the readable form."""
    if weights.device.type != "cpu" or weights.dtype not in (torch.float32, torch.float64) or not _rounds_as_the_readable_form():
        return 0
    whole = weights.numel() - weights.numel() % VECTOR
    if whole:
        buffers = ([buffer[:whole]] for buffer in (weights, gradient, velocity))
        _fused_sgd(*buffers, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    return whole


@cache
def _rounds_as_the_readable_form() -> bool:
    """The kernel's rounding depends on how torch was compiled. It is tried once, on numbers of which a fourth would differ."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        w, g, m = torch.randn(3, 16 * VECTOR, generator=generator, dtype=dtype)
        decayed = torch.add(g, w, alpha=0.3)
        moved = m.mul(0.9).add_(decayed)
        ahead = torch.add(decayed, moved, alpha=0.9)
        expected = torch.add(w, ahead, alpha=-0.7)
        _fused_sgd([w], [g], [m], lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.3)
        if not (torch.equal(m, moved) and torch.equal(w, expected)):
            return False
    return True
