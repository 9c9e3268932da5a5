"""Corrections for stale updates at a hub: the known methods that asynchronous Local-SGD was compared with.

A worker's delta was computed from the weights that the hub dispatched it with. Its *staleness* is the number of updates that the
hub has applied since. A correction changes the delta, or leaves it out.

    Polynomial           (1 + staleness)**-power * delta                                         Xie et al., arXiv 1903.03934
      with a threshold   none, if staleness is beyond it
    DelayCompensation    delta + strength * delta * delta * (params - dispatched)                Zheng et al., arXiv 1609.08326

In the paper's experiments (Liu et al., arXiv 2401.09135) the first helps a little, and thresholds and compensation do not. It gives
power=0.5 and a threshold of 10, and no strength. Besides, every delta may have a constant weight (`weight_of`), the paper's
soup weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival
from atoll.optim.in_place import old_and_new, windows
from atoll.optim.schedules import LARGEST_FACTOR, at_least_zero

Weight: TypeAlias = float | Literal["1/k", "sqrt(k)/k"]
"""The factor of every delta: a number, or one that follows from the number of workers k."""


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """Scales an update down by its staleness.

    >>> [round(Polynomial(power=0.5).factor(staleness), 3) for staleness in (0, 1, 3, 8)]
    [1.0, 0.707, 0.5, 0.333]

    Args:
        power: the factor is (1 + staleness) to the power of minus this; 0 leaves every delta as it is.
        threshold: the greatest staleness that is still applied; None: any.
    """

    power: float = 0.5
    threshold: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        at_least_zero("power", self.power)
        if self.threshold is not None and self.threshold < 0:
            raise ConfigError(
                f"threshold={self.threshold}: a staleness is at least 0. Use 0 to apply only fresh updates, or None for all."
            )

    def factor(self, staleness: int) -> float:
        """Of a delta with this staleness."""
        return float((1 + staleness) ** -self.power)

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The scaled delta (the delta itself at a factor of 1); None beyond the threshold."""
        if self.threshold is not None and arrival.staleness > self.threshold:
            return None
        return weighted(arrival.delta, weight * self.factor(arrival.staleness))


@dataclass(frozen=True, kw_only=True)
class DelayCompensation:
    """Estimates the delta at the hub's present weights, with the delta's square in place of the curvature.

    Args:
        strength: the paper's λ; 0 leaves every delta as it is.
    """

    strength: float

    def __post_init__(self) -> None:
        check_types(self)
        at_least_zero("strength", self.strength)

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The corrected delta, in its own buffer if it is donated."""
        delta, moved = old_and_new(arrival.delta)
        square: Tensor | None = None
        for g, now, then, out, drift in windows(delta, params, arrival.dispatched, moved):
            square = torch.empty_like(drift) if square is None else square[: len(drift)]
            torch.sub(now, then, out=drift)
            torch.mul(g, g, out=square)
            torch.addcmul(g, square, drift, value=self.strength, out=out)
            if weight != 1:
                out.mul_(weight)
        return moved


def weighted(delta: Tree, weight: float) -> Tree:
    """The delta times its weight, in its own buffer if it is donated; itself if the weight is 1."""
    if weight == 1:
        return delta
    return delta.claim().mul_(weight) if delta.donated else delta * weight


def weight_of(weight: Weight, workers: int) -> float:
    """The factor of every delta, with this number of workers."""
    if isinstance(weight, str):
        return 1 / workers if weight == "1/k" else math.sqrt(workers) / workers
    return weight


def check_weight(weight: Weight) -> None:
    """Raises ConfigError for a number that cannot be a delta's weight."""
    if not isinstance(weight, str) and not 0 < weight <= LARGEST_FACTOR:
        raise ConfigError(
            f"weight={weight} must be a number above 0 and at most {LARGEST_FACTOR:g}. Use 1 to leave deltas as they are."
        )
