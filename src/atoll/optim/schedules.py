"""Learning-rate schedules: values that give the learning rate of each step.

Steps are counted from 0, and beyond its end a schedule stays at its last value. The asynchronous paper's eq. (3) warms up with
`step / warmup`, which gives the first step a learning rate of 0 and so wastes its batch. Here it is `(step + 1) / warmup`: the
first step already moves, and the last step of the warm-up has the full rate.

>>> schedule = Cosine(lr=1.0, steps=8, warmup=4, floor=0.2)
>>> [round(schedule(step), 3) for step in range(10)]
[0.25, 0.5, 0.75, 1.0, 1.0, 0.883, 0.6, 0.317, 0.2, 0.2]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError

_FLOAT32_MAX = 3.4e38
LARGEST_FACTOR = 1e18
"""Of a number that a rule multiplies by another, or divides by a small rest such as 1 - beta, before float32 holds it."""


def at_least_zero(name: str, value: float) -> None:
    """Raises ConfigError unless this can be a rate or a small constant."""
    if not 0 <= value < _FLOAT32_MAX:
        raise ConfigError(f"{name}={value} must be a number of at least 0 that fits into float32. Use 0 to switch it off.")


def below_one(name: str, value: float) -> None:
    """Raises ConfigError unless this can be the decay of an average."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} is outside [0, 1): the average would never fade. 0.9 is usual, 0 keeps nothing.")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same learning rate at every step. (For a warm-up before it, use WSD with decay=0.)

    Args:
        lr: the learning rate.
    """

    lr: float

    def __post_init__(self) -> None:
        check_types(self)
        at_least_zero("lr", self.lr)

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up to `lr`, then half a cosine down to `floor`.

    Args:
        lr: the peak.
        steps: the whole length, warm-up included; then the rate is `floor`. None: the engine fills in the Run's.
        warmup: steps of the warm-up.
        floor: the last rate; give it a small positive value where a shard may be trained beyond `steps`.
    """

    lr: float
    steps: int | None = None
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        _check(self.lr, self.steps, self.floor)
        if not 0 <= self.warmup <= (self.warmup if self.steps is None else self.steps):
            raise ConfigError(f"warmup={self.warmup} is outside [0, steps={self.steps}]. Shorten the warm-up, or train for longer.")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        steps = _length(self.steps)
        if step >= steps:
            return self.floor
        ratio = (step - self.warmup) / (steps - self.warmup)
        return self.floor + 0.5 * (self.lr - self.floor) * (1 + math.cos(math.pi * ratio))


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, decay: up in a line, long at `lr`, down in a line to `floor`.

    Unlike a cosine, the stable part can be prolonged when training is: only the decay depends on the end.

    >>> schedule = WSD(lr=1.0, steps=8, warmup=2, decay=4)
    >>> [schedule(step) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]

    Args:
        lr: the stable learning rate.
        steps: the whole length; then the rate is `floor`. None: the engine fills in the Run's.
        warmup: steps of the warm-up.
        decay: steps of the decay, at the end; with 0 the rate stays at `lr` for ever.
        floor: the last learning rate.
    """

    lr: float
    steps: int | None = None
    warmup: int = 0
    decay: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        _check(self.lr, self.steps, self.floor)
        if self.warmup < 0 or self.decay < 0 or (self.steps is not None and self.warmup + self.decay > self.steps):
            raise ConfigError(
                f"warmup={self.warmup} and decay={self.decay} do not fit into steps={self.steps}: "
                f"neither may be negative, nor both together longer than the whole. Shorten one, or train for longer."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        left = max(_length(self.steps) - step, 0)
        return self.lr if left >= self.decay else self.floor + (self.lr - self.floor) * left / self.decay


Schedule: TypeAlias = Constant | Cosine | WSD


def at(lr: float | Schedule, step: int) -> float:
    """The learning rate at a step, counted from 0."""
    return lr(step) if isinstance(lr, Schedule) else lr


def check_lr(lr: float | Schedule) -> None:
    """Raises ConfigError unless this can be a learning rate. A schedule has checked itself."""
    if not isinstance(lr, Schedule):
        at_least_zero("lr", lr)


def _length(steps: int | None) -> int:
    if steps is None:
        raise ConfigError("steps=None: this schedule takes its length from a Run, and there is no Run here. Give it steps.")
    return steps


def _check(lr: float, steps: int | None, floor: float) -> None:
    at_least_zero("lr", lr)
    if steps is not None and steps < 1:
        raise ConfigError(f"steps={steps}: a schedule needs at least 1 step. Give the number of steps of the whole training.")
    if not 0 <= floor <= lr:
        raise ConfigError(f"floor={floor} is outside [0, lr={lr}]. Use 0 to end at 0, or lr to stay at lr.")
