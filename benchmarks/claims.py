"""A paper's claims as inequalities between rows, judged by the cells.

A claim bounds a weighted sum of mean losses. The sum's 95 % interval decides: the claim "holds here" if the whole interval is
within the bounds, "does not hold here" if none of it is, and else is "within the spread". Bounds in per cent are of perplexity, the
exponential of the loss.

A claim about k times the batch has a gate: it is judged only where that batch gains little over one worker. Else it is k times the
data, and no method that communicates less can be as good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from cells import Outcome
from figure_text import interval_text, time_ratio
from record import bullets, holds_text
from seed_statistics import Interval, Sample, Scatter, contrast

INTERVAL_RULE = (
    "A claim holds here if the whole 95 % interval is within its bounds, does not hold here if none of it is, and else is within "
    "the spread."
)
GATE = 0.15
"""Nats. The most that the larger batch may gain over one worker where a claim about it is judged."""
NOT_HERE = "not judged here"
Terms = tuple[tuple[float, str], ...]
UNEQUAL_START = "unequal start"
"""Marks a claim whose rows did not start from the same weights."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim: the weighted sum of the rows' mean losses is at least `above` and at most `below`."""

    text: str  # the claim in words, with the paper's figure
    terms: Terms  # weights and labels of rows
    above: float = -math.inf
    below: float = math.inf
    gate: tuple[str, str] | None = None  # labels of one worker and of the larger batch that the claim is about
    borrows: bool = True  # with one seed, use the scatter of other rows: not if these rows train another model or on other data

    def judge(self, found: Interval) -> str:
        """Whether the sum is within the bounds.

        >>> claim = Claim(text="A ends below B.", terms=((1.0, "A"), (-1.0, "B")), below=0.0)
        >>> claim.judge(Interval(-0.2, -0.3, -0.1)), claim.judge(Interval(0.0, -0.1, 0.1)), claim.judge(Interval(0.2, 0.1, 0.3))
        ('holds here', 'within the spread', 'does not hold here')
        """
        if self.above <= found.low and found.high <= self.below:
            return "holds here"
        return "does not hold here" if found.high < self.above or found.low > self.below else "within the spread"


def higher(text: str, one: str, two: str, gate: tuple[str, str] | None = None) -> Claim:
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=0.0, gate=gate)


def lower(text: str, one: str, two: str, gate: tuple[str, str] | None = None) -> Claim:
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=0.0, gate=gate)


def costs(text: str, one: str, two: str, percent: float, gate: tuple[str, str] | None = None) -> Claim:
    """The first row's perplexity is at most this many per cent above the second's."""
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=math.log1p(percent / 100), gate=gate)


def gains_little(text: str, one: str, two: str, percent: float) -> Claim:
    """The first row's perplexity is at most this many per cent below the second's."""
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=math.log1p(-percent / 100))


def alike(text: str, one: str, two: str, percent: float) -> Claim:
    """The two perplexities differ by at most this many per cent."""
    most = math.log1p(percent / 100)
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=-most, below=most)


def without_scatter(claim: Claim) -> Claim:
    """The same claim for rows whose scatter differs from that of other rows."""
    return replace(claim, borrows=False)


def gain(outcomes: Mapping[str, Outcome], one: str, batch: str) -> float | None:
    """By how much the larger batch ends below one worker, in nats, over the seeds that both have; None if one was not run."""
    losses = [outcomes[label].loss if label in outcomes else None for label in (one, batch)]
    return None if losses[0] is None or losses[1] is None else mean_difference(losses[0], losses[1])


def mean_difference(one: Sample, two: Sample) -> float:
    """The first minus the second, over the first seeds that both have."""
    return fmean(mine - other for mine, other in zip(one.values, two.values, strict=False))


def gate_reason(gate: tuple[str, str] | None, outcomes: Mapping[str, Outcome]) -> str | None:
    """Why claims with this gate are not judged; None if they are."""
    if gate is None:
        return None
    one, batch = gate
    found = gain(outcomes, one, batch)
    if found is None:
        return f"the gain of {batch} over {one} was not measured"
    return f"{batch} gains {found:.3f} nats over {one}, more than {GATE:g}" if found > GATE else None


def few_seeds(seeds: int, least: int) -> str | None:
    """What stands in place of a verdict on rows with fewer seeds than this.

    >>> few_seeds(1, 3), few_seeds(2, 3), few_seeds(3, 3)
    ('one seed, no verdict', 'two seeds, no verdict', None)
    """
    return (
        None if seeds >= least else f"{'one seed' if seeds == 1 else 'two seeds' if seeds == 2 else f'{seeds} seeds'}, no verdict"
    )


def claim_line(claim: Claim, outcomes: Mapping[str, Outcome], scatter: Scatter | None = None) -> str | None:
    """The verdict on a claim, with the sum; None if a row was not run. Rows of one seed have an interval only if the scatter of
    other rows is known."""
    if any(label not in outcomes for _, label in claim.terms):
        return None
    terms = []
    for weight, label in claim.terms:
        loss = outcomes[label].loss
        if loss is None:
            return f"**diverged** ({label}): {claim.text}"
        terms.append((weight, loss))
    found, notes = contrast(terms), []
    if found is None and scatter is not None and claim.borrows:
        found, notes = scatter.about([(weight, loss.values[0]) for weight, loss in terms]), ["one seed"]
    if found is None:
        value = math.fsum(weight * loss.values[0] for weight, loss in terms)
        return f"**one seed, no verdict**: {claim.text} Here {value:+.4f}, {100 * math.expm1(value):+.2f} % of perplexity."
    summed = " ".join(
        f"{'+' if weight > 0 else '-'} {'' if abs(weight) == 1 else f'{abs(weight):g} '}[{at}]" for weight, at in claim.terms
    )
    percent = f"{100 * math.expm1(found.value):+.2f} % of perplexity"
    if unequal_start([outcomes[label] for _, label in claim.terms]):
        notes.append(UNEQUAL_START)
    noted = f" ({', '.join(notes)})" if notes else ""
    shown = f"{claim.text} {summed.removeprefix('+ ')} = {interval_text(found)}, {percent}"
    if (closed := gate_reason(claim.gate, outcomes)) is not None:
        return f"**{NOT_HERE}**{noted}: {shown}; {closed}."
    return f"**{claim.judge(found)}**{noted}: {shown}."


def unequal_start(rows: Sequence[Outcome]) -> bool:
    """Whether the first evaluations of rows differ in a seed that all of them have. Rows without curves are not compared."""
    seeds = min(len(row.summaries) for row in rows)
    curves = [row.curves for row in rows if len(row.curves) == len(row.summaries)]
    return any(len({of_row[seed][0][2] for of_row in curves}) > 1 for seed in range(seeds))


def claim_lines(claims: Sequence[Claim], outcomes: Mapping[str, Outcome], scatter: Scatter | None = None) -> list[str]:
    lines = (claim_line(claim, outcomes, scatter) for claim in claims)
    return [line for line in lines if line is not None]


def claims_section(claims: Sequence[Claim], outcomes: Mapping[str, Outcome], scatter: Scatter | None = None) -> str:
    """The verdicts on all claims whose rows were run."""
    lines = claim_lines(claims, outcomes, scatter)
    note = f"The paper's figures are in parentheses. {INTERVAL_RULE} Small models in short runs need not behave as the paper's."
    if scatter is not None:
        note += (
            f" The interval of rows with one seed comes from the rows with several seeds, of the same model and text: their "
            f"residual standard deviation after row and seed effects is {scatter.std:.4f}, with {scatter.degrees} degrees of "
            f"freedom. Two rows of one seed differ if their losses differ by more than {scatter.resolution:.3f}. A stricter claim "
            f"cannot hold."
        )
    if any(f"**{NOT_HERE}**" in line for line in lines):
        note += (
            f" A claim about a larger batch is judged only where that batch gains at most {GATE:g} nats over one worker (in the "
            f"DiLoCo paper 0.06): elsewhere a larger batch is as good as more data."
        )
    if any(f"{UNEQUAL_START})" in line for line in lines):
        note += (
            f" {UNEQUAL_START.capitalize()}: in at least one seed these rows did not start from the same weights, because their "
            f"warm starts ran on two machines or with other settings. This adds to the scatter of their difference."
        )
    return f"### The paper's claims, here\n\n{note}\n\n{bullets(lines) or 'No claim can be judged from these rows.'}"


def time_line(outcomes: Mapping[str, Outcome], one: str, two: str, most: float) -> str:
    """Whether a row takes at most this share of another's virtual time, which is the same for every seed."""
    claim, ratio = f"{one} takes at most {most:.3g} of the virtual time of {two}.", time_ratio(outcomes[one], outcomes[two])
    return f"**diverged**: {claim}" if ratio is None else f"{holds_text(ratio <= most)}: {claim} It takes {ratio:.3f}."


def mean_loss_line(outcomes: Mapping[str, Outcome], one: str, two: str, most: float) -> str:
    """Whether the mean losses of two rows differ by at most this much."""
    mine, other = outcomes[one].loss, outcomes[two].loss
    if mine is None or other is None:
        return f"{one if mine is None else two} diverged."
    difference = mine.mean - other.mean
    return (
        f"{holds_text(abs(difference) <= most)}: the mean validation losses of {one} and {two} are within {most} of each other: "
        f"{mine.mean:.4f} and {other.mean:.4f}, a difference of {difference:+.4f}."
    )
