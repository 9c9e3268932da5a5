"""What pages show of `paper_claims.py`: the headline claims in a few words, and the verdicts in `docs/coverage.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ablations import Group
from atoll.core.verified_files import write_text
from claims import UNEQUAL_START, mean_difference
from paper_claims_verdicts import (
    CLOSE,
    Study,
    Tested,
    compared_text,
    fewer_text,
    further_claims,
    headline_claims,
    start_differs,
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
    """The headline claims, a line each."""
    run = [each for each in headline_claims(study) if set(each.terms) <= study.outcomes.keys()]
    lines = []
    for each in run:
        strict, near = (verdict_words(found) for found in verdicts_of(study, each))
        shown = [strict, f"at most {CLOSE:g} above: {near}" if near and "verdict" not in near else ""]
        lines.append([each.text, each.paper, compared_text(study, *each.terms), "; ".join(filter(None, shown)), each.regime])
    return markdown_table(["claim", "the paper", "here", "verdict", "regime"], lines, left=5)


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
        rows = [
            f"`{label}`{fewer_text(study.outcomes[label], len(study.seeds))} {_difference(study, label, other)}"
            for _, label in found
        ]
        parts.append(f"to `{other}`: {', '.join(rows)}")
    left = len(group.rows) - len(there)
    return f"{'. '.join(parts)}. No verdict" + (f". {left} rows not run: device time" if left else "")


def _difference(study: Study, label: str, other: str) -> str:
    mine, its = study.outcomes[label].loss, study.outcomes[other].loss
    if mine is None or its is None:
        return "diverged"
    return f"{mean_difference(mine, its):+.4f}" + (f" ({UNEQUAL_START})" if start_differs(study.outcomes, label, other) else "")
