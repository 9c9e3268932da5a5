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
from typing import NamedTuple, TypeVar

from torch import Tensor

from atoll.chunks import elementwise
from atoll.optim.checks import at_least_zero, below_one
from atoll.optim.schedules import Schedule, at, check_lr
from atoll.optim.taking import check_layouts, take, windows
from atoll.tree import Tree

T = TypeVar("T", Tree, Tensor)


class SGDState(NamedTuple):
    """Attributes:
    step: updates so far; the position on the schedule.
    """

    step: int


class MomentumState(NamedTuple):
    """Attributes:
    step: updates so far; the position on the schedule.
    velocity: the decaying sum of the gradients.
    """

    step: int
    velocity: Tree


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain gradient descent. As an outer rule with lr=1 it takes the mean of the islands' weights."""

    lr: float | Schedule
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_lr(self.lr)
        at_least_zero("weight_decay", self.weight_decay)

    def init(self, params: Tree) -> SGDState:
        return SGDState(step=0)

    @elementwise
    def update(self, params: Tree, gradient: Tree, state: SGDState) -> tuple[Tree, SGDState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        return params.add(gradient, -at(self.lr, state.step)), SGDState(state.step + 1)

    def update_taking(self, params: Tree, gradient: Tree, state: SGDState) -> tuple[Tree, SGDState]:
        """The bits of `update`, computed in the buffer of `params`, which can then no longer be read."""
        check_layouts(params, gradient)
        params, lr = take(params), at(self.lr, state.step)
        for w, g in windows(params, gradient):
            w.add_(_with_decay(g, w, self.weight_decay), alpha=-lr)
        return params, SGDState(state.step + 1)


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """Gradient descent with heavy-ball momentum."""

    lr: float | Schedule
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_lr(self.lr)
        below_one("momentum", self.momentum)
        at_least_zero("weight_decay", self.weight_decay)

    def init(self, params: Tree) -> MomentumState:
        return MomentumState(step=0, velocity=params.zeros())

    @elementwise
    def update(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        velocity = (self.momentum * state.velocity).give() + gradient
        return params.add(velocity, -at(self.lr, state.step)), MomentumState(state.step + 1, velocity)

    def update_taking(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        """The bits of `update`, computed in the buffers of `params` and `state`, which can then no longer be read."""
        check_layouts(params, gradient, state.velocity)
        params, velocity, lr = take(params), take(state.velocity), at(self.lr, state.step)
        for w, g, m in windows(params, gradient, velocity):
            m.mul_(self.momentum).add_(_with_decay(g, w, self.weight_decay))
            w.add_(m, alpha=-lr)
        return params, MomentumState(state.step + 1, velocity)


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """Gradient descent with Nesterov momentum. The defaults are those that DiLoCo found best for its outer step."""

    lr: float | Schedule = 0.7
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_lr(self.lr)
        below_one("momentum", self.momentum)
        at_least_zero("weight_decay", self.weight_decay)

    def init(self, params: Tree) -> MomentumState:
        return MomentumState(step=0, velocity=params.zeros())

    @elementwise
    def update(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        gradient = _with_decay(gradient, params, self.weight_decay)
        velocity = (self.momentum * state.velocity).give() + gradient
        ahead = gradient.add(velocity, self.momentum)
        return params.add(ahead.give(), -at(self.lr, state.step)), MomentumState(state.step + 1, velocity)

    def update_taking(self, params: Tree, gradient: Tree, state: MomentumState) -> tuple[Tree, MomentumState]:
        """The bits of `update`, computed in the buffers of `params` and `state`, which can then no longer be read."""
        check_layouts(params, gradient, state.velocity)
        params, velocity, lr = take(params), take(state.velocity), at(self.lr, state.step)
        for w, g, m in windows(params, gradient, velocity):
            g = _with_decay(g, w, self.weight_decay)
            m.mul_(self.momentum).add_(g)
            w.add_(g.add(m, alpha=self.momentum), alpha=-lr)
        return params, MomentumState(state.step + 1, velocity)


def _with_decay(gradient: T, params: T, weight_decay: float) -> T:
    """The gradient of the loss plus `weight_decay / 2 * |params|**2`."""
    return gradient.add(params, alpha=weight_decay) if weight_decay else gradient
