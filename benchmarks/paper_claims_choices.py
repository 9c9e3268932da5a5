"""How the methods of `paper_claims.py` choose their inner rates and outer rules.

First the outer rule at the plan's rate, then the rate with that rule, then a further rate where the first or the last was best.
The seed is one that no table reports, with four islands and rounds of 50 steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cells import Outcome, Row
from paper_claims_rows import BUFFER, CHOSEN_BY, DELAYED, DILOCO, EAGER, METHODS, MUON, NAIVE, SPARSE, Choice, Plan


def outers_of(plan: Plan, method: str) -> tuple[tuple[float, float], ...]:
    """The outer rules that a method chooses from; the first alone if it has no outer rule."""
    own = {NAIVE: plan.arrivals, EAGER: plan.late, SPARSE: plan.plain}
    return own.get(method, plan.outers if method in (DILOCO, BUFFER, DELAYED, MUON) else plan.outers[:1])


def candidates_of(plan: Plan, method: str, outer: tuple[float, float] | None) -> list[Choice]:
    """What is tried: the outer rules at the plan's rate, or the rates with the outer rule that was best."""
    if outer is None:
        return [Choice(plan.rate, each) for each in outers_of(plan, method)]
    return [Choice(rate, outer) for rate in plan.rates]


def choice_label(method: str, choice: Choice) -> str:
    return f"{method}, rate {choice.rate:g}, outer {choice.outer[0]:g}/{choice.outer[1]:g}"


def choice_rows(plan: Plan, outers: Mapping[str, tuple[float, float]], methods: Sequence[str] = METHODS) -> dict[str, Row]:
    """The rows that choose outer rules, or the rates of methods whose outer rule is known."""
    tried = [(method, each) for method in methods for each in candidates_of(plan, method, outers.get(method))]
    return {choice_label(*each): plan.row(*each, name=choice_label(*each)) for each in tried}


def best(plan: Plan, outcomes: Mapping[str, Outcome], method: str, outer: tuple[float, float] | None) -> Choice | None:
    """The candidate that ended lowest; None if one of them was not run. A candidate that diverged is not chosen."""
    losses = {}
    for each in candidates_of(plan, method, outer):
        outcome = outcomes.get(choice_label(method, each))
        if outcome is None or not (outcome.summaries or outcome.errors):
            return None
        if outcome.loss is not None:
            losses[each] = outcome.loss.mean
    return min(losses, key=lambda each: losses[each]) if losses else None


def further_rows(plan: Plan, outcomes: Mapping[str, Outcome], methods: Sequence[str] = METHODS) -> dict[str, Row]:
    """The rows at a further rate, of the methods that were best at the first or the last of the rates."""
    tried = [(method, choice) for method in methods if (choice := _further(plan, _best_rate(plan, outcomes, method))) is not None]
    return {choice_label(*each): plan.row(*each, name=choice_label(*each)) for each in tried}


def untried(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """The labels of further rates that were not run, by method."""
    found = {}
    for method in METHODS:
        for label in further_rows(plan, outcomes, [method]):
            outcome = outcomes.get(label)
            if outcome is None or not (outcome.summaries or outcome.errors):
                found[method] = label
    return found


def best_choices(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Choice]:
    """The choices of all methods whose candidates were run. A further rate counts once it was run."""
    found = {}
    for method in METHODS:
        choice = _best_rate(plan, outcomes, method)
        if choice is not None:
            further = _further(plan, choice)
            better = further is not None and _end(outcomes, method, further) < _end(outcomes, method, choice)
            found[method] = further if further is not None and better else choice
    return found | {method: found[other] for method, other in CHOSEN_BY.items() if other in found}


def _best_rate(plan: Plan, outcomes: Mapping[str, Outcome], method: str) -> Choice | None:
    """The best of the plan's rates with the best of the outer rules."""
    first = best(plan, outcomes, method, None)
    return best(plan, outcomes, method, first.outer) if first is not None else None


def _end(outcomes: Mapping[str, Outcome], method: str, choice: Choice) -> float:
    """The loss at the end of a candidate; infinite if it was not run, or diverged."""
    outcome = outcomes.get(choice_label(method, choice))
    return math.inf if outcome is None or outcome.loss is None else outcome.loss.mean


def _further(plan: Plan, choice: Choice | None) -> Choice | None:
    if choice is None or plan.further_rates is None or choice.rate not in (plan.rates[0], plan.rates[-1]):
        return None
    return replace(choice, rate=plan.further_rates[choice.rate != plan.rates[0]])


def tried_rates(plan: Plan, outcomes: Mapping[str, Outcome], method: str, outer: tuple[float, float]) -> list[float]:
    """The rates that were run with this outer rule, in ascending order."""
    rates = sorted({*plan.rates, *(plan.further_rates or ())})
    found = {rate: outcomes.get(choice_label(method, Choice(rate, outer))) for rate in rates}
    return [rate for rate, outcome in found.items() if outcome is not None and (outcome.summaries or outcome.errors)]


def at_edge(plan: Plan, outcomes: Mapping[str, Outcome], choices: Mapping[str, Choice]) -> frozenset[str]:
    """The methods whose rate is the first or the last of those that were tried."""
    return frozenset(
        method
        for method, choice in choices.items()
        if method not in CHOSEN_BY
        and (rates := tried_rates(plan, outcomes, method, choice.outer))
        and choice.rate in (rates[0], rates[-1])
    )
