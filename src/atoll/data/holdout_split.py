"""Decides which documents are held out for validation, by a hash of their name and text. Their order does not matter.

A SplitPlanner sees every document once and returns the Split. It keeps one 64-bit hash for each text that is held out, so that a
copy of it under another name is held out too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from atoll.core.errors import ConfigError
from atoll.data.document_sources import Document

TRAIN, VALIDATION = 0, 1
"""The two sides, in the order in which `Split.sides` returns them."""

_NUM_KEYS = 1 << 64


@dataclass(frozen=True, slots=True)
class Split:
    """Holds out documents with a key below `threshold` or a text in `held_out_texts`. A lone document is cut at `cut` instead."""

    threshold: int
    cut: float | None = None
    held_out_texts: frozenset[int] = frozenset()

    def sides(self, document: Document) -> tuple[Document | None, Document | None]:
        """The part of the document to train on, and the part to validate on."""
        if self.cut is not None:
            return _cut(document, self.cut)
        key, text_key = _keys(document)
        held_out = key < self.threshold or text_key in self.held_out_texts
        return (None, document) if held_out else (document, None)


class SplitPlanner:
    """Sees documents one by one and returns a Split with at least one document on each side, if it saw two or more."""

    def __init__(self, fraction: float) -> None:
        check_fraction(fraction)
        self._fraction = fraction
        self._threshold = int(fraction * _NUM_KEYS)
        self._num_seen, self._num_held_out = 0, 0
        self._lowest, self._highest = _NUM_KEYS, -1
        self._texts: set[int] = set()
        self._lowest_text, self._first_text, self._all_equal = 0, 0, True

    def add(self, document: Document) -> bool:
        """Count a document. Returns whether it is for training, unless `revised` turns true in the end."""
        key, text = _keys(document)
        held_out = key < self._threshold
        self._first_text = self._first_text if self._num_seen else text
        self._all_equal = self._all_equal and text == self._first_text
        self._lowest_text = text if key < self._lowest else self._lowest_text
        if held_out:
            self._texts.add(text)
        self._num_seen += 1
        self._num_held_out += held_out
        self._lowest, self._highest = min(self._lowest, key), max(self._highest, key)
        return not held_out

    @property
    def revised(self) -> bool:
        """Whether the Split differs from what `add` returned, because one side would have been empty."""
        return self._num_seen == 1 or self._num_held_out in (0, self._num_seen)

    def split(self) -> Split:
        if self._num_seen == 1:
            return Split(0, cut=1 - self._fraction)
        if self._all_equal:  # copies of one text: it must be on both sides, or one would be empty
            return Split(self._lowest + 1)
        if self._num_held_out == 0:
            return Split(self._lowest + 1, held_out_texts=frozenset([self._lowest_text]))
        if self._num_held_out == self._num_seen:
            return Split(self._highest)
        return Split(self._threshold, held_out_texts=frozenset(self._texts))


def plan_split(documents: Iterable[Document], fraction: float) -> Split:
    """The Split that holds out about this fraction of the documents."""
    planner = SplitPlanner(fraction)
    for document in documents:
        planner.add(document)
    return planner.split()


def split_documents(
    documents: Iterable[Document], split: Split, validation: Iterable[Document] | None = None
) -> Iterator[tuple[int, Document]]:
    """Each document, or part of one, with its side; then the documents of `validation`."""
    for document in documents:
        for side, part in zip((TRAIN, VALIDATION), split.sides(document), strict=True):
            if part is not None:
                yield side, part
    for document in validation or ():
        yield VALIDATION, document


def check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(
            f"validation_fraction={fraction} must lie between 0 and 1, both excluded: a model is trained on one part of the text "
            f"and evaluated on the other. The default is 0.05."
        )


def _keys(document: Document) -> tuple[int, int]:
    """64 bits of the document's name and text, and of its text alone."""
    name, text = document.name.encode(errors="replace"), document.text.encode(errors="replace")
    digests = (blake2b(data, digest_size=8).digest() for data in (name + b"\0" + text, text))
    key, text_key = (int.from_bytes(digest, "little") for digest in digests)
    return key, text_key


def _cut(document: Document, share: float) -> tuple[Document | None, Document | None]:
    """The first part and the rest, cut at the end of a line if one ends within the last 5 % of the first part."""
    text = document.text
    at = int(len(text) * share)
    at = text.rfind("\n", at - at // 20, at) + 1 or at
    first, rest = text[:at], text[at:]
    return replace(document, text=first) if first else None, replace(document, text=rest) if rest else None
