"""The weights of a user's module, read and written as Trees. The module stays as it is: values are copied in and out.

A module may be sharded inside its island by FSDP2: then this process reads and writes its own shard of each parameter. Or it may be
replicated there by torch's DDP: then this process speaks for a slice of the whole, and the slices are put together inside.
"""

from __future__ import annotations

from typing import Protocol

from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout, shard_range
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.replica.flat_parameters import ModuleWeights


class Weights(Protocol):
    """What this process holds of a module's trainable weights, as far as it speaks for them."""

    layout: Layout

    def read(self) -> Tree:
        """A copy of the present weights."""

    def write(self, params: Tree) -> None:
        """Put these weights into the module."""


class SlicedWeights:
    """A slice of a module that all devices of the island hold alike. A Weights.

    Args:
        whole: the module's weights.
        inside: a wire with the devices of the island.
        line: the thread that uses it.
    """

    def __init__(self, whole: ModuleWeights, inside: GroupCollectives, line: CommunicationThread) -> None:
        self._whole, self._inside, self._line = whole, inside, line
        self._range = shard_range(whole.layout.numel, inside.rank, inside.size)
        self.layout = whole.layout.slice(*self._range)

    def read(self) -> Tree:
        whole = self._whole.read()
        mine = whole.slice(*self._range).copy()
        whole.release()
        return Tree(self.layout, mine.flat)

    def write(self, params: Tree) -> None:
        layout = self._whole.layout
        whole = Tree(layout, empty(layout.numel, layout.dtype, params.flat.device))
        whole.slice(*self._range).flat.copy_(params.flat)
        self._line.call(lambda: self._inside.all_gather(whole.flat))
        self._whole.write(whole)
        whole.release()


def with_digits(now: Tree, loaded: Tree) -> Tree:
    """Present weights with the digits that were lost when `loaded` was put into a module of less precision.

    An island measures how far it moved. What rounding did before it began is not a move of its own.
    """
    full = now.wide()
    for piece, at in zip(full.layout.pieces, full.layout.offsets.values(), strict=True):
        if piece.dtype.itemsize < full.flat.dtype.itemsize:
            part, was = full.flat[at : at + piece.count], loaded.flat[at : at + piece.count]
            part.add_(was - was.to(piece.dtype))
    return full


def loses_digits(params: Tree) -> bool:
    """Whether these weights have digits that their module has not."""
    return any(piece.dtype.itemsize < params.flat.element_size() for piece in params.layout.pieces)
