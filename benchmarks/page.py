"""A record's sections on a page of the docs, between marks that name the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from record import Record, replace_between


def fill(page: Path | None, marker: str, sections: Sequence[str], record: Record) -> bool:
    """Puts the sections, all but the commands, between the page's marks, with a link to the record and its plot. False without a
    page."""
    if page is None:
        return False
    place = relpath(record.path, page.parent)
    shown = [demoted(section) for section in sections if not section.startswith("## Commands")]
    plot = [f"![what the record found]({place}/{record.plot.name})"] if record.plot.exists() else []
    return replace_between(page, marker, "\n\n".join([f"[The record]({place}/README.md).", *shown, *plot]))


def demoted(section: str) -> str:
    """A section whose headings are one level lower.

    >>> demoted("## Outcome\\n\\nGood: a ## within a line stays.")
    '### Outcome\\n\\nGood: a ## within a line stays.'
    """
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in section.split("\n"))
