"""Documents, and a corpus that can be read again and again.

A corpus is read as a stream, domain by domain, and never held whole. A limit keeps every domain: documents are allotted one by
one to the domain that has the fewest bytes so far.

>>> corpus = Corpus(spec="two", domains={"a": lambda: iter([Document("1", "a", "one"), Document("2", "a", "two")]),
...                                      "b": lambda: iter([Document("3", "b", "three")])})
>>> [document.text for document in corpus]
['one', 'two', 'three']
>>> [document.text for document in replace(corpus, limit_bytes=6)]
['one', 'thr']
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from atoll.core.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
"""Alone on a line of a text file it ends a document; between two documents a tokenizer has an id for it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is unique in its corpus, and the domain it belongs to."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by domain. Each iteration reads them anew, in the same order; blank ones are left out.

    Args:
        spec: where the text comes from, for messages.
        domains: for each domain a function that reads its documents.
        limit_bytes: how much text to give at most, in bytes of UTF-8; None: all.
    """

    spec: str
    domains: Mapping[str, Callable[[], Iterator[Document]]]
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(
                f"limit_bytes={self.limit_bytes} leaves no text. Use a positive number of bytes, or None for all of it."
            )

    def __iter__(self) -> Iterator[Document]:
        documents = self._all() if self.limit_bytes is None else self._limited(self.limit_bytes)
        empty = True
        for document in documents:
            yield document
            empty = False
        if empty:
            raise DataError(f"{self.spec} holds no text: all of its documents are empty. Check that it is what you meant.")

    def _all(self) -> Iterator[Document]:
        for read in self.domains.values():
            yield from _with_text(read())

    def _limited(self, limit_bytes: int) -> Iterator[Document]:
        """Domain by domain, as without a limit: documents of one domain stay together."""
        for read, sizes in zip(self.domains.values(), self._allotted(limit_bytes), strict=True):
            for document, size in zip(_with_text(read()), sizes, strict=False):
                if size:
                    yield _cut(document, size)[0]

    def _allotted(self, limit_bytes: int) -> list[list[int]]:
        """For each domain the bytes of each document that may be given, as far as the limit goes."""
        # A document longer than a domain's share is cut to it, or the first long one would leave nothing for other domains.
        share, left = max(1, limit_bytes // len(self.domains)), limit_bytes
        readers = [_with_text(read()) for read in self.domains.values()]
        sizes: list[list[int]] = [[] for _ in readers]
        whole: list[list[int]] = [[] for _ in readers]
        waiting = [(0, domain) for domain in range(len(readers))]  # a heap of (bytes so far, domain)
        while waiting and left > 0:
            so_far, domain = waiting[0]
            document = next(readers[domain], None)
            if document is None:
                heapq.heappop(waiting)
                continue
            size = _cut(document, min(share, left))[1]
            sizes[domain].append(size)
            whole[domain].append(len(document.text.encode()))
            left -= size
            heapq.heapreplace(waiting, (so_far + max(1, size), domain))
        # A limit that the whole text keeps to cuts nothing.
        return whole if not waiting and sum(map(sum, whole)) <= limit_bytes else sizes


def _with_text(documents: Iterator[Document]) -> Iterator[Document]:
    return (document for document in documents if document.text and not document.text.isspace())


def _cut(document: Document, limit_bytes: int) -> tuple[Document, int]:
    """The document's first bytes, without half a character at the end, and how many they are."""
    data = document.text.encode()
    if len(data) <= limit_bytes:
        return document, len(data)
    text = data[:limit_bytes].decode(errors="ignore")
    return replace(document, text=text), len(text.encode())
