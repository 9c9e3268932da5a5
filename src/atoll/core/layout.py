"""The layout of named tensors, or pieces of them, in one contiguous buffer, and how a buffer is cut into shards.

>>> layout = Layout.of({"w": torch.ones(2, 2), "b": torch.zeros(2)})
>>> layout.numel, layout.offsets
(6, {'w': 0, 'b': 4})
>>> layout.slice(3, 6).pieces[0].start      # the last element of w: a piece knows where in its tensor it begins
3
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or `count` consecutive elements of it from `start` on."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype  # the tensor's own; the buffer has the widest dtype of its pieces, which loses nothing
    start: int
    count: int

    @property
    def whole(self) -> bool:
        return self.count == math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The pieces of a buffer, one after the other. Of a whole each tensor is one piece; a part of it may have several of one
    tensor, which `views` tells apart."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise TypeError(f"{name} is {tensor.dtype}: a Tree holds floating-point tensors only. Leave it out.")
        return Layout(tuple(Piece(n, tuple(t.shape), t.dtype, 0, t.numel()) for n, t in tensors.items()))

    @cached_property
    def numel(self) -> int:
        return sum(piece.count for piece in self.pieces)

    @cached_property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (piece.dtype for piece in self.pieces)) if self.pieces else torch.float32

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each piece begins in the buffer."""
        return tuple(accumulate((piece.count for piece in self.pieces[:-1]), initial=0)) if self.pieces else ()

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The same by name."""
        return {piece.name: at for piece, at in zip(self.pieces, self.starts, strict=True)}

    @cached_property
    def index(self) -> dict[str, Piece]:
        return {piece.name: piece for piece in self.pieces}

    @cached_property
    def _hash(self) -> int:
        return hash(self.pieces)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._hash == other._hash and self.pieces == other.pieces)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.pieces,)  # a hash is not valid in another process

    def slice(self, start: int, stop: int) -> Layout:
        """The layout of `buffer[start:stop]`."""
        return self if (start, stop) == (0, self.numel) else _slice(self, start, stop)

    def select(self, ranges: Sequence[tuple[int, int]]) -> Layout:
        """The layout of these ranges of the buffer, side by side."""
        return joined(self.slice(start, stop) for start, stop in ranges)

    def ranges(self, part: Layout) -> list[tuple[int, int]]:
        """Where the pieces of a part lie in this buffer, in the order of the part: `select` of it is `part`."""
        ranges: list[tuple[int, int]] = []
        for piece in part.pieces:
            whole = self.index[piece.name]
            start = self.offsets[piece.name] + piece.start - whole.start
            assert whole.start <= piece.start, piece.name
            assert piece.start + piece.count <= whole.start + whole.count, piece.name
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], start + piece.count
            else:
                ranges.append((start, start + piece.count))
        return ranges

    def windows(self, size: int) -> tuple[Layout, ...]:
        """The layouts of the buffer's consecutive windows of this size (the last may be shorter)."""
        return _windows(self, size)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each piece as a view of the buffer: in its shape if it is whole, else flat."""
        views: dict[str, Tensor] = {}
        for piece, at in zip(self.pieces, self.starts, strict=True):
            name = f"{piece.name}[{piece.start}]" if piece.name in views else piece.name
            views[name] = viewed(piece, flat[at : at + piece.count])
        return views


@lru_cache(maxsize=4096)
def _slice(layout: Layout, start: int, stop: int) -> Layout:
    pieces = []
    for piece, at in zip(layout.pieces, layout.starts, strict=True):
        first, last = max(start, at), min(stop, at + piece.count)
        empty_here = piece.count == 0 and (start <= at < stop or at == stop == layout.numel)
        if first < last or empty_here:
            pieces.append(Piece(piece.name, piece.shape, piece.dtype, piece.start + first - at, last - first))
    return Layout(tuple(pieces))


@lru_cache(maxsize=4096)  # rules ask every step
def _windows(layout: Layout, size: int) -> tuple[Layout, ...]:
    return tuple(_slice(layout, at, min(at + size, layout.numel)) for at in range(0, layout.numel, size))


def joined(layouts: Iterable[Layout]) -> Layout:
    """The layout of buffers one after the other. A tensor that is cut where they meet is one piece."""
    pieces: list[Piece] = []
    for piece in (piece for layout in layouts for piece in layout.pieces):
        last = pieces[-1] if pieces else None
        if last is not None and last.name == piece.name and last.start + last.count == piece.start:
            pieces[-1] = Piece(piece.name, piece.shape, piece.dtype, last.start, last.count + piece.count)
        else:
            pieces.append(piece)
    return Layout(tuple(pieces))


def dtype_text(dtype: torch.dtype) -> str:
    """Its name without that of torch, as in files and messages."""
    return str(dtype).removeprefix("torch.")


def viewed(piece: Piece, flat: Tensor) -> Tensor:
    """A piece of a buffer: in its tensor's shape if it is whole, else flat."""
    return flat.view(piece.shape) if piece.whole else flat


def shard_range(numel: int, rank: int, size: int, unit: int = 1) -> tuple[int, int]:
    """Where rank's shard begins and ends. Shards differ by at most one unit of elements, and nothing is padded. Only the last unit
    may be shorter.

    >>> [shard_range(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    >>> [shard_range(1000, rank, 2, unit=256) for rank in range(2)]
    [(0, 512), (512, 1000)]
    """
    units = -(-numel // unit)
    start, stop = (units * each // size * unit for each in (rank, rank + 1))
    return min(start, numel), min(stop, numel)


def difference(one: Layout, two: Layout) -> str:
    """How two layouts differ, in words."""
    if one.index.keys() != two.index.keys():
        only = sorted(one.index.keys() ^ two.index.keys())
        return f"{only[:3]}{' and more' if len(only) > 3 else ''} are in one of them only"
    unequal = [name for name in one.index if one.index[name] != two.index[name]]
    return f"{unequal[0]} is {one.index[unequal[0]]} and {two.index[unequal[0]]}" if unequal else "their order differs"
