"""Which documents are held out: decided by a hash of their name and text, so that it does not depend on their order.

A Planner sees every document once and gives the Split, which then tells for each document where it goes. In between nothing is
held but a few numbers: among them one for each text that is held out, so that a copy of it under another name is held out too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from atoll.core.errors import ConfigError
from atoll.data.documents import Document

TRAIN, VALIDATION = 0, 1
"""The two sides, in the order in which `Split.sides` gives them."""

_KEYS = 1 << 64


@dataclass(frozen=True, slots=True)
class Split:
    """Documents with a key below `threshold` are held out, and those whose text is `held_out`. A lone document is cut instead."""

    threshold: int
    cut: float | None = None
    held_out: frozenset[int] = frozenset()

    def sides(self, document: Document) -> tuple[Document | None, Document | None]:
        """The part of it to train on, and the part to validate on."""
        if self.cut is not None:
            return _cut(document, self.cut)
        held_out = key(document) < self.threshold or text_key(document) in self.held_out
        return (None, document) if held_out else (document, None)


class Planner:
    """Sees documents one by one, and then knows the Split that leaves at least one on each side, if there are two."""

    def __init__(self, fraction: float) -> None:
        check_fraction(fraction)
        self._fraction = fraction
        self._nominal = int(fraction * _KEYS)
        self._seen, self._held_out = 0, 0
        self._lowest, self._highest = _KEYS, -1
        self._texts: set[int] = set()
        self._lowest_text, self._first_text, self._all_alike = 0, 0, True

    def add(self, document: Document) -> bool:
        """Take note of a document; whether it is to be trained on, unless `overruled` in the end."""
        value = key(document)
        held_out = value < self._nominal
        text = text_key(document)
        self._first_text = self._first_text if self._seen else text
        self._all_alike = self._all_alike and text == self._first_text
        self._lowest_text = text if value < self._lowest else self._lowest_text
        if held_out:
            self._texts.add(text)
        self._seen += 1
        self._held_out += held_out
        self._lowest, self._highest = min(self._lowest, value), max(self._highest, value)
        return not held_out

    @property
    def overruled(self) -> bool:
        """Whether the Split differs from what `add` said, because one side would have been empty."""
        return self._seen == 1 or self._held_out in (0, self._seen)

    def split(self) -> Split:
        """The Split of the documents seen so far."""
        if self._seen == 1:
            return Split(0, cut=1 - self._fraction)
        if self._all_alike:  # copies of one text: it must be on both sides, if there are to be two
            return Split(self._lowest + 1)
        if self._held_out == 0:
            return Split(self._lowest + 1, held_out=frozenset([self._lowest_text]))
        if self._held_out == self._seen:
            return Split(self._highest)
        return Split(self._nominal, held_out=frozenset(self._texts))


def plan(documents: Iterable[Document], fraction: float) -> Split:
    """The Split of these documents, with about this fraction of them held out."""
    planner = Planner(fraction)
    for document in documents:
        planner.add(document)
    return planner.split()


def sided(
    documents: Iterable[Document], split: Split, held_out: Iterable[Document] | None = None
) -> Iterator[tuple[int, Document]]:
    """Each document, or part of one, with its side. What is in `held_out` is for validation besides."""
    for document in documents:
        for side, part in zip((TRAIN, VALIDATION), split.sides(document), strict=True):
            if part is not None:
                yield side, part
    for document in held_out or ():
        yield VALIDATION, document


def check_fraction(fraction: float) -> None:
    """Refuse a fraction that leaves nothing on one side."""
    if not 0 < fraction < 1:
        raise ConfigError(
            f"validation_fraction={fraction} must lie between 0 and 1, both excluded: a model is trained on one part of the text "
            f"and judged on the other. The default is 0.05."
        )


def key(document: Document) -> int:
    """A number of 64 bits that depends on the document's name and text alone."""
    state = blake2b(document.name.encode(errors="replace"), digest_size=8)
    state.update(b"\0")
    state.update(document.text.encode(errors="replace"))
    return int.from_bytes(state.digest(), "little")


def text_key(document: Document) -> int:
    """The same for documents of the same text."""
    return int.from_bytes(blake2b(document.text.encode(errors="replace"), digest_size=8).digest(), "little")


def _cut(document: Document, share: float) -> tuple[Document | None, Document | None]:
    """The first part and the rest, cut after a line where one ends nearby."""
    text = document.text
    at = int(len(text) * share)
    at = text.rfind("\n", at - at // 20, at) + 1 or at
    first, rest = text[:at], text[at:]
    return replace(document, text=first) if first else None, replace(document, text=rest) if rest else None
