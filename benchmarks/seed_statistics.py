"""Figures over seeds: mean and spread, and when a difference is one.

The rule, everywhere in these benchmarks: runs of one seed on one machine begin with the same weights and read the same text, unless
a row says otherwise, so differences are taken seed by seed. Two settings differ if the 95 % confidence interval of the mean
difference (Student's t) does not hold 0. Where it does, the verdict is "none": so few seeds do not show a difference, which does
not prove that there is none. Of twenty verdicts one is wrong by chance.

>>> ours, theirs = Sample((2.30, 2.36, 2.32)), Sample((2.40, 2.45, 2.41))
>>> found = difference(ours, theirs)
>>> f"{found.value:+.3f} in [{found.low:+.3f}, {found.high:+.3f}]", verdict(found)
('-0.093 in [-0.108, -0.079]', 'lower')
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["lower", "higher", "none", "one seed"]

# Student's t at 97.5 %, which leaves 2.5 % at either end, by degrees of freedom.
_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 120)
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.179, 2.131, 2.086, 2.042, 2.000, 1.980)


@dataclass(frozen=True)
class Sample:
    """One figure over seeds, in the order of the seeds; at least one value."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None of a single value."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Interval:
    """A difference, and between what it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %. Between two rows of the table the one with the wider interval counts.

    >>> t_quantile(2), t_quantile(11), t_quantile(1000)
    (4.303, 2.228, 1.98)
    """
    return _T[bisect_right(_DEGREES, degrees) - 1]


def contrast(terms: Sequence[tuple[float, Sample]]) -> Interval | None:
    """The weighted sum of several samples, seed by seed, over the first seeds, which all of them have: its mean and interval. None
    of a single seed, which has no spread."""
    seeds = min(len(sample.values) for _, sample in terms)
    sums = Sample(tuple(math.fsum(weight * sample.values[seed] for weight, sample in terms) for seed in range(seeds)))
    if sums.std is None:
        return None
    half = t_quantile(len(sums.values) - 1) * sums.std / math.sqrt(len(sums.values))
    return Interval(sums.mean, sums.mean - half, sums.mean + half)


@dataclass(frozen=True)
class Scatter:
    """How far figures lie from what their row and their seed lead to expect, by rows that have several seeds.

    Attributes:
        std: the standard deviation.
        degrees: of freedom that it is known with.
    """

    std: float
    degrees: int

    @property
    def resolution(self) -> float:
        """The least difference between two figures that is told from none."""
        return self.about([(1.0, 0.0), (-1.0, 0.0)]).high

    def about(self, terms: Sequence[tuple[float, float]]) -> Interval:
        """The weighted sum of figures of one seed, with an interval as wide as those rows scatter."""
        value = math.fsum(weight * figure for weight, figure in terms)
        half = t_quantile(self.degrees) * self.std * math.sqrt(math.fsum(weight**2 for weight, _ in terms))
        return Interval(value, value - half, value + half)


def scatter(samples: Sequence[Sample]) -> Scatter | None:
    """Of rows that have the same seeds. None of a single row or seed: nothing is left to see.

    >>> found = scatter([Sample((1.0, 2.0, 3.0)), Sample((2.0, 3.1, 3.9))])  # the rows differ by 1, but for 0.1 in two seeds
    >>> round(found.std, 3), found.degrees
    (0.071, 2)
    """
    seeds = min((len(sample.values) for sample in samples), default=0)
    degrees = (len(samples) - 1) * (seeds - 1)
    if degrees < 1:
        return None
    rows = [sample.values[:seeds] for sample in samples]
    means, columns = [fmean(row) for row in rows], [fmean(column) for column in zip(*rows, strict=True)]
    rest = [row[seed] - mean - columns[seed] + fmean(means) for row, mean in zip(rows, means, strict=True) for seed in range(seeds)]
    return Scatter(math.sqrt(math.fsum(value**2 for value in rest) / degrees), degrees)


def difference(one: Sample, two: Sample) -> Interval | None:
    """The first minus the second."""
    return contrast([(1.0, one), (-1.0, two)])


def verdict(found: Interval | None) -> Verdict:
    """What an interval of a difference says about the first of the two."""
    if found is None:
        return "one seed"
    if found.low <= 0 <= found.high:
        return "none"
    return "lower" if found.high < 0 else "higher"
