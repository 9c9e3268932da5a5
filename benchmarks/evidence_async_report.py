"""The report of asynchronous training's evidence: the paper's claims, the setting, and the verdict on virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ablations import mild
from async_ablations import pairs, remedies
from async_rows import DELAYED, NAIVE, ONE, SYNC
from cells import Outcome
from claims import Claim, alike, higher, lower, time_line, without_scatter
from figure_text import decoder_text

if TYPE_CHECKING:
    from evidence_async import Plan

CLOSE, SHARE = 0.02, 1 / 3
"""Allowed for DN+DyLU: loss above synchronous training, and share of its virtual time."""


def at(where: str, name: str) -> str:
    """A row's label at a level of heterogeneity, or with another model."""
    return f"{where}, {name}"


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims, and bounds on its own method."""
    within = f"{DELAYED} ends at most {CLOSE} above synchronous training"
    others = plan.levels[:-1]
    return [
        Claim(text=f"{within}.", terms=((1.0, DELAYED), (-1.0, SYNC)), below=CLOSE),
        higher("Naive is worse than synchronous training (+7.1 %).", NAIVE, SYNC),
        lower(f"{DELAYED} is better than naive.", DELAYED, NAIVE),
        lower("Delayed Nesterov alone is better than naive.", "DN", NAIVE),
        lower("Dynamic Local Updates alone are better than naive.", "DyLU", NAIVE),
        *(
            Claim(text=f"{within} at the level {level}.", terms=((1.0, at(level, DELAYED)), (-1.0, at(level, SYNC))), below=CLOSE)
            for level in others
        ),
        *(higher(f"Naive is worse at the level {level} (+7 %).", at(level, NAIVE), at(level, SYNC)) for level in others),
        alike("Naive is as bad with equal workers (bound 1 %).", at(others[0], NAIVE), NAIVE, 1.0),
        lower(f"{DELAYED} is better than a discount by staleness.", DELAYED, "Polynomial"),
        lower(f"{DELAYED} is better than delay compensation.", DELAYED, "compensation"),
        lower(f"{DELAYED} is better than a buffer.", DELAYED, "buffer"),
        lower(f"{DELAYED} is better than {plan.batch} (3.2 %).", DELAYED, plan.batch, (ONE, plan.batch)),
        *remedies(),
        *pairs(),
        *(claim for size in ("large", plan.large_at) for claim in _larger(size, within)),
        Claim(text=f"With a milder outer rule of both: {within}.", terms=((1.0, mild(DELAYED)), (-1.0, mild(SYNC))), below=CLOSE),
        higher("With a milder outer rule of both: naive is worse than synchronous training.", mild(NAIVE), mild(SYNC)),
        lower(
            f"Ours, not the paper's: {DELAYED} is better than {plan.as_often}, which exchanges as often.", DELAYED, plan.as_often
        ),
    ]


def _larger(size: str, within: str) -> list[Claim]:
    """These rows train another model, so the scatter of other rows does not apply."""
    sync, naive, delayed = (at(size, name) for name in (SYNC, NAIVE, DELAYED))
    return [
        without_scatter(lower(f"The larger model ({size}): {DELAYED} is better than naive.", delayed, naive)),
        without_scatter(Claim(text=f"The larger model ({size}): {within}.", terms=((1.0, delayed), (-1.0, sync)), below=CLOSE)),
    ]


def introduction(plan: Plan, default: Outcome) -> str:
    return (
        f"{decoder_text(default)} on "
        f"{plan.islands} workers of very different speeds: {plan.warm_start} steps of warm start by one worker, then "
        f"{plan.steps} per worker on average, {plan.steps * plan.islands} local updates in total, in rounds of {plan.inner_steps} "
        f"steps of the fastest worker. With Dynamic Local Updates the hub's grace window is {plan.window_s:g} s. Rows of the "
        f"headline and two rows with a milder outer rule have three seeds; all others have one. Bytes sent are what workers push; "
        f"they pull as many. The last column is the virtual time over that of synchronous training on the same workers."
    )


def timed(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[str]:
    """The verdict on the virtual time of the paper's own method."""
    return [time_line(outcomes, DELAYED, SYNC, SHARE)] if {DELAYED, SYNC} <= outcomes.keys() else []
