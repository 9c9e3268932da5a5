"""Gradient descent, plain and with momentum.

    m <- momentum * m + g
    heavy ball:   w <- w - lr * m
    Nesterov:     w <- w - lr * (g + momentum * m)

This is the Sutskever form, which `torch.optim.SGD` uses and the papers mean: with the momentum of before, Nesterov's step is
`lr * (momentum**2 * m + (1 + momentum) * g)`. Weight decay is coupled: it is added to the gradient and so passes through the
momentum. Each rule has the bits of torch's plain form; `add(other, alpha)` is there because torch rounds once at these places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from atoll.core.chunked_elementwise import elementwise
from atoll.core.config.type_checks import check_types
from atoll.core.flat_tree import Tree
from atoll.optim.in_place import check_layouts, fused_momentum, old_and_new, release_donated, rule_update, windows
from atoll.optim.schedules import Schedule, at, at_least_zero, below_one, check_lr


class SGDState(NamedTuple):
    step: int  # updates so far; the position on the schedule


class MomentumState(NamedTuple):
    step: int
    velocity: Tree  # the decaying sum of the gradients


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain gradient descent. As an outer rule with lr=1 it takes the mean of the islands' weights.

    Args:
        lr: learning rate: a number, or a schedule over the steps of this rule.
        weight_decay: share of a weight that is added to its gradient.
    """

    lr: float | Schedule
    weight_decay: float = 0.0
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_types(self)
        check_lr(self.lr)
        at_least_zero("weight_decay", self.weight_decay)

    def init(self, params: Tree) -> SGDState:
        return SGDState(step=0)

    @rule_update
    @elementwise
    def update(self, params: Tree, gradient: Tree, state: SGDState) -> tuple[Tree, SGDState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        return params.add(gradient, -at(self.lr, state.step)), SGDState(state.step + 1)

    def update_in_place(self, params: Tree, gradient: Tree, state: SGDState) -> tuple[Tree, SGDState]:
        """The bits of `update`, computed in the buffer of `params` if donated."""
        check_layouts(params, gradient)
        (old, new), lr = old_and_new(params), at(self.lr, state.step)
        for w, next_w, g, temporary in windows(old, new, gradient):
            torch.add(w, _decayed(g, w, self.weight_decay, temporary), alpha=-lr, out=next_w)
        release_donated(gradient, but=new)
        return new, SGDState(state.step + 1)


@dataclass(frozen=True, kw_only=True)
class _WithMomentum:
    """What heavy-ball and Nesterov momentum have in common: settings, state, and the step in place.

    Args:
        lr: learning rate: a number, or a schedule over the steps of this rule.
        momentum: share of the velocity that is kept from step to step.
        weight_decay: share of a weight that is added to its gradient.
    """

    lr: float | Schedule
    momentum: float = 0.9
    weight_decay: float = 0.0
    exact: ClassVar[bool] = True
    nesterov: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_types(self)
        check_lr(self.lr)
        below_one("momentum", self.momentum)
        at_least_zero("weight_decay", self.weight_decay)

    def init(self, params: Tree) -> MomentumState:
        return MomentumState(step=0, velocity=params.zeros())

    def update_in_place(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        """The bits of `update`, computed in the buffers of `state`, and of `params` if donated."""
        check_layouts(params, gradient, state.velocity)
        (old, new), velocity, lr = old_and_new(params), state.velocity.claim(), at(self.lr, state.step)
        done, flats = 0, (new.flat, gradient.flat, velocity.flat)
        if new is old:
            done = fused_momentum(*flats, lr=lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay)
        for w, next_w, g, m, temporary in windows(old, new, gradient, velocity, start=done):
            g = _decayed(g, w, self.weight_decay, temporary)
            m.mul_(self.momentum).add_(g)
            ahead = torch.add(g, m, alpha=self.momentum, out=temporary) if self.nesterov else m
            torch.add(w, ahead, alpha=-lr, out=next_w)
        release_donated(gradient, but=new)
        return new, MomentumState(state.step + 1, velocity)


@dataclass(frozen=True, kw_only=True)
class Momentum(_WithMomentum):
    """Gradient descent with heavy-ball momentum."""

    @rule_update
    @elementwise
    def update(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        velocity = (self.momentum * state.velocity).add_(gradient)
        return params.add(velocity, -at(self.lr, state.step)), MomentumState(state.step + 1, velocity)


@dataclass(frozen=True, kw_only=True)
class Nesterov(_WithMomentum):
    """Gradient descent with Nesterov momentum. The defaults are those that DiLoCo found best for its outer step."""

    lr: float | Schedule = 0.7
    nesterov: ClassVar[bool] = True

    @rule_update
    @elementwise
    def update(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        velocity = (self.momentum * state.velocity).add_(gradient)
        ahead = gradient.add(velocity, self.momentum)
        return params.add(ahead, -at(self.lr, state.step), out=ahead), MomentumState(state.step + 1, velocity)


def _with_decay(gradient: Tree, params: Tree, weight_decay: float) -> Tree:
    """The gradient of the loss plus `weight_decay / 2 * |params|**2`."""
    return gradient.add(params, weight_decay) if weight_decay else gradient


def _decayed(gradient: Tensor, params: Tensor, weight_decay: float, temporary: Tensor) -> Tensor:
    """`_with_decay` of a window, computed in `temporary`."""
    return torch.add(gradient, params, alpha=weight_decay, out=temporary) if weight_decay else gradient
