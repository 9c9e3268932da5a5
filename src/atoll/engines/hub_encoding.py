"""How weights and updates travel between a hub and its workers if the hub's plan has a codec.

An update is encoded with what the codec left out of this worker's earlier ones (error feedback). The worker keeps what it leaves
out now. Weights themselves would be useless in 2 bits, so the hub encodes by how much its weights differ from those that the worker
has. It knows these: it decodes what it sends, as the worker does, so both have the same bits. What one pull leaves out is in the
next difference. A worker that is new, or has lost its weights, gets them whole.

>>> from atoll.optim.codecs import Int
>>> held, weights = Tree.of({"w": torch.zeros(256)}), Tree.of({"w": torch.linspace(-1, 1, 256)})
>>> data = encode_weights(Int(bits=4), weights, held, round=3)
>>> data.nbytes, weights.nbytes, float((decode_weights(Int(bits=4), held, data) - weights).flat.abs().max()) < 1 / 14
(130, 1024, True)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import Codec, Plan
from atoll.optim.codecs import seed_of


class SentUpdate(NamedTuple):
    """A worker's update as it travels."""

    delta: Tree  # as the hub reads it; donated
    data: Tensor | None = None  # that the worker sends; None: the delta as it is
    unsent: Tree | None = None  # for the worker to add to its next delta

    @property
    def nbytes(self) -> int:
        return self.delta.nbytes if self.data is None else self.data.nbytes


def encode_update(plan: Plan, delta: Tree, unsent: Tree | None, round: int) -> SentUpdate:
    """A worker's update in the plan's codec. The delta is donated. One that is not finite travels as it is, for the hub to refuse,
    and leaves nothing for later."""
    if plan.codec is None:
        return SentUpdate(delta)
    dtype = delta.flat.dtype
    values = delta.claim(torch.float32)
    if unsent is not None:
        values.add_(unsent, plan.feedback)
    if not values.is_finite():
        return SentUpdate(values.cast(dtype).donate())
    data = plan.codec.encode(values.flat, seed_of("push", round))
    seen = decode_update(plan.codec, data, values.layout, dtype)
    unsent = values.add_(seen.cast(torch.float32), -1) if plan.feedback else None
    return SentUpdate(seen.donate(), data, unsent)


def decode_update(codec: Codec, data: Tensor, layout: Layout, dtype: torch.dtype) -> Tree:
    """Raises ValueError for bytes of another number."""
    out = empty(layout.numel, torch.float32, data.device)
    return Tree(layout, codec.decode(data, layout.numel, out=out)).cast(dtype)


def encode_weights(codec: Codec, weights: Tree, held: Tree, round: int) -> Tensor:
    """The difference of the hub's weights from those that a worker holds, as bytes."""
    difference = weights.copy(torch.float32).add_(held.cast(torch.float32), -1)
    data = codec.encode(difference.flat, seed_of("pull", round))
    difference.release()
    return data


def decode_weights(codec: Codec, held: Tree, data: Tensor) -> Tree:
    """The weights that a worker has after a pull. Both sides compute them."""
    moved = decode_update(codec, data, held.layout, torch.float32)
    return moved.add_(held.cast(torch.float32)).cast(held.flat.dtype)
