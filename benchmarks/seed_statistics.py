"""Figures over seeds: mean, spread, and when two settings differ.

All benchmarks use one rule. Runs of one seed on one machine start from the same weights and read the same text, unless a row says
otherwise, so differences are taken seed by seed. Two settings differ if the 95 % confidence interval of the mean difference
(Student's t) does not contain 0; else the verdict is "none", which is no proof of equality. One of twenty verdicts is wrong by
chance.

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

# Student's t at 97.5 % (2.5 % in each tail), by degrees of freedom.
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
        """The sample standard deviation; None for a single value."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %. Between two entries of the table, the one with the wider interval.

    >>> t_quantile(2), t_quantile(11), t_quantile(1000)
    (4.303, 2.228, 1.98)
    """
    return _T[bisect_right(_DEGREES, degrees) - 1]


def contrast(terms: Sequence[tuple[float, Sample]]) -> Interval | None:
    """The weighted sum of several samples, seed by seed, over the first seeds that all of them have: its mean and interval. None
    for a single seed, which has no spread."""
    seeds = min(len(sample.values) for _, sample in terms)
    sums = Sample(tuple(math.fsum(weight * sample.values[seed] for weight, sample in terms) for seed in range(seeds)))
    if sums.std is None:
        return None
    half = t_quantile(len(sums.values) - 1) * sums.std / math.sqrt(len(sums.values))
    return Interval(sums.mean, sums.mean - half, sums.mean + half)


@dataclass(frozen=True)
class Scatter:
    """The residual standard deviation of losses after row and seed effects, estimated from rows with several seeds."""

    std: float
    degrees: int  # of freedom of the estimate

    @property
    def resolution(self) -> float:
        """The least difference between two figures that differs from 0."""
        return self.about([(1.0, 0.0), (-1.0, 0.0)]).high

    def about(self, terms: Sequence[tuple[float, float]]) -> Interval:
        """The weighted sum of figures of one seed, with an interval from the residual standard deviation."""
        value = math.fsum(weight * figure for weight, figure in terms)
        half = t_quantile(self.degrees) * self.std * math.sqrt(math.fsum(weight**2 for weight, _ in terms))
        return Interval(value, value - half, value + half)


def scatter(samples: Sequence[Sample]) -> Scatter | None:
    """The scatter of rows with the same seeds. None for a single row or seed, which leaves no degree of freedom.

    >>> found = scatter([Sample((1.0, 2.0, 3.0)), Sample((2.0, 3.1, 3.9))])  # the rows differ by 1, but for 0.1 in two seeds
    >>> round(found.std, 3), found.degrees
    (0.071, 2)
    """
    seeds = min((len(sample.values) for sample in samples), default=1)
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
    """Whether the first of two figures is lower or higher, from the interval of their difference."""
    if found is None:
        return "one seed"
    if found.low <= 0 <= found.high:
        return "none"
    return "lower" if found.high < 0 else "higher"
