"""The report of DiLoCo's evidence: the paper's claims, the setting, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablations import mild
from atoll.telemetry.plot_style import new_figure, save_figure
from cells import Outcome
from claims import Claim, Terms, alike, costs, lower, without_scatter
from figure_text import decoder_text
from seed_statistics import Sample

if TYPE_CHECKING:
    from evidence_diloco_rows import Plan

ONE, DILOCO_ROW = "one worker", "DiLoCo"
Points = Mapping[str, tuple[float, Sample]]
"""Rows of a plot, by label: bytes sent, and losses."""


def longer(label: str) -> str:
    """The label of the same row, trained for longer."""
    return f"longer, {label}"


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims with its outer rule and, where such rows exist, with a milder one; and claims of our own."""
    papers = _papers(plan)
    return [*papers, *(milder for claim in papers if (milder := _with_milder(claim, plan)) is not None), *_own_claims(plan)]


def _with_milder(claim: Claim, plan: Plan) -> Claim | None:
    """The same claim with a milder outer rule; None if there are no such rows."""
    usual = mild(f"H={plan.inner_steps}")
    lengths = [f"H={steps}" for steps in plan.lengths]
    with_mild = {label: mild(label) for label in (*lengths, "k=1", "drop 0.5", "pruned 0.5", "domains, IID", "domains, by domain")}
    with_mild |= dict.fromkeys((DILOCO_ROW, "drop 0", "pruned 0"), usual)
    same = {ONE: ONE, plan.batch: plan.batch}
    labels = [label for _, label in claim.terms]
    if not any(label in with_mild for label in labels) or not all(label in with_mild or label in same for label in labels):
        return None
    terms = tuple((weight, (with_mild | same)[label]) for weight, label in claim.terms)
    return replace(claim, text=f"With a milder outer rule: {claim.text}", terms=terms)


def _papers(plan: Plan) -> list[Claim]:
    few, many = (f"k={count}" for count in (plan.counts[-2], plan.counts[-1]))
    shortest, longest = f"H={plan.lengths[0]}", f"H={plan.lengths[-1]}"
    gate, small = (ONE, plan.batch), (f"small, {ONE}", f"small, {plan.batch}")
    synchronous = "DiLoCo is as good as fully synchronous training"
    return [
        lower("DiLoCo is better than one worker (the paper's first row: 16.23 to 15.02).", DILOCO_ROW, ONE),
        lower(f"DiLoCo with rounds of {plan.lengths[-1]} steps is better than one worker, too.", longest, ONE),
        lower(f"{synchronous}: below {plan.batch} (1.8 %).", DILOCO_ROW, plan.batch, gate),
        costs(f"{synchronous}: at most 1 % above {plan.batch}.", DILOCO_ROW, plan.batch, 1.0, gate),
        without_scatter(costs(f"The smaller decoder: at most 1 % above {plan.batch}.", "small, DiLoCo", small[1], 1.0, small)),
        costs("Ten times fewer exchanges cost little (2.9 % from 50 to 1,000).", longest, shortest, 2.9),
        lower(f"{plan.counts[-2]} islands end lower than one worker, at more tokens (6.2 %).", few, ONE),
        lower(f"{plan.counts[-1]} islands end lower still (1.0 %).", many, few),
        lower("An outer step helps a single island, without any network.", "k=1", ONE),
        costs("Losing half of the deltas costs little (2.1 %).", "drop 0.5", "drop 0", 2.1),
        alike("Doubling the islands and halving them end alike (bound 1 %).", "pool: doubling", "pool: halving", 1.0),
        alike("Ramping islands up and ramping them down end alike (bound 1 %).", "pool: ramp up", "pool: ramp down", 1.0),
        costs("Pruning half of each delta costs little (0.39 %).", "pruned 0.5", "pruned 0", 0.39),
        costs("Pruning three quarters costs little (1.66 %).", "pruned 0.75", "pruned 0", 1.66),
        without_scatter(costs("Unequal shards cost nothing (-0.4 %; bound 0.5 %).", "domains, by domain", "domains, IID", 0.5)),
    ]


def _own_claims(plan: Plan) -> list[Claim]:
    """Short runs with small batches favour the larger batch. These claims compare gaps to it, so they have no gate."""
    small, large = min(*plan.batches, plan.batch_size), max(*plan.batches, plan.batch_size)
    ending = {size: "" if size == plan.batch_size else f", batch {size}" for size in (small, large)}
    gap = {size: _gap(f"{DILOCO_ROW}{end}", f"{plan.batch}{end}") for size, end in ending.items()}
    closer = f"Ours, not the paper's: DiLoCo comes closer to {plan.batch}"
    longest = mild(f"H={plan.lengths[-1]}")
    return [
        without_scatter(_shrinks(f"{closer} with large batches (of {large} sequences, not {small}).", gap[large], gap[small])),
        *(
            _shrinks(
                f"{closer} in {plan.longer} times as many steps ({label}).",
                _gap(longer(label), longer(plan.batch)),
                _gap(label, plan.batch),
            )
            for label in (DILOCO_ROW, mild(f"H={plan.inner_steps}"), longest)
        ),
        lower(f"In {plan.longer} times as many steps, {longest} is better than one worker.", longer(longest), longer(ONE)),
    ]


def _gap(one: str, two: str) -> Terms:
    return ((1.0, one), (-1.0, two))


def _shrinks(text: str, now: Terms, before: Terms) -> Claim:
    return Claim(text=text, terms=(*now, *((-weight, label) for weight, label in before)), below=0.0)


def introduction(plan: Plan, default: Outcome) -> str:
    rounds = plan.steps // plan.inner_steps
    return (
        f"{decoder_text(default)} on "
        f"{plan.islands} equal islands: {plan.warm_start} steps of warm start by one worker, then {plan.steps} of "
        f"DiLoCo in {rounds} rounds of H={plan.inner_steps}. Rows of the headline, of H and of domains have three seeds, all "
        f"others one. Tokens include the warm start. Bytes sent are the mean per island."
    )


def plot(plan: Plan, outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against bytes: one worker, every round length with both outer rules, and an exchange at every step."""
    lengths = [f"H={steps}" for steps in plan.lengths]
    rules = {"the paper's outer rule": lengths, "a milder outer rule": [mild(label) for label in lengths], plan.batch: [plan.batch]}
    drawn = {rule: points for rule, labels in rules.items() if (points := _points(labels, outcomes))}
    if sum(map(len, drawn.values())) < 2:
        return None
    alone = outcomes[ONE].loss if ONE in outcomes else None
    save_figure(lambda found: _figure(found, alone), drawn, path)
    return "loss against bytes sent"


def _points(labels: Sequence[str], outcomes: Mapping[str, Outcome]) -> Points:
    """The rows with a loss that sent bytes: the axis is logarithmic."""
    there = {label: outcomes[label] for label in labels if label in outcomes}
    found = {label: (outcome.mean("sent_bytes_per_island"), outcome.loss) for label, outcome in there.items()}
    return {label: (sent, loss) for label, (sent, loss) in found.items() if sent and loss is not None}


def _figure(rules: Mapping[str, Points], alone: Sample | None) -> Any:
    figure, (axes,) = new_figure(1)
    for rule, points in rules.items():
        losses = [loss for _, loss in points.values()]
        bars = [[loss.mean - loss.low for loss in losses], [loss.high - loss.mean for loss in losses]]
        # The larger batch is at the right edge: its label is to its left, and not in the legend.
        place = {"xytext": (-8, -3), "ha": "right"} if rule in points else {"xytext": (8, -3)}
        named = None if rule in points else rule
        means = [loss.mean for loss in losses]
        axes.errorbar([sent for sent, _ in points.values()], means, yerr=bars, fmt="o-", capsize=3, label=named)
        for label, (sent, loss) in points.items():
            axes.annotate(label.rpartition(", ")[2], (sent, loss.mean), textcoords="offset points", fontsize=11, **place)
    if alone is not None:
        axes.axhline(alone.mean, color="grey", linestyle="--")
        axes.annotate(ONE, (0.7, alone.mean), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points")
    axes.set(xscale="log", xlabel="bytes sent per island")
    axes.set_ylabel("validation loss (bars: over seeds)")
    axes.margins(x=0.25, y=0.15)
    axes.legend(frameon=False)
    return figure
