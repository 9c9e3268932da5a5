"""Rules over several arrivals, for a hub that takes a step at every arrival.

With momentum at every arrival, k deltas in turn move the weights much further than one step on their mean: four equal ones 12.1
times their length instead of 1.9 (Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, eq. 5).
Both rules refresh the momentum once for `period` or `size` arrivals, which make a period.

**Delayed Nesterov** (Algorithm 3) moves at every arrival, by the gradient alone or with a share of the old momentum:

    total <- total + g
    last arrival of a period:  m <- momentum * m + total / period
                               w <- w - lr / period * (g + period * (1 - (period - 1) * activation) * momentum * m)
                               total <- 0
    every other arrival:       w <- w - lr / period * (g + period * activation * momentum * m)

    paper   ε    β          N        c            Δ       t
    here    lr   momentum   period   activation   total   step

The paper writes `w - ε (c β m + g / N)`. Here `1 / N` is drawn out: it saves a pass over the gradient, and in periods of one
arrival the operations are those of Nesterov. Without activation, the weights at a period's end are those of one Nesterov step on
the period's mean.

**Buffered** (the paper's Async Buffer, after FedBuff, Nguyen et al., arXiv 2106.06639) moves only at a period's end, by one step of
any rule on the mean. Both hold one sum, never the gradients themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from atoll.core.chunked_elementwise import elementwise
from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Rule
from atoll.optim.in_place import InPlaceRule, check_layouts, kept, old_and_new, release_donated, rule_update, windows
from atoll.optim.schedules import Schedule, at, below_one, check_lr

# ------------------------------------------------------------------------------------------------------ Delayed Nesterov


class DelayedState(NamedTuple):
    step: int  # arrivals so far
    velocity: Tree  # the decaying sum of the periods' means
    total: Tree  # the sum of the gradients of the period so far; zero at its start


@dataclass(frozen=True, kw_only=True)
class DelayedNesterov:
    """Nesterov momentum that is refreshed once per period of arrivals, while every arrival moves the weights.

    `lr` is that of a whole period, as in synchronous training. The position on a schedule is the number of whole periods so far, so
    that all arrivals of a period have one rate.

    Args:
        lr: learning rate of a whole period: a number, or a schedule over periods.
        momentum: share of the velocity that is kept from period to period.
        period: arrivals from one refreshment of the momentum to the next; the number of workers, or a multiple of it.
        activation: share of the old momentum that each arrival but the last applies; the last applies the rest.
    """

    lr: float | Schedule = 0.7
    momentum: float = 0.9
    period: int
    activation: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        check_lr(self.lr)
        below_one("momentum", self.momentum)
        if self.period < 1:
            raise ConfigError(
                f"period={self.period}: a period has at least 1 arrival. "
                f"Use the number of workers, or 1 to refresh the momentum at every arrival."
            )
        if not 0 <= self.activation <= 1 / self.period:
            raise ConfigError(
                f"activation={self.activation} is outside [0, 1/period] = [0, {1 / self.period:g}]: "
                f"the shares that {self.period} arrivals apply add up to the whole momentum, and none is negative. "
                f"Use a value in between, such as the paper's default of 0."
            )

    def init(self, params: Tree) -> DelayedState:
        return DelayedState(step=0, velocity=params.zeros(), total=params.zeros())

    @rule_update
    def update(self, params: Tree, gradient: Tree, state: DelayedState) -> tuple[Tree, DelayedState]:
        number = state.step % self.period
        rate = at(self.lr, state.step // self.period) / self.period
        if number == self.period - 1:
            params, velocity, total = self._last(params, gradient, state.velocity, state.total, number, rate)
        else:
            velocity = kept(state.velocity)
            params, total = self._other(params, gradient, velocity, state.total, number, rate)
        return params, DelayedState(state.step + 1, velocity, total)

    @elementwise
    def _last(self, params: Tree, gradient: Tree, velocity: Tree, total: Tree, number: int, rate: float) -> tuple[Tree, Tree, Tree]:
        total = _added(total, gradient, number)
        velocity = (self.momentum * velocity).add_(total, 1 / self.period)
        ahead = gradient.add(velocity, self._share(number) * self.momentum)
        return params.add(ahead, -rate, out=ahead), velocity, total.zeros()

    @elementwise
    def _other(self, params: Tree, gradient: Tree, velocity: Tree, total: Tree, number: int, rate: float) -> tuple[Tree, Tree]:
        ahead = gradient.add(velocity, self._share(number) * self.momentum) if self.activation else gradient
        return params.add(ahead, -rate), _added(total, gradient, number)

    def _share(self, number: int) -> float:
        """The share of the momentum that an arrival applies, in units of a period's gradient: `period` over a whole period."""
        last = number == self.period - 1
        return self.period * (1 - (self.period - 1) * self.activation if last else self.activation)

    def update_in_place(self, params: Tree, gradient: Tree, state: DelayedState) -> tuple[Tree, DelayedState]:
        """The bits of `update`, computed in the buffers of `state`, and of `params` if donated."""
        check_layouts(params, gradient, state.velocity, state.total)
        (old, new), velocity, total = old_and_new(params), state.velocity.claim(), state.total.claim()
        number = state.step % self.period
        rate, share = at(self.lr, state.step // self.period) / self.period, self._share(number) * self.momentum
        last = number == self.period - 1
        for w, next_w, g, m, t, temporary in windows(old, new, gradient, velocity, total):
            if last:
                m.mul_(self.momentum).add_(torch.add(t, g, out=temporary) if number else g, alpha=1 / self.period)
                t.zero_()
            elif number:
                t.add_(g)
            else:
                t.copy_(g)
            ahead = torch.add(g, m, alpha=share, out=temporary) if last or self.activation else g
            torch.add(w, ahead, alpha=-rate, out=next_w)
        release_donated(gradient, but=new)
        return new, DelayedState(state.step + 1, velocity, total)


# -------------------------------------------------------------------------------------------------------------- Buffered


class BufferedState(NamedTuple):
    waiting: int  # the number of gradients in the sum
    total: Tree  # their sum, in order of arrival; zero at a period's start
    inner: Any  # the rule's own state


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """Adds up `size` gradients, then takes one step of `rule` on their mean. In between the weights do not move.

    Gradients that arrive in rank order have the bits of a synchronous mean. A schedule of `rule` counts one step per period.

    Args:
        rule: applied to the mean of the gradients.
        size: gradients per step of the rule.
    """

    rule: Rule
    size: int

    def __post_init__(self) -> None:
        check_types(self)
        if self.size < 1:
            raise ConfigError(
                f"size={self.size}: a buffer holds at least 1 gradient. Use the number of workers, or 1 to step at every arrival."
            )
        if isinstance(self.rule, Buffered):
            raise ConfigError(
                f"rule={self.rule!r} is itself buffered, within a buffer of {self.size}. "
                f"Use one Buffered with size={self.size * self.rule.size}, which has the same mean."
            )

    def init(self, params: Tree) -> BufferedState:
        return BufferedState(waiting=0, total=params.zeros(), inner=self.rule.init(params))

    @rule_update
    def update(self, params: Tree, gradient: Tree, state: BufferedState) -> tuple[Tree, BufferedState]:
        if state.waiting + 1 < self.size:
            return kept(params), BufferedState(state.waiting + 1, _added(state.total, gradient, state.waiting), state.inner)
        mean, total = self._mean(gradient, state.total, state.waiting)
        params, inner = self.rule.update(params, mean, state.inner)
        return params, BufferedState(0, total, inner)

    @elementwise
    def _mean(self, gradient: Tree, total: Tree, number: int) -> tuple[Tree, Tree]:
        """The period's mean, and an empty sum."""
        return _added(total, gradient, number).div_(self.size), total.zeros()

    def update_in_place(self, params: Tree, gradient: Tree, state: BufferedState) -> tuple[Tree, BufferedState]:
        """The bits of `update`, computed in the buffers of `state`, and of `params` if donated.

        The step itself is the rule's `update_in_place`, with its bits; for a rule without one, this is `update`.
        """
        check_layouts(params, gradient, state.total)
        last = state.waiting + 1 == self.size
        if not isinstance(self.rule, InPlaceRule):
            return self.update(params, gradient, state)
        total = state.total.claim()
        for g, t, _ in windows(gradient, total):
            if state.waiting:
                t.add_(g)
            else:
                t.copy_(g)
            if last:
                t.div_(self.size)
        release_donated(gradient)
        if not last:
            return kept(params), BufferedState(state.waiting + 1, total, state.inner)
        params, inner = self.rule.update_in_place(params, total, state.inner)
        total.flat.zero_()
        return params, BufferedState(0, total, inner)


def _added(total: Tree, gradient: Tree, number: int) -> Tree:
    """The sum with this gradient. The first of a period is copied: added to zero, a -0.0 would lose its sign."""
    return total + gradient if number else gradient.copy()
