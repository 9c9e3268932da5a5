"""What pages show of `paper_claims.py`: the headline claims in a few words, and the verdicts in `docs/coverage.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import paper_claims_rows as rows_of
from ablations import ONE_SEED, Group
from atoll.core.verified_files import write_text
from claims import UNEQUAL_START, mean_difference
from paper_claims_rows import Plan
from paper_claims_verdicts import (
    CLOSE,
    Study,
    Tested,
    compared_text,
    exchange_share,
    further_claims,
    headline_claims,
    start_differs,
    time_share,
    verdicts_of,
)
from record import markdown_table

_WORDS = {"holds here": "held", "does not hold here": "did not hold"}
_VERDICT = re.compile(r"\*\*(.+)\*\*(?: \((.+)\))?")
NOT_RUN = "not run: the GPU time ended before this table"


def claim_words(study: Study, each: Tested) -> str:
    """A claim with its verdicts and its difference, in the words of the pages."""
    strict, near = verdicts_of(study, each)
    shown = [verdict_words(strict), f"({compared_text(study, *each.terms).replace(f' ({UNEQUAL_START})', '')})"]
    margin = verdict_words(near)
    judged = margin and "verdict" not in margin and "judged" not in margin
    return f"*{each.text}*: {' '.join(filter(None, shown))}" + (f"; at most {CLOSE:g} above: {margin}" if judged else "")


def verdict_words(verdict: str) -> str:
    """
    >>> verdict_words("**holds here** (both edges)"), verdict_words("**two seeds, no verdict**"), verdict_words("-")
    ('held, both edges', 'no verdict, two seeds', '')
    """
    found = _VERDICT.fullmatch(verdict)
    if found is None:
        return ""
    words = _WORDS.get(found[1], found[1])
    if words.endswith(", no verdict"):
        words = f"no verdict, {words.removesuffix(', no verdict')}"
    return words + (f", {found[2]}" if found[2] else "")


def short_table(study: Study) -> str:
    """The headline claims, a line per paper."""
    run = [each for each in headline_claims(study) if set(each.terms) <= study.outcomes.keys()]
    papers = {"DiLoCo": _rounds(study.plan), "Asynchronous": _workers(study), "ACCO": _link(study)}
    lines = [
        [name, " ".join(f"{claim_words(study, each)}." for each in run if each.text.startswith(name)), regime]
        for name, regime in papers.items()
    ]
    return markdown_table(["paper", "headline claims here", "regime"], lines, left=3)


def _rounds(plan: Plan) -> str:
    short, long = plan.lengths[0], plan.lengths[-1]
    return f"{plan.steps // short} rounds of {short} steps, or {plan.steps // long} of {long}; the paper has 128 of 500"


def _workers(study: Study) -> str:
    share = time_share(study, rows_of.DELAYED, rows_of.SYNC)
    text = f"{study.plan.islands} workers of 0.58 to 3.33 s a step"
    return text if share is None else f"{text}; {share:.3f} of synchronous training's time"


def _link(study: Study) -> str:
    exchange, share = exchange_share(study), time_share(study, rows_of.ACCO, rows_of.OVERLAPPED)
    if exchange is None or share is None:
        return "-"
    return (
        f"an exchange takes {exchange:.3f} of a batch's time; {share:.3f} of the time of a DDP in eight buckets. "
        f"[Over slower links it loses](#what-explains-the-figures)"
    )


# -------------------------------------------------------------------------------------------------------------------- coverage


def write_coverage(page: Path, study: Study, one_seed: Sequence[Group]) -> None:
    """Writes the verdict after every claim of the study that the page names, and the differences of tables with one seed between
    their markers."""
    text = page.read_text("utf-8")
    for each in (*headline_claims(study), *further_claims(study)):
        if set(each.terms) <= study.outcomes.keys():
            text = _with_claim(text, study, each)
    for group in one_seed:
        text = _with_table(text, group.name, one_seed_words(study, group))
    write_text(page, text)


def _with_claim(text: str, study: Study, each: Tested) -> str:
    """The difference is in parentheses after the verdict, and the weaker claim's verdict may follow."""
    before = re.compile(rf"\*{re.escape(each.text)}\*: [a-z, :]*\([-+][^)]*\)(?:; at most 0\.02 above: [a-z, ]+)?")
    return before.sub(lambda found: claim_words(study, each), text)


def _with_table(text: str, name: str, words: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    return re.sub(f"{begin}.*?{end}", lambda found: f"{begin}{words}{end}", text)


def one_seed_words(study: Study, group: Group) -> str:
    """The differences of a table's rows, by the row that they are compared with."""
    there = [label for label in group.rows if label in study.outcomes and group.against.get(label, label) in study.outcomes]
    compared = [(group.against[label], label) for label in there if group.against.get(label, label) != label]
    if not compared:
        return NOT_RUN
    parts = []
    for other, found in groupby(sorted(compared, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        rows = [f"`{label}` {_difference(study, label, other)}" for _, label in found]
        parts.append(f"to `{other}`{ONE_SEED.strip()}: {', '.join(rows)}")
    left = len(group.rows) - len(there)
    return f"{'. '.join(parts)}. No verdict" + (f". {left} rows not run: device time" if left else "")


def _difference(study: Study, label: str, other: str) -> str:
    mine, its = study.outcomes[label].loss, study.outcomes[other].loss
    if mine is None or its is None:
        return "diverged"
    return f"{mean_difference(mine, its):+.4f}" + (f" ({UNEQUAL_START})" if start_differs(study.outcomes, label, other) else "")
