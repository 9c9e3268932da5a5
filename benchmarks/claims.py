"""What a paper says, as inequalities between rows, and whether the cells bear it out.

A claim says where a weighted sum of mean losses lies. Its 95 % interval decides: the claim "holds here" if all of the interval is
there, it "does not hold here" if none of it is, and else the matter is "within the spread". Bounds in per cent are of perplexity,
the exponential of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cells import Outcome
from figure_text import interval_text
from seed_statistics import Interval, Scatter, contrast

Terms = tuple[tuple[float, str], ...]
APART = "begun apart"
"""Marks a claim whose rows did not begin with the same weights."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One of the paper's claims.

    Attributes:
        text: the claim in words, with the paper's figure.
        terms: weights and labels of rows, whose mean losses are summed.
        above: the sum is not less than this.
        below: the sum is not more than this.
        borrows: whether, of a single seed, it may be judged by how much other rows scatter: not if its rows train another model, or
            on other data.
    """

    text: str
    terms: Terms
    above: float = -math.inf
    below: float = math.inf
    borrows: bool = True

    def judge(self, found: Interval) -> str:
        """Whether the sum lies where the claim says.

        >>> claim = Claim(text="A ends below B.", terms=((1.0, "A"), (-1.0, "B")), below=0.0)
        >>> claim.judge(Interval(-0.2, -0.3, -0.1)), claim.judge(Interval(0.0, -0.1, 0.1)), claim.judge(Interval(0.2, 0.1, 0.3))
        ('holds here', 'within the spread', 'does not hold here')
        """
        if self.above <= found.low and found.high <= self.below:
            return "holds here"
        return "does not hold here" if found.high < self.above or found.low > self.below else "within the spread"


def higher(text: str, one: str, two: str) -> Claim:
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=0.0)


def lower(text: str, one: str, two: str) -> Claim:
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=0.0)


def costs(text: str, one: str, two: str, percent: float) -> Claim:
    """The first row's perplexity is at most so many per cent above the second's."""
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=math.log1p(percent / 100))


def gains_little(text: str, one: str, two: str, percent: float) -> Claim:
    """The first row's perplexity is at most so many per cent below the second's."""
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=math.log1p(-percent / 100))


def alike(text: str, one: str, two: str, percent: float) -> Claim:
    """The two perplexities differ by at most so many per cent."""
    most = math.log1p(percent / 100)
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=-most, below=most)


def unlike(claim: Claim) -> Claim:
    """The same of rows that other rows say nothing about."""
    return replace(claim, borrows=False)


def judged(claim: Claim, outcomes: Mapping[str, Outcome], scatter: Scatter | None = None) -> str | None:
    """One line about a claim, computed from the cells; None if a row of it was not run. Rows of one seed have an interval if it is
    known how much other rows scatter."""
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
    if _began_apart([outcomes[label] for _, label in claim.terms]):
        notes.append(APART)
    noted = f" ({', '.join(notes)})" if notes else ""
    return f"**{claim.judge(found)}**{noted}: {claim.text} {summed.removeprefix('+ ')} = {interval_text(found)}, {percent}."


def _began_apart(rows: Sequence[Outcome]) -> bool:
    """Whether rows began with different weights, as their first evaluations tell, in any of the seeds that all of them have. A row
    whose curves were not kept tells nothing."""
    seeds = min(len(row.summaries) for row in rows)
    curves = [row.curves for row in rows if len(row.curves) == len(row.summaries)]
    return any(len({of_row[seed][0][2] for of_row in curves}) > 1 for seed in range(seeds))


def claims_section(claims: Sequence[Claim], outcomes: Mapping[str, Outcome], scatter: Scatter | None = None) -> str:
    """All claims that these rows can speak to."""
    lines = [line for claim in claims if (line := judged(claim, outcomes, scatter)) is not None]
    note = (
        "In parentheses the paper's figures. A claim holds here if all of the 95 % interval is where it says, does not hold if "
        "none of it is, and else lies within the spread. Small models on short runs need not behave as the paper's."
    )
    if scatter is not None:
        note += (
            f" Rows of one seed, where they train the same model on the same text, have an interval as wide as all rows of several "
            f"seeds with that model and text scatter once their row and their seed are accounted for: a standard deviation of "
            f"{scatter.std:.4f}, known with {scatter.degrees} degrees of freedom. Two such rows are told apart from "
            f"{scatter.resolution:.3f} on, so that no claim that is stricter can hold by them."
        )
    if any(f"{APART})" in line for line in lines):
        note += (
            f" {APART.capitalize()}: in at least one seed these rows did not begin with the same weights, since their warm starts "
            f"were made on two machines or with other settings, which adds to the scatter of their difference."
        )
    told = "\n".join(f"- {line}" for line in lines) or "None of them can be judged from these rows."
    return f"### The paper's claims, here\n\n{note}\n\n{told}"
