"""What a rank computes with the chunks of an exchange: weighted sums, inner products, and the mean of encoded buffers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.core.protocols import Encoding


def nothing(*_: object) -> None:
    """A hook that does nothing."""


class EncodedPart:
    """One rank's part in a mean of encoded buffers. A span is the range of a chunk."""

    def __init__(
        self,
        rank: int,
        flat: Tensor,
        mean: Tensor,
        weights: Sequence[float],
        encoding: Encoding,
        inner_products: Tensor | None,
    ) -> None:
        self._rank, self._flat, self.mean, self._weights = rank, flat, mean, weights
        self._total, self._share = float(sum(weights)), weights[rank]
        self._codec, self._seed = encoding
        self._inner_products = inner_products

    def bytes_for(self, span: tuple[int, int]) -> Tensor:
        """A buffer for an encoded chunk."""
        return torch.empty(self._codec.nbytes(span[1] - span[0]), dtype=torch.uint8, device=self._flat.device)

    def encode(self, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The bytes of a chunk of this rank's buffer, and the values that they stand for. What they leave out stays in the buffer,
        if that is in the mean."""
        start, stop = span
        values = self._flat[start:stop]
        data = self._codec.encode(values, self._seed + start)
        seen = self._codec.decode(data, stop - start)
        if self._share:
            values -= seen
        return data, seen

    def add(self, own: Tensor, received: Mapping[int, Tensor], span: tuple[int, int]) -> None:
        """The weighted mean of the chunks that all ranks' bytes stand for."""
        start, stop = span
        terms = [
            own if rank == self._rank else self._codec.decode(received[rank], stop - start) for rank in range(len(self._weights))
        ]
        if self._inner_products is not None:
            add_inner_products(terms, self._inner_products)
        weighted_sum(terms, self._weights, self.mean[start:stop])
        self.mean[start:stop] /= self._total

    def encode_mean(self, span: tuple[int, int]) -> Tensor:
        """The bytes of a chunk of the mean, which all ranks read. The owner feeds their error back with its next buffer."""
        start, stop = span
        part = self.mean[start:stop]
        data, error = self._codec.encode(part, self._seed + self._flat.numel() + start), part.clone()
        self._codec.decode(data, stop - start, out=part)
        if self._share:
            self._flat[start:stop].add_(error.sub_(part), alpha=self._total / self._share)
        return data

    def read_mean(self, data: Tensor, span: tuple[int, int]) -> None:
        self._codec.decode(data, span[1] - span[0], out=self.mean[slice(*span)])


def add_inner_products(terms: Sequence[Tensor], inner_products: Tensor) -> None:
    """A chunk lies in the cache, and is short enough for sums in its own precision."""
    for one, two in itertools.combinations_with_replacement(range(len(terms)), 2):
        product = float(torch.dot(terms[one].float(), terms[two].float()))
        inner_products[one, two] += product
        inner_products[two, one] += product if one != two else 0.0


def weighted_sum(terms: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """The weighted sum in rank order, rounded after every product and every sum, so that its bits do not depend on where a buffer
    is cut. Terms are overwritten, and `out` may be one of them."""
    total: Tensor | None = None
    for part, weight in zip(terms, weights, strict=True):
        if weight:
            term = part.to(out.dtype)
            term = term if weight == 1.0 else term.mul_(weight)
            total = term if total is None else total.add_(term)
    if total is not None and total.data_ptr() != out.data_ptr():
        out.copy_(total)
