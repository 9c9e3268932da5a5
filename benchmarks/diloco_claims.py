"""What the DiLoCo paper says, as inequalities between rows, and whether the cells bear it out.

A claim says where a weighted sum of mean losses lies. Its 95 % interval decides: the claim "holds here" if all of the interval is
there, it "does not hold here" if none of it is, and else the matter is "within the spread". Bounds in per cent are of perplexity,
the exponential of the loss; where the paper gives a figure, it is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cells import Outcome
from diloco_rows import DEFAULT, Plan
from spread import Interval, contrast
from wording import interval_text

Terms = tuple[tuple[float, str], ...]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One of the paper's claims.

    Attributes:
        text: the claim in words, with the paper's figure.
        terms: weights and labels of rows, whose mean losses are summed.
        above: the sum is not less than this.
        below: the sum is not more than this.
    """

    text: str
    terms: Terms
    above: float = -math.inf
    below: float = math.inf

    def judge(self, found: Interval) -> str:
        """Whether the sum lies where the claim says.

        >>> claim = Claim(text="A ends below B.", terms=((1.0, "A"), (-1.0, "B")), below=0.0)
        >>> claim.judge(Interval(-0.2, -0.3, -0.1)), claim.judge(Interval(0.0, -0.1, 0.1)), claim.judge(Interval(0.2, 0.1, 0.3))
        ('holds here', 'within the spread', 'does not hold here')
        """
        if self.above <= found.low and found.high <= self.below:
            return "holds here"
        return "does not hold here" if found.high < self.above or found.low > self.below else "within the spread"


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims that the rows can speak to."""
    shortest, longest = min(plan.lengths), max(plan.lengths)
    few, many = f"k={plan.islands}", f"k={max(plan.counts)}"
    none, times = f"warm {min(plan.warm_starts)}", plan.islands
    return [
        _lower("Agreeing more often ends lower.", f"H={shortest}", f"H={longest}"),
        _costs(f"Agreeing {longest // shortest} times less often costs little (2.9 %).", f"H={longest}", f"H={shortest}", 2.9),
        _lower("More islands end lower, at more tokens.", few, "k=1"),
        *_diminishing(few, many),
        _costs("Shards by k-means, weighted by examples, cost nothing (-0.4 %; bound 0.5 %).", "k-means, examples", "IID", 0.5),
        *(_lower(f"Nesterov is better than {other}.", "Nesterov 0.9, 0.7", other) for other in _OTHER_RULES),
        _costs("Losing half of the deltas costs little (2.1 %).", "drop 0.5", "drop 0", 2.1),
        _alike("Doubling and halving the islands end alike (bound 1 %).", "pool: doubling", "pool: halving", 1.0),
        _alike("Ramping islands up and down end alike (bound 1 %).", "pool: ramp up", "pool: ramp down", 1.0),
        _lower("More compute in all ends lower: all islands all along against ramps.", "pool: all along", "pool: ramp up"),
        _lower("More compute in all ends lower: ramps against one island.", "pool: ramp up", "pool: 1 all along"),
        _costs("Pruning half of each delta costs little (0.39 %).", "pruned 0.5", "pruned 0", 0.39),
        _costs("Pruning three quarters costs little (1.66 %).", "pruned 0.75", "pruned 0", 1.66),
        _costs("Doing without a warm start costs little (0.1 of 15.02 perplexity, 0.7 %).", none, f"warm {plan.warm_start}", 0.7),
        _lower("An outer step helps a single island, without any network.", "k=1", "one worker"),
        *(_lower(f"DiLoCo is better than one worker: {size}.", f"{size}, DiLoCo", f"{size}, one worker") for size in _SIZES),
        _grows("The gain over one worker grows with the model (4.33 % at 60M, 7.49 % at 400M).", "small", "large"),
        _lower(f"DiLoCo is better than {times} times the batch on one worker (1.8 %).", DEFAULT, f"{times}x batch"),
        _lower("DiLoCo is better than data-parallel training on the same tokens (1.8 %).", DEFAULT, "DDP"),
        _lower(f"{times} times the updates on one worker are better than DiLoCo (2.0 %).", f"{times}x updates", DEFAULT),
    ]


_OTHER_RULES = ("SGD 1.0", "Momentum 0.6, 0.7", "Adam 0.3")
_SIZES = ("small", "medium", "large")


def _lower(text: str, one: str, two: str) -> Claim:
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=0.0)


def _costs(text: str, one: str, two: str, percent: float) -> Claim:
    """The first row's perplexity is at most so many per cent above the second's."""
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), below=math.log1p(percent / 100))


def _alike(text: str, one: str, two: str, percent: float) -> Claim:
    """The two perplexities differ by at most so many per cent."""
    most = math.log1p(percent / 100)
    return Claim(text=text, terms=((1.0, one), (-1.0, two)), above=-most, below=most)


def _diminishing(few: str, many: str) -> list[Claim]:
    """From one island to a few the gain is larger than from a few to many."""
    if few == many:
        return []
    text = "Returns diminish: going on to more islands gains less."
    return [
        _lower("Still more islands end still lower.", many, few),
        Claim(text=text, terms=((1.0, "k=1"), (-2.0, few), (1.0, many)), above=0.0),
    ]


def _grows(text: str, small: str, large: str) -> Claim:
    gains = ((1.0, f"{large}, one worker"), (-1.0, f"{large}, DiLoCo"), (-1.0, f"{small}, one worker"), (1.0, f"{small}, DiLoCo"))
    return Claim(text=text, terms=gains, above=0.0)


def judged(claim: Claim, outcomes: Mapping[str, Outcome]) -> str | None:
    """One line about a claim, computed from the cells; None if a row of it was not run."""
    if any(label not in outcomes for _, label in claim.terms):
        return None
    terms = []
    for weight, label in claim.terms:
        loss = outcomes[label].loss
        if loss is None:
            return f"**diverged** ({label}): {claim.text}"
        terms.append((weight, loss))
    found = contrast(terms)
    if found is None:
        return f"**one seed, no verdict**: {claim.text}"
    summed = " ".join(
        f"{'+' if weight > 0 else '-'} {'' if abs(weight) == 1 else f'{abs(weight):g} '}[{at}]" for weight, at in claim.terms
    )
    percent = f"{100 * math.expm1(found.value):+.2f} % of perplexity"
    return f"**{claim.judge(found)}**: {claim.text} {summed.removeprefix('+ ')} = {interval_text(found)}, {percent}."
