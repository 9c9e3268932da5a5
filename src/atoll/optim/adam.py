"""Adam and AdamW.

    m <- b1 * m + (1 - b1) * g
    v <- b2 * v + (1 - b2) * g**2
    w <- w - lr * m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)          AdamW first: w <- w * (1 - lr * weight_decay)

    here   betas = (b1, b2)    state.mean = m    state.square = v    state.step = t - 1

Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101. Both have the bits of torch's plain form.
The weights that decay are ranges of the buffer. A piece has its whole tensor's shape, so a chunk or a shard decays as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from atoll.core.chunked_elementwise import elementwise
from atoll.core.config.type_checks import check_types, shown
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.optim.in_place import Moments, check_layouts, fused_adamw, release_donated, rule_update
from atoll.optim.schedules import LARGEST_FACTOR, Schedule, at, at_least_zero, below_one, check_lr

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of a buffer, as (start, stop), in order


class AdamState(NamedTuple):
    step: int  # updates so far; the position on the schedule
    mean: Tree  # the fading mean of the gradients
    square: Tree  # the fading mean of their squares


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, without weight decay. As an outer rule DiLoCo found it stable only with a large eps of 0.1.

    Args:
        lr: learning rate: a number, or a schedule over the steps of this rule.
        betas: decay of the two moments: of the gradient, and of its square.
        eps: added to the root of the second moment.
    """

    lr: float | Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_types(self)
        _check(self.lr, self.betas, self.eps)

    def init(self, params: Tree) -> AdamState:
        return AdamState(step=0, mean=params.zeros(), square=params.zeros())

    @rule_update
    @elementwise
    def update(self, params: Tree, gradient: Tree, state: AdamState) -> tuple[Tree, AdamState]:
        return _adam(params, gradient, state, at(self.lr, state.step), self.betas, self.eps, out=None)

    def update_in_place(self, params: Tree, gradient: Tree, state: AdamState) -> tuple[Tree, AdamState]:
        """`update` to within rounding, by torch's fused kernel in the buffers of `state`, and of `params` if donated."""
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=0.0).update_in_place(params, gradient, state)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay. The defaults are DiLoCo's inner optimizer.

    Args:
        lr: learning rate: a number, or a schedule over the steps of this rule.
        betas: decay of the two moments: of the gradient, and of its square.
        eps: added to the root of the second moment.
        weight_decay: share of a weight, times the learning rate, that each step subtracts.
        decay: which weights decay: `matrices`, tensors of two or more dimensions (no biases, no norms), or `all`.
    """

    lr: float | Schedule = 4e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"

    def __post_init__(self) -> None:
        if self.decay not in ("matrices", "all"):
            raise ConfigError(
                f'decay={shown(self.decay)} is neither "matrices" nor "all". To let nothing decay, set weight_decay=0.'
            )
        check_types(self)
        _check(self.lr, self.betas, self.eps, self.weight_decay)

    def init(self, params: Tree) -> AdamState:
        return AdamState(step=0, mean=params.zeros(), square=params.zeros())

    @rule_update
    @elementwise
    def update(self, params: Tree, gradient: Tree, state: AdamState) -> tuple[Tree, AdamState]:
        lr = at(self.lr, state.step)
        shrunk = self._shrink(params, 1 - lr * self.weight_decay)
        return _adam(shrunk, gradient, state, lr, self.betas, self.eps, out=None if shrunk is params else shrunk)

    def update_in_place(self, params: Tree, gradient: Tree, state: AdamState) -> tuple[Tree, AdamState]:
        """`update` to within rounding, by torch's fused kernel in the buffers of `state`, and of `params` if donated.

        The kernel overwrites the old weights: those that are not donated are copied first. Its bits differ from those of `update`,
        so an engine uses it always or never. A shard gets the bits of the whole.
        """
        check_layouts(params, gradient, state.mean, state.square)
        params = params.claim() if params.donated else params.copy()
        new = AdamState(state.step + 1, state.mean.claim(), state.square.claim())
        buffers = Moments(params.flat, gradient.flat, new.mean.flat, new.square.flat)
        lr, decaying = at(self.lr, state.step), self.ranges(params.layout)
        for ranges, rate in ((decaying, self.weight_decay), (complement(decaying, params.numel), 0.0)):
            fused_adamw(buffers, ranges, step=new.step, lr=lr, betas=self.betas, eps=self.eps, weight_decay=rate)
        release_donated(gradient, but=params)
        return params, new

    def ranges(self, layout: Layout) -> Ranges:
        """Where in the buffer weights decay, as (start, stop)."""
        if not self.weight_decay:
            return ()
        return matrices(layout) if self.decay == "matrices" else ((0, layout.numel),)

    def _shrink(self, params: Tree, factor: float) -> Tree:
        """`params * factor` where weights decay, and `params` elsewhere."""
        ranges = self.ranges(params.layout)
        if not ranges:
            return params
        if ranges == ((0, params.numel),):
            return params * factor
        shrunk = params.copy()
        for start, stop in ranges:
            shrunk.flat[start:stop].mul_(factor)
        return shrunk


@lru_cache(maxsize=4096)
def matrices(layout: Layout) -> Ranges:
    """The ranges of the buffer that belong to tensors with two or more dimensions; neighbours are one range."""
    ranges: list[tuple[int, int]] = []
    start = 0
    for piece in layout.pieces:
        if len(piece.shape) >= 2 and piece.count:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + piece.count))
        start += piece.count
    return tuple(ranges)


def complement(ranges: Ranges, numel: int) -> Ranges:
    """The other ranges of a buffer of this length."""
    edges = [0, *(edge for pair in ranges for edge in pair), numel]
    return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def _adam(
    params: Tree, gradient: Tree, state: AdamState, lr: float, betas: tuple[float, float], eps: float, out: Tree | None
) -> tuple[Tree, AdamState]:
    """The equations at the top of this file, in torch's order of operations. `out` receives the new weights."""
    b1, b2 = betas
    t = state.step + 1
    mean = state.mean.lerp(gradient, 1 - b1)
    decayed = b2 * state.square
    square = decayed.addcmul(gradient, gradient, 1 - b2, out=decayed)
    root = square.sqrt().div_((1 - b2**t) ** 0.5)  # not math.sqrt: it rounds otherwise than torch's power
    next_params = params.addcdiv(mean, root.add_(eps), -lr / (1 - b1**t), out=out)
    return next_params, AdamState(t, mean, square)


def _check(lr: float | Schedule, betas: tuple[float, float], eps: float, weight_decay: float = 0.0) -> None:
    check_lr(lr)
    below_one("betas[0]", betas[0])
    below_one("betas[1]", betas[1])
    at_least_zero("eps", eps)
    at_least_zero("weight_decay", weight_decay)
    peak: Any = getattr(lr, "lr", lr)
    for name, value in (("lr", peak), ("weight_decay", weight_decay)):
        if not callable(value) and float(value) > LARGEST_FACTOR:  # a user's schedule may have no peak
            raise ConfigError(f"{name}={value} must be at most {LARGEST_FACTOR:g}: Adam's rates are quotients and products of it.")
