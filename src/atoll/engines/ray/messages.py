"""What travels between hub and workers. Weights and deltas are the bits of a Tree as one array: Ray's object store hands it from
process to process of a machine without copying it. What comes out of the store is everybody's, and nobody writes into it.

>>> weights = Tree.of({"w": torch.ones(2)})
>>> tree_over(bits_of(weights), weights.layout, "float32")["w"]
tensor([1., 1.])
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import Work
from atoll.engines.round_record import ComputeRecord

Bits = NDArray[np.uint8]

Word = Literal["go", "wait", "hello", "replaced", "over"]
"""What a worker that pulls is told: to go; that there is nothing for it yet; that nobody knows it, so that it should introduce
itself; that another has taken its place; that the run has its local updates."""

Verdict = Literal["taken", "again", "refused", "unknown", "hello", "replaced", "over"]
"""What a worker that pushes is told: its update was taken; it was taken before, when it came for the first time; it is unusable;
nobody knows its round, which the hub has lost; and as above."""


Ticket = tuple[int, int]
"""Names a round without fail: its number, and the hub that gave it out. A hub that goes on from a checkpoint numbers on from there,
and so uses numbers again which the one before it had used."""


class Told(NamedTuple):
    """The hub's answer to a worker that pulls.

    Attributes:
        word: what it is to do.
        ticket: of its round.
        steps: to take.
        work: on what.
        weights: a reference to the bits in the object store, in a tuple of one.
        dtype: of the weights.
        fresh: whether it begins with a new inner optimizer: the hub does not know what its present one was trained on.
        now_s: the time on the hub's clock when it answered.
    """

    word: Word
    ticket: Ticket = (-1, -1)
    steps: int = 0
    work: Work | None = None
    weights: tuple[Any, ...] = ()
    dtype: str = ""
    fresh: bool = False
    now_s: float = 0.0


class Brought(NamedTuple):
    """What a worker brings besides its delta. Times are on the hub's clock, as far as the worker knows it.

    Attributes:
        number: the worker's place among all.
        life: which of those who have held that place it is.
        ticket: of the round in which it moved.
        begin_s: when it had its weights.
        pushed_s: when it began to send.
        stretches: in which it computed.
        buffers: what its module keeps besides weights.
    """

    number: int
    life: int
    ticket: Ticket
    begin_s: float
    pushed_s: float
    stretches: tuple[ComputeRecord, ...]
    buffers: dict[str, NDArray[Any]]

    @property
    def computed_s(self) -> float:
        return sum(stretch.end_s - stretch.start_s for stretch in self.stretches)


def bits_of(tree: Tree) -> Bits:
    """The bits of a Tree as they lie in its buffer, which the array shares if it is in the machine's own memory."""
    bits: Bits = tree.flat.detach().cpu().view(torch.uint8).numpy()
    return bits


def dtype_name(tree: Tree) -> str:
    return str(tree.flat.dtype).removeprefix("torch.")


def tree_over(bits: Bits, layout: Layout, dtype: str) -> Tree:
    """A Tree over these very bits. Read it: they may be others' too."""
    return Tree(layout, torch.from_numpy(bits).view(getattr(torch, dtype)))


def received_tree(bits: Bits, layout: Layout, dtype: str) -> Tree | None:
    """The same of what somebody has sent; none if it is not as long as it should be."""
    return tree_over(bits, layout, dtype) if bits.nbytes == layout.numel * getattr(torch, dtype).itemsize else None


def own_tree(bits: Bits, layout: Layout, dtype: str, device: str) -> Tree:
    """A Tree with these bits in a buffer of its own."""
    flat = empty(layout.numel, getattr(torch, dtype), torch.device("cpu"))
    np.copyto(flat.view(torch.uint8).numpy(), bits)
    return Tree(layout, flat).to(device)


def arrays_of(buffers: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: buffer.detach().cpu().numpy().copy() for name, buffer in buffers.items()}


def tensors_of(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    """With memory of their own."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def expect_read_only() -> None:
    """For a process of its own. Nobody writes into what comes from the store; torch cannot mark a tensor so, and warns."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
