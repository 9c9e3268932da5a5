"""A report in words."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from atoll.testing.chaos.report import Report


def in_words(report: Report) -> str:
    """What became of a run, a line each.

    >>> nothing = {"data": (), "apart": (), "done": {}, "recoveries": (), "loss": 2.5, "refused": 0, "not_saved": 0, "unseen": 0}
    >>> counts = {"commits": 9, "attempts": 10, "known": 2.0, "alive": 2.0, "participating": 1.5, "participating_of_alive": 0.75}
    >>> print(in_words(Report(delivered=12, returned=3, compared=17, **nothing, **counts)))
    faults        none
    commits       9 in 10 attempts (90 % succeeded); 0 deltas refused, 0 checkpoints not saved
    islands       2.00 known, 2.00 alive, 1.50 participating on average (0.750 of the living)
    data          12 units delivered, 3 leased again: each in exactly one commit
    equal bits    17 digests of islands' own logs compared, none differs
    """
    kinds = ", ".join(f"{count} {name}" for name, count in report.done.items()) or "none"
    lines = [
        ("faults", kinds),
        (
            "commits",
            f"{report.commits} in {report.attempts} attempts ({100 * report.succeeded:.0f} % succeeded); {report.refused} deltas "
            f"refused, {report.not_saved} checkpoints not saved",
        ),
        (
            "islands",
            f"{report.known:.2f} known, {report.alive:.2f} alive, {report.participating:.2f} participating on average "
            f"({report.participating_of_alive:.3f} of the living)",
        ),
        (
            "data",
            f"{report.delivered} units delivered, {report.returned} leased again: "
            + ("; ".join(report.data) or "each in exactly one commit"),
        ),
        ("equal bits", f"{report.compared} digests of islands' own logs compared, " + ("; ".join(report.apart) or "none differs")),
    ]
    if report.recoveries:
        commit_s = _seconds(one.commit_s for one in report.recoveries)
        back_s = _seconds(one.back_s for one in report.recoveries)
        lines.append(("recovery", f"after a kill the others commit {commit_s}, and the killed one works again {back_s}"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _seconds(found: Iterable[float | None]) -> str:
    known = [one for one in found if one is not None]
    return f"within {median(known):.1f} s (median; at most {max(known):.1f} s)" if known else "never"
