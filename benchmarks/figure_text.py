"""Figures over seeds as text, in the same form in every table."""

from __future__ import annotations

import math

from atoll.telemetry.units import human_bytes, human_count, human_fraction, human_percent, human_time, human_times
from cells import Outcome
from seed_statistics import Interval, Sample, difference, verdict

SAME_TOKENS = 0.001
"""Relative differences of tokens up to this are not reported."""

BY_CHANCE = "One of twenty verdicts is wrong by chance."

RULE = (
    "Losses are means over seeds ± the sample standard deviation, with their range. Runs of one seed on one machine start from the "
    "same weights and read the same text, unless a row says otherwise, so differences are taken seed by seed, with the 95 % "
    'interval of their mean (Student\'s t). If the interval contains 0, the verdict is "none": these seeds show no difference. '
    f"{BY_CHANCE}"
)


def loss_text(outcome: Outcome) -> tuple[str, str]:
    """Mean ± standard deviation, and the range. A single seed has the mean only."""
    if outcome.loss is None:
        return f"diverged ({len(outcome.errors)} of {len(outcome.errors) + len(outcome.summaries)} seeds)", "-"
    loss = outcome.loss
    if loss.std is None:
        return f"{loss.mean:.4f}", "-"
    return f"{loss.mean:.4f} ± {loss.std:.4f}", f"{loss.low:.4f} to {loss.high:.4f}"


def difference_text(one: Sample | None, two: Sample | None) -> tuple[str, str]:
    """The first minus the second with its interval, and the verdict."""
    if one is None or two is None:
        return "-", "-"
    found = difference(one, two)
    return (interval_text(found) if found else f"{one.values[0] - two.values[0]:+.4f}"), verdict(found)


def loss_headings(reference: str) -> list[str]:
    """Of the columns of `loss_columns`, after the row's label."""
    return ["row", "val loss", "range", f"minus {reference}", "verdict"]


def loss_columns(outcome: Outcome, reference: Outcome) -> list[str]:
    """Loss, range, difference from the reference, and verdict."""
    compared = ("-", "-") if outcome is reference else difference_text(outcome.loss, reference.loss)
    return [*loss_text(outcome), *compared]


def interval_text(found: Interval) -> str:
    """
    >>> interval_text(Interval(-0.1, -0.15, -0.05))
    '-0.1000 [-0.1500, -0.0500]'
    """
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


def updates_text(outcome: Outcome) -> str:
    updates = outcome.mean("outer_steps")
    return "-" if updates is None else f"{updates:.0f}"


def decoder_text(outcome: Outcome) -> str:
    """The model, with its size if that is known."""
    params = outcome.mean("params")
    return "A decoder" + (f" of {params:,.0f} parameters" if params is not None else "")


def tokens_text(outcome: Outcome, reference: Outcome, same: float = SAME_TOKENS) -> str:
    """Tokens, warm start included, and their ratio to the reference's if they differ."""
    if outcome.tokens is None:
        return "-"
    ratio = tokens_ratio(outcome, reference, same)
    return human_count(outcome.tokens) + (f" (×{human_times(ratio)})" if ratio is not None and ratio != 1 else "")


def tokens_ratio(outcome: Outcome, reference: Outcome, same: float = SAME_TOKENS) -> float | None:
    """Tokens over the reference's; exactly 1 if they differ by no more than this share."""
    if outcome.tokens is None or not reference.tokens:
        return None
    ratio = outcome.tokens / reference.tokens
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=same) else ratio


def bytes_text(outcome: Outcome) -> str:
    sent = outcome.mean("sent_bytes_per_island")
    return "-" if sent is None else human_bytes(sent)


def bytes_ratio_text(outcome: Outcome, reference: Outcome) -> str:
    """Bytes over the reference's."""
    sent, most = outcome.mean("sent_bytes_per_island"), reference.mean("sent_bytes_per_island")
    if sent is None or not most:
        return "-"
    return human_fraction(sent / most) if sent else "0"


def time_text(outcome: Outcome) -> str:
    time_s = outcome.mean("virtual_time_s")
    return "-" if time_s is None else human_time(time_s)


def time_ratio(outcome: Outcome, reference: Outcome) -> float | None:
    """Virtual time over the reference's."""
    time_s, whole_s = outcome.mean("virtual_time_s"), reference.mean("virtual_time_s")
    return None if time_s is None or not whole_s else time_s / whole_s


def time_ratio_text(outcome: Outcome, reference: Outcome) -> str:
    ratio = time_ratio(outcome, reference)
    return "-" if ratio is None else f"{ratio:.3f}"


def staleness_text(outcome: Outcome) -> str:
    """Mean updates that an arrival had missed; a dash where there is no hub."""
    return "-" if outcome.staleness is None else f"{outcome.staleness:.2f}"


def utilisation_text(outcome: Outcome) -> str:
    share = outcome.mean("utilisation")
    return "-" if share is None else human_percent(share)
