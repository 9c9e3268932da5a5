"""What a hub does to an update that is late: the known remedies that asynchronous Local-SGD was compared with.

A worker's delta was computed from the weights that the hub dispatched it with. Its *staleness* is the number of updates that the
hub has applied since. A correction turns the delta into what is applied now, or leaves it out.

    Polynomial           (1 + staleness)**-power * delta                                         Xie et al., arXiv 1903.03934
      with a threshold   none, if staleness is beyond it
    DelayCompensation    delta + strength * delta * delta * (params - dispatched)                Zheng et al., arXiv 1609.08326

In the paper's experiments (Liu et al., arXiv 2401.09135) the first helps a little, and thresholds and compensation do not. It gives
power=0.5 and a threshold of 10, and no strength.

Apart from all that, every delta may have a constant weight (`weight_of`), the paper's soup weight.
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
from atoll.optim.schedules import at_least_zero

Weight: TypeAlias = float | Literal["1/k", "sqrt(k)/k"]
"""What every delta is multiplied by: a number, or one that follows from the number of workers k."""


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """Makes an update smaller the later it is.

    >>> [round(Polynomial(power=0.5).factor(staleness), 3) for staleness in (0, 1, 3, 8)]
    [1.0, 0.707, 0.5, 0.333]

    Attributes:
        power: how fast; 0 leaves every delta as it is.
        threshold: the greatest staleness that is still applied; None: any.
    """

    power: float = 0.5
    threshold: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        at_least_zero("power", self.power)
        if self.threshold is not None and self.threshold < 0:
            raise ConfigError(
                f"threshold={self.threshold}: no update is so early. Use 0 to apply only those that missed none, or None for all."
            )

    def factor(self, staleness: int) -> float:
        """What a delta of this staleness is multiplied by."""
        return float((1 + staleness) ** -self.power)

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The smaller delta (the delta itself, if it is not late); none beyond the threshold."""
        if self.threshold is not None and arrival.staleness > self.threshold:
            return None
        return weighted(arrival.delta, weight * self.factor(arrival.staleness))


@dataclass(frozen=True, kw_only=True)
class DelayCompensation:
    """Estimates what the delta would be at the hub's present weights, with its own square in place of the curvature.

    Attributes:
        strength: how far the estimate is followed; the paper's λ. 0 leaves every delta as it is.
    """

    strength: float

    def __post_init__(self) -> None:
        check_types(self)
        at_least_zero("strength", self.strength)

    def correct(self, params: Tree, arrival: Arrival, weight: float = 1.0) -> Tree | None:
        """The delta, moved along with the weights; in its own buffer, if it is donated."""
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
    """What every delta is multiplied by, among this number of workers.

    >>> weight_of(0.25, workers=16), weight_of("1/k", workers=16), weight_of("sqrt(k)/k", workers=16)
    (0.25, 0.0625, 0.25)
    """
    check_weight(weight)
    if workers < 1:
        raise ConfigError(f"workers={workers}: a weight is shared among at least 1 worker. Count those that are there.")
    if isinstance(weight, str):
        return 1 / workers if weight == "1/k" else math.sqrt(workers) / workers
    return weight


def check_weight(weight: Weight) -> None:
    """Refuse what cannot be a delta's weight."""
    if isinstance(weight, str):
        if weight not in ("1/k", "sqrt(k)/k"):
            raise ConfigError(f"weight={weight!r} is neither '1/k' nor 'sqrt(k)/k'. Use one of them, or a number above 0.")
    elif not (math.isfinite(weight) and weight > 0):
        raise ConfigError(
            f"weight={weight} must be a finite number above 0: a delta of no weight teaches nothing. 1 is as it came."
        )
