"""Tokens: all documents of one side, one after the other, and where each begins.

Every document ends with the tokenizer's end-of-text id, where it has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.core.errors import DataError
from atoll.data.documents import Document
from atoll.data.tokenizer import Ids, Tokenizer, dtype_for

_BATCH_BYTES = 1 << 20  # of text, to be encoded at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The tokens of many documents, in memory or mapped from a file.

    Args:
        ids: the tokens, uint16 or uint32.
        starts: where each document begins in `ids`.
        domain_ids: the domain of each document, as a place in `domains`.
        domains: the names of the domains.
        vocab_size: ids are below this.
        tokenizer_digest: of the tokenizer that wrote them.
    """

    ids: Ids
    starts: NDArray[np.int64]
    domain_ids: NDArray[np.int32]
    domains: tuple[str, ...]
    vocab_size: int
    tokenizer_digest: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    @cached_property
    def domain_tokens(self) -> dict[str, int]:
        """Tokens per domain."""
        ends = np.append(self.starts[1:], len(self.ids))
        sums = np.bincount(self.domain_ids, weights=ends - self.starts, minlength=len(self.domains))
        return {name: int(count) for name, count in zip(self.domains, sums, strict=True)}

    def domains_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The domain of the document that lies at each of these positions, as places in `domains`."""
        return self.domain_ids[np.searchsorted(self.starts, positions, side="right") - 1]

    def on(self, device: str) -> torch.Tensor:
        """The ids on a device, as int32: put there once for all who read them."""
        if device not in self._uploaded:
            self._uploaded[device] = torch.from_numpy(np.asarray(self.ids).astype(np.int32)).to(device)
        return self._uploaded[device]

    def is_on(self, device: str) -> bool:
        """Whether they are there already."""
        return device in self._uploaded

    @cached_property
    def _uploaded(self) -> dict[str, torch.Tensor]:
        return {}

    def document(self, number: int) -> Ids:
        """The tokens of one document."""
        end = self.starts[number + 1] if number + 1 < self.num_documents else len(self.ids)
        return self.ids[self.starts[number] : end]


class DocumentIndex:
    """Grows as documents are added: where each begins, and its domain. Small even for millions of them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._starts, self._domain_ids = array("q"), array("i")
        self._domains: dict[str, int] = {}

    def add(self, domain: str, count: int) -> None:
        """The next document has `count` tokens."""
        self._starts.append(self.num_tokens)
        self._domain_ids.append(self._domains.setdefault(domain, len(self._domains)))
        self.num_tokens += count

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.array(self._starts, dtype=np.int64)

    @property
    def domain_ids(self) -> NDArray[np.int32]:
        return np.array(self._domain_ids, dtype=np.int32)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(self._domains)


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Ids]]:
    """Each document with its tokens and the end-of-text id, as a stream. Some documents are encoded at a time."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES:
            yield from _encode(batch, tokenizer)
            batch, size = [], 0
    yield from _encode(batch, tokenizer)


def _encode(batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Ids]]:
    end, dtype = tokenizer.end_of_text, dtype_for(tokenizer.vocab_size)
    for document, ids in zip(batch, tokenizer.encode_batch([document.text for document in batch]), strict=True):
        yield document, ids.astype(dtype) if end is None else np.append(ids, end).astype(dtype)


def in_memory(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """The tokens of these documents, held in memory."""
    index, pieces = DocumentIndex(), []
    for document, ids in encoded(documents, tokenizer):
        index.add(document.domain, len(ids))
        pieces.append(ids)
    if not pieces:
        raise DataError("there are no documents to make tokens of. Give more text, or hold out less of it.")
    return Tokens(
        ids=np.concatenate(pieces),
        starts=index.starts,
        domain_ids=index.domain_ids,
        domains=index.domains,
        vocab_size=tokenizer.vocab_size,
        tokenizer_digest=tokenizer.digest,
    )
