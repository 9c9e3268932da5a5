"""What a comparison means, in one plain sentence computed from the figures.

The run that sent most is the reference, and the others are told against it: the loss reached, the bytes and the time it took.
The sentence says as plainly when an alternative is worse, and when runs cannot be compared because they did different work. Times
are compared on one clock only: what was simulated says nothing about how long real machines take, nor they about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.telemetry.summary import Summary
from atoll.telemetry.units import human_bytes, human_count, human_fraction, human_loss, human_time, human_times

_SAME = 0.005  # ratios this close to one are called the same
_SAME_WORK = 0.01  # whole rounds do not always add up to the same number of tokens
_TOLD_ONE_BY_ONE = 4  # with more runs than this, a sentence names the best instead of all


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of a comparison. Labels differ between rows."""

    label: str
    summary: Summary
    data: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the text that was trained and judged on, as far as known."""


def verdict(rows: Sequence[Row]) -> str:
    """One sentence about one run or more."""
    if len(rows) == 1:
        return _alone(rows[0])
    told = _different_work(rows) or (_one_by_one(rows) if len(rows) <= _TOLD_ONE_BY_ONE else _best(rows))
    return f"{told}{_apart(rows)}."


def reference(rows: Sequence[Row]) -> Row:
    """The run that sent most; among equals the slowest, if they have the same clock, then the first."""
    timed = not on_both_clocks(rows)
    return max(rows, key=lambda row: (row.summary.sent_bytes_per_island, (row.summary.time_s or 0.0) if timed else 0.0))


def on_both_clocks(rows: Sequence[Row]) -> bool:
    """Whether some of the runs were simulated and some were not."""
    return len({row.summary.clock for row in rows}) > 1


def losses_as_text(rows: Sequence[Row]) -> dict[str, str]:
    """Each run's validation loss by label, with three digits, or four where three would make different losses look alike.

    Losses that four digits do not tell apart read the same, and are called the same.
    """
    losses = [row.summary.val_loss for row in rows]
    three = [human_loss(loss, 3) for loss in losses]
    enough = len(set(three)) == len({human_loss(loss, 4) for loss in losses})
    return {row.label: human_loss(row.summary.val_loss, 3 if enough else 4) for row in rows}


def bytes_ratio(row: Row, other: Row) -> float | None:
    """What this run sent per island over what the other did; None where the other sent nothing."""
    other_bytes = other.summary.sent_bytes_per_island
    return row.summary.sent_bytes_per_island / other_bytes if other_bytes else None


def _alone(row: Row) -> str:
    summary = row.summary
    loss = losses_as_text([row])[row.label]
    reached = f"{row.label} reaches {loss}" if math.isfinite(summary.val_loss) else f"{row.label} diverged (its loss is {loss})"
    wall = " of wall time" if summary.clock == "wall" else ""
    time = f" in {human_time(summary.time_s)}{wall}" if summary.time_s is not None else ""
    sent = f"sending {human_bytes(summary.sent_bytes_per_island)} per island"
    return f"{reached} after {human_count(summary.tokens)} tokens, {sent}{time}."


def _different_work(rows: Sequence[Row]) -> str:
    """Why these losses say nothing about the algorithms; empty if they do."""
    differing = _differing_data(rows)
    if differing:
        told = [f"{row.label} has {', '.join(f'{key}={row.data[key]}' for key in differing)}" for row in rows]
        return f"These runs are not comparable, because their data differ: {_listed(told)}"
    params = [row.summary.params for row in rows]
    tokens = [_seen(row.summary) + row.summary.warm_start_tokens for row in rows]
    if len(set(params)) > 1:
        told = [f"{row.label} has {human_count(count)}" for row, count in zip(rows, params, strict=True)]
        return f"These runs are not comparable, because their models differ in parameters: {_listed(told)}"
    asked_for = [count - _past_the_end(row.summary) for row, count in zip(rows, tokens, strict=True)]
    if max(asked_for) > (1 + _SAME_WORK) * min(tokens):
        told = [f"{row.label} saw {human_count(count)}" for row, count in zip(rows, tokens, strict=True)]
        return f"These runs are not comparable, because they trained on different numbers of tokens: {_listed(told)}"
    return ""


def _seen(summary: Summary) -> float:
    """Tokens that were trained on, also in updates that a hub left out for being late: choosing to is the algorithm's doing."""
    hub = summary.asynchrony
    return summary.tokens if hub is None or not hub.applied else summary.tokens * hub.arrivals / hub.applied


def _past_the_end(summary: Summary) -> float:
    """Tokens beyond those asked for that a run may have seen: a hub stops with the arrival that reaches them, and islands that
    accumulate freely, so that commits differ in size, with the commit that does."""
    rounds = summary.overlap
    if rounds is not None and rounds.background and rounds.most_tokens > rounds.fewest_tokens:
        return rounds.most_tokens
    if summary.asynchrony is None or not summary.local_updates:
        return 0.0
    longest = max((worker.steps / worker.rounds for worker in summary.asynchrony.workers if worker.rounds), default=0.0)
    return longest * summary.tokens / summary.local_updates


def _differing_data(rows: Sequence[Row]) -> list[str]:
    """The settings of the data that all runs have and that are not the same in all."""
    first, *others = (row.data for row in rows)
    return [key for key in first if all(key in data for data in others) and any(data[key] != first[key] for data in others)]


def _one_by_one(rows: Sequence[Row]) -> str:
    against, losses = reference(rows), losses_as_text(rows)
    clauses: list[str] = []
    for row in rows:
        if row is not against:
            outcome = _outcome(row, against, losses, first=not clauses)
            cost = " ".join(part for part in (_bytes(row, against), _time(row, against)) if part)
            clauses.append(f"{outcome} {cost}")
    return "; ".join(clauses)


def _outcome(row: Row, against: Row, losses: dict[str, str], *, first: bool) -> str:
    """Who reached what. The reference's loss is named once, in the first clause."""
    mine, other = losses[row.label], losses[against.label]
    if not math.isfinite(row.summary.val_loss):
        return f"{row.label} diverged (its loss is {mine})" + (f" where {against.label} reaches {other}," if first else ",")
    if not math.isfinite(against.summary.val_loss):
        return f"{row.label} reaches {mine}" + (f" where {against.label} diverged," if first else "")
    if mine == other:
        return f"{row.label} matches {against.label}'s {other}"
    if row.summary.val_loss < against.summary.val_loss:
        return f"{row.label} reaches {mine}" + (f" against {against.label}'s {other}" if first else "")
    worse = float(mine) - float(other)  # of the figures shown, so that a reader who subtracts them agrees
    return f"{row.label} ends {worse:.2g} worse than {against.label} ({mine} against {other}),"


def _bytes(row: Row, against: Row) -> str:
    ratio = bytes_ratio(row, against)
    if not ratio:
        return "with nothing sent"
    share = "the same bytes" if abs(ratio - 1) < _SAME else f"{human_fraction(ratio)} of the bytes"
    if (row.summary.asynchrony is None) != (against.summary.asynchrony is None):
        return f"sending {share} (what a hub sends is not counted)"
    return f"with {share}"


def _time(row: Row, against: Row) -> str:
    mine_s, other_s = row.summary.time_s, against.summary.time_s
    if not mine_s or not other_s or row.summary.clock != against.summary.clock:
        return ""
    ratio = mine_s / other_s
    if abs(ratio - 1) < _SAME:
        return "in the same time"
    return f"in {human_fraction(ratio)} of the time" if ratio < 1 else f"in {human_times(ratio)} times the time"


def _best(rows: Sequence[Row]) -> str:
    """Of many runs, the ones that win at something."""
    finite = [row for row in rows if math.isfinite(row.summary.val_loss)]
    if not finite:
        return f"All {len(rows)} runs diverged"
    lowest = min(finite, key=lambda row: row.summary.val_loss)
    least = min(finite, key=lambda row: row.summary.sent_bytes_per_island)
    told = [
        f"{lowest.label} reaches the lowest loss ({losses_as_text(rows)[lowest.label]})",
        f"{least.label} sends least ({human_bytes(least.summary.sent_bytes_per_island)} per island)",
    ]
    timed = [(row.summary.time_s, row.label) for row in finite if row.summary.time_s is not None]
    if len(timed) == len(finite) and not on_both_clocks(finite):
        time_s, label = min(timed)
        told.append(f"{label} is fastest ({human_time(time_s)})")
    diverged = len(rows) - len(finite)
    return f"Of {len(rows)} runs, {_listed(told)}" + (f"; {diverged} diverged" if diverged else "")


def _apart(rows: Sequence[Row]) -> str:
    """Which times are not set side by side; empty if all runs have the same clock."""
    if not on_both_clocks(rows):
        return ""
    parts = []
    for clock in ("virtual", "wall"):
        labels = [row.label for row in rows if row.summary.clock == clock]
        few = len(rows) <= _TOLD_ONE_BY_ONE
        parts.append(f"{clock} times ({_listed(labels) if few else len(labels)})")
    return f"; {' and '.join(parts)} are not compared"


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["one", "two", "three"])
    'one, two and three'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
