"""What a rank computes with the chunks of an exchange: weighted sums, inner products, and the mean of encoded buffers.

Processes exchange what an `EncodedPart` encodes, and the simulator calls the same methods: their bits and bytes are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree, empty, products
from atoll.core.layout import shard_range
from atoll.core.protocols import Codec, Encoding


def nothing(*_: object) -> None:
    """A hook that does nothing."""


def encoded_slices(codec: Codec, numel: int, size: int) -> list[tuple[int, int]]:
    """The slice of so many encoded values that each rank owns. A slice is cut at whole units, so that its bits are those of the
    whole. Values that are gathered have no slices."""
    return [(0, numel) if codec.gathers else shard_range(numel, rank, size, codec.unit) for rank in range(size)]


class EncodedPart:
    """One rank's part in a mean of encoded buffers. A span is the range of a chunk."""

    def __init__(
        self,
        rank: int,
        flat: Tensor,
        mean: Tensor,
        weights: Sequence[float],
        encoding: Encoding,
        inner_products: Tensor | None = None,
    ) -> None:
        self._flat, self.mean, self._weights = flat, mean, weights
        self._total, self._weight = float(sum(weights)), weights[rank]
        self._codec, self._seed = encoding
        self._inner_products = inner_products
        self._owned = shard_range(flat.numel(), rank, len(weights), self._codec.unit)  # gathered values have an owner here, too

    def bytes_for(self, span: tuple[int, int]) -> Tensor:
        """A buffer for an encoded chunk."""
        return torch.empty(self._codec.nbytes(span[1] - span[0]), dtype=torch.uint8, device=self._flat.device)

    def encode(self, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The bytes of a chunk of this rank's buffer, and the values that they stand for. What they leave out, times the weight,
        stays in the buffer, if that is in the mean."""
        start, stop = span
        values = self._flat[start:stop]
        data = self._codec.encode(values, self._seed + start)
        seen = self._codec.decode(data, stop - start)
        if self._weight:
            values -= seen
            if self._weight != 1.0:
                values *= self._weight
        return data, seen

    def decode(self, data: Tensor, span: tuple[int, int]) -> Tensor:
        """The values of another rank's chunk."""
        return self._codec.decode(data, span[1] - span[0])

    def add(self, terms: Sequence[Tensor], span: tuple[int, int]) -> None:
        """The weighted mean of the chunks that all ranks' bytes stand for. The terms are overwritten. Every rank adds all values
        that are gathered, and the inner products of those that it owns."""
        start, stop = span
        owned = slice(max(0, self._owned[0] - start), max(0, self._owned[1] - start))
        if self._inner_products is not None:
            add_inner_products([term[owned] for term in terms], self._inner_products)
        weighted_sum(terms, self._weights, self.mean[start:stop])
        self.mean[start:stop] /= self._total

    def encode_mean(self, span: tuple[int, int]) -> Tensor:
        """The bytes of a chunk of the mean, which all ranks read. Their error stays in the owner's buffer, times the weights of
        all."""
        start, stop = span
        part = self.mean[start:stop]
        data, error = self._codec.encode(part, self._seed + self._flat.numel() + start), part.clone()
        self._codec.decode(data, stop - start, out=part)
        if self._weight:
            self._flat[start:stop].add_(error.sub_(part).mul_(self._total))  # two roundings: see `weighted_sum`
        return data

    def read_mean(self, data: Tensor, span: tuple[int, int]) -> None:
        self._codec.decode(data, span[1] - span[0], out=self.mean[slice(*span)])


def encoded_mean(
    trees: Sequence[Tree],
    weights: Sequence[float],
    encodings: Sequence[Encoding],
    cuts: Sequence[tuple[int, int]] | None = None,
    inner_products: Tensor | None = None,
) -> tuple[Tree, list[Tree | None]]:
    """The mean of encoded trees, as `GroupCollectives.encoded_mean` makes it of the ranks' buffers, and what each tree's encoding
    left out: None for a tree of weight 0, which is not in the mean. The weights have a sum above 0. `cuts` are the ranges that
    travel separately, each from a device of its own. The inner products of what the bytes stand for are added to
    `inner_products`."""
    first, size = trees[0], len(trees)
    mean = empty(first.numel, torch.float32, first.flat.device)
    unsent = [tree.copy(torch.float32) for tree in trees]
    for start, stop in cuts or [(0, first.numel)]:
        parts = [
            EncodedPart(rank, tree.flat[start:stop], mean[start:stop], weights, encoding)
            for rank, (tree, encoding) in enumerate(zip(unsent, encodings, strict=True))
        ]
        codec = encodings[0].codec
        slices = encoded_slices(codec, stop - start, size)
        for owner, span in enumerate(slices[:1] if codec.gathers else slices):
            terms = [part.encode(span)[1] for part in parts]
            if inner_products is not None:
                inner_products += products(terms)
            parts[owner].add(terms, span)
            if not codec.gathers:
                parts[owner].encode_mean(span)
    return Tree(first.layout, mean), [tree if weight else None for tree, weight in zip(unsent, weights, strict=True)]


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
