"""Documents, and a corpus that streams them domain by domain.

A corpus with `limit_bytes` keeps every domain: it gives the next document to the domain that has the fewest bytes so far.

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
"""Ends a document where it stands alone on a line of a text file. Tokenizers have an id for it, which separates documents."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its domain, and a name that is unique in its corpus."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents by domain. Each iteration reads them again in the same order, without the blank ones.

    Args:
        spec: where the text comes from, for error messages.
        domains: a reader of documents for each domain.
        limit_bytes: UTF-8 bytes of text to yield at most; None: all.
    """

    spec: str
    domains: Mapping[str, Callable[[], Iterator[Document]]]
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        check_limit_bytes(self.limit_bytes)

    def __iter__(self) -> Iterator[Document]:
        documents = self._all() if self.limit_bytes is None else self._limited(self.limit_bytes)
        empty = True
        for document in documents:
            yield document
            empty = False
        if empty:
            raise DataError(f"{self.spec} holds no text: all of its documents are empty. Check that the spec names the right text.")

    def _all(self) -> Iterator[Document]:
        for read in self.domains.values():
            yield from _with_text(read())

    def _limited(self, limit_bytes: int) -> Iterator[Document]:
        for read, sizes in zip(self.domains.values(), self._allotted_bytes(limit_bytes), strict=True):
            for document, size in zip(_with_text(read()), sizes, strict=False):
                if size:
                    yield _truncate(document, size)[0]

    def _allotted_bytes(self, limit_bytes: int) -> list[list[int]]:
        """For each domain, how many bytes of each document to yield."""
        # A document longer than a domain's share is truncated to it. Else the first long document would use up the limit.
        share, left = max(1, limit_bytes // len(self.domains)), limit_bytes
        readers = [_with_text(read()) for read in self.domains.values()]
        sizes: list[list[int]] = [[] for _ in readers]
        full_sizes: list[list[int]] = [[] for _ in readers]
        heap = [(0, domain) for domain in range(len(readers))]  # (bytes so far, domain)
        while heap and left > 0:
            so_far, domain = heap[0]
            document = next(readers[domain], None)
            if document is None:
                heapq.heappop(heap)
                continue
            size = _truncate(document, min(share, left))[1]
            sizes[domain].append(size)
            full_sizes[domain].append(len(document.text.encode()))
            left -= size
            heapq.heapreplace(heap, (so_far + max(1, size), domain))
        # If the whole text is within the limit, nothing is truncated.
        return full_sizes if not heap and sum(map(sum, full_sizes)) <= limit_bytes else sizes


def check_limit_bytes(limit_bytes: int | None) -> None:
    if limit_bytes is not None and limit_bytes < 1:
        raise ConfigError(f"limit_bytes={limit_bytes} leaves no text. Use a positive number of bytes, or None for all of it.")


def _with_text(documents: Iterator[Document]) -> Iterator[Document]:
    return (document for document in documents if document.text and not document.text.isspace())


def _truncate(document: Document, limit_bytes: int) -> tuple[Document, int]:
    """The document's first bytes, up to the end of the last whole character, and their number."""
    data = document.text.encode()
    if len(data) <= limit_bytes:
        return document, len(data)
    text = data[:limit_bytes].decode(errors="ignore")
    return replace(document, text=text), len(text.encode())
