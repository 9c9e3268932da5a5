"""The report of asynchronous training's evidence: the paper's claims, what was run, and a check of the times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import workload
from ablations import mild
from async_ablations import pairs, remedies
from async_rows import DELAYED, NAIVE, SYNC
from cells import Outcome
from claims import Claim, alike, higher, lower, unlike
from figure_text import decoder_text, time_ratio

CLOSE, SHARE = 0.02, 1 / 3
"""How close to synchronous training Delayed Nesterov with Dynamic Local Updates is to end, and in what share of its time."""


class Told(workload.Told, Protocol):
    """What must be known of the plan."""

    @property
    def levels(self) -> Sequence[str]: ...
    @property
    def window_s(self) -> float: ...
    @property
    def as_often(self) -> str: ...
    @property
    def large_at(self) -> str: ...


def at(where: str, name: str) -> str:
    """A row's label at a level, or with another model."""
    return f"{where}, {name}"


def claims(plan: Told) -> list[Claim]:
    """What the paper says, and what is asked of its own method."""
    within = f"{DELAYED} ends at most {CLOSE} above synchronous training"
    others = plan.levels[:-1]
    return [
        Claim(text=f"{within}.", terms=((1.0, DELAYED), (-1.0, SYNC)), below=CLOSE),
        higher("Naive is worse than synchronous training (+7.1 %).", NAIVE, SYNC),
        lower(f"{DELAYED} is better than naive.", DELAYED, NAIVE),
        lower("Delayed Nesterov alone mends a part of it.", "DN", NAIVE),
        lower("Dynamic Local Updates alone mend a part of it.", "DyLU", NAIVE),
        *(
            Claim(text=f"{within} at the level {level}.", terms=((1.0, at(level, DELAYED)), (-1.0, at(level, SYNC))), below=CLOSE)
            for level in others
        ),
        *(higher(f"Naive is worse at the level {level} (+7 %).", at(level, NAIVE), at(level, SYNC)) for level in others),
        alike("Equal workers do not mend naive (bound 1 %).", at(others[0], NAIVE), NAIVE, 1.0),
        lower(f"{DELAYED} is better than a discount by staleness.", DELAYED, "Polynomial"),
        lower(f"{DELAYED} is better than delay compensation.", DELAYED, "compensation"),
        lower(f"{DELAYED} is better than a buffer.", DELAYED, "buffer"),
        lower(f"{DELAYED} is better than {plan.batch} (3.2 %).", DELAYED, plan.batch),
        *remedies(),
        *pairs(),
        *(claim for size in ("large", plan.large_at) for claim in _larger(size, within)),
        Claim(text=f"With a milder outer rule of both: {within}.", terms=((1.0, mild(DELAYED)), (-1.0, mild(SYNC))), below=CLOSE),
        higher("With a milder outer rule of both: naive is worse than synchronous training.", mild(NAIVE), mild(SYNC)),
        lower(f"Ours, not the paper's: {DELAYED} is better than {plan.as_often}, which agrees as often.", DELAYED, plan.as_often),
    ]


def _larger(size: str, within: str) -> list[Claim]:
    """Other rows say nothing about how much these scatter."""
    sync, naive, delayed = (at(size, name) for name in (SYNC, NAIVE, DELAYED))
    return [
        unlike(lower(f"The larger model ({size}): {DELAYED} is better than naive.", delayed, naive)),
        unlike(Claim(text=f"The larger model ({size}): {within}.", terms=((1.0, delayed), (-1.0, sync)), below=CLOSE)),
    ]


def introduction(plan: Told, default: Outcome) -> str:
    return (
        f"{decoder_text(default)} on "
        f"{plan.islands} workers of very different speeds: {plan.warm_start} steps of warm start by one, then "
        f"{plan.steps} per worker on average, {plan.steps * plan.islands} local updates in all, in rounds of {plan.inner_steps} of "
        f"the fastest. With Dynamic Local Updates the hub waits {plan.window_s:g} s for others that are about to come. Rows of the "
        f"headline have three seeds, and two of those with a milder outer rule; all others have one. Bytes sent are what workers "
        f"push; they pull as many. The last column is the virtual time as a share of synchronous training's on the same workers."
    )


def timed(plan: Told, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Whether the paper's own takes as little time as asked."""
    share = time_ratio(outcomes[DELAYED], outcomes[SYNC]) if {DELAYED, SYNC} <= outcomes.keys() else None
    if share is None:
        return []
    verdict = "holds here" if share <= SHARE else "does not hold here"
    return [f"**{verdict}**: {DELAYED} takes at most a third of synchronous training's virtual time. It takes {share:.3f} of it."]
