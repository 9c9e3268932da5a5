"""A module in half precision, and the weights in single precision that it is stepped by.

Updates are mostly smaller than what half precision can tell from nothing: added to weights in bfloat16 they would be lost. So
whoever steps such a module keeps the weights in single precision as well, its *masters*, with the optimizer's moments: it adds to
the masters, and the module is given them rounded.

>>> module = in_precision(nn.Linear(2, 1), torch.bfloat16)
>>> module.weight.dtype
torch.bfloat16
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.chunked_elementwise import trees_in, with_trees
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.protocols import HoldsWeights, Workload
from atoll.optim.adam import Adam, AdamW
from atoll.optim.chunked_step import step
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.replica.flat_parameters import FlatModule, TrainableWeights

InnerRule = AdamW | Adam | SGD | Momentum | Nesterov


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module with its parameters in this dtype, frozen ones too; none leaves them. Buffers stay as they are: tables of
    positions and running means are not what takes the memory, and they need their digits."""
    for parameter in module.parameters():
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    return module


def initial_weights(workload: Workload, device: str, dtype: torch.dtype | None = None) -> Tree:
    """The weights that a workload's module begins with, in all their digits, for a module in this dtype."""
    tree = Tree.of(workload.module().to(device))
    if dtype is None:
        return tree
    return Tree(Layout(tuple(replace(piece, dtype=dtype) for piece in tree.layout.pieces)), tree.wide().flat)


def needs_master_weights(weights: TrainableWeights) -> bool:
    """Whether all that is trained has half precision. Where a module's dtypes are mixed, that is its owner's choice."""
    return isinstance(weights, FlatModule) and weights.layout.dtype.itemsize < torch.float32.itemsize


class MasterWeights:
    """The weights of a module in single precision, and an optimizer for them.

    Args:
        weights: of the module.
        rule: the optimizer, elementwise.
        params: what they begin with, in any precision.
    """

    def __init__(self, weights: TrainableWeights, rule: InnerRule, params: Tree) -> None:
        self._weights, self._rule = weights, rule
        wide = params.wide()
        self._params = wide.copy() if wide is params else wide
        self._state: Any = rule.init(self._params)

    def load(self, params: Tree) -> None:
        """Take these weights; moments stay."""
        self._params.flat.copy_(params.flat)

    def read(self) -> Tree:
        """A copy of the weights, in single precision."""
        return self._params.copy()

    def forget(self) -> None:
        """Begin with fresh moments."""
        self._state = self._rule.init(self._params)

    def step(self, lr: float, clip_norm: float | None) -> None:
        """One step with the module's gradients, which are then spent: in the masters' own buffers, and through to the module."""
        (flat,) = self._weights.gradients()
        times = 1.0
        if clip_norm is not None:
            # Not in the gradients' own buffer, as in single precision: they would be rounded once more.
            times = min(1.0, clip_norm / (float(torch.linalg.vector_norm(flat, dtype=torch.float32)) + 1e-6))
        layout = self._weights.layout
        state = with_trees(self._state, (tree.give() for tree in trees_in(self._state)))
        rule = replace(self._rule, lr=lr)
        new = step(rule, self._params.give(), Tree(layout, flat), state, times=times, sent=layout.dtype)
        self._params, self._state = new.params, new.state
        self._weights.load(new.sent)

    def tensors(self) -> list[Tensor]:
        """All that is kept: weights and moments."""
        return [tree.flat for tree in trees_in((self._params, self._state))]

    # ------------------------------------------------------------------------------------------------------------- saving

    def moments(self) -> list[Tensor | float]:
        """The optimizer's state, as a flat list. The weights are whoever's that loads them."""
        return [leaf.flat if isinstance(leaf, Tree) else leaf for leaf in _leaves(self._state)]

    def restore(self, moments: Sequence[Tensor | float]) -> None:
        """Go on from what `moments` returned."""
        self._state = _filled(self._state, iter(moments))


def _leaves(state: Any) -> Iterator[Any]:
    """Trees and numbers in nested tuples, in order."""
    if not isinstance(state, tuple):
        yield state
        return
    for item in state:
        yield from _leaves(item)


def _filled(state: Any, leaves: Iterator[Any]) -> Any:
    """A state of the same kind with these leaves."""
    if isinstance(state, Tree):
        return Tree(state.layout, next(leaves).to(state.flat.device, copy=True))
    if not isinstance(state, tuple):
        return next(leaves)
    items = [_filled(item, leaves) for item in state]
    return type(state)(*items) if hasattr(state, "_fields") else tuple(items)


def check_exchange_dtype(algorithm: Any, layout: Layout) -> None:
    """Refuses slices of several precisions, where each travels in its own: islands would send each other what nobody expects."""
    dtypes = {piece.dtype for piece in layout.pieces}
    if isinstance(algorithm, HoldsWeights) and len(dtypes) > 1 and getattr(algorithm, "wire", "") == "own":
        raise ConfigError(
            f"the model has parameters in {sorted(map(str, dtypes))}, and slices of it travel in the precision of the model, which "
            f'differs from slice to slice. Give the algorithm wire="fp32".'
        )
