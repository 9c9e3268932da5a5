"""Master weights in single precision for a module in half precision.

Most updates are too small for half precision: added to weights in bfloat16 they would be rounded away. So the optimizer of such a
module steps master weights in single precision, and the module gets them rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.nested_trees import leaves, trees_in, with_trees
from atoll.core.protocols import HoldsWeights, Workload
from atoll.optim.adam import Adam, AdamW
from atoll.optim.chunked_step import step
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.torch_optimizers import Muon, TorchOptimizer, TorchRule, TorchState
from atoll.replica.flat_parameters import FlatModule, TrainableWeights

InnerRule = AdamW | Adam | SGD | Momentum | Nesterov | Muon | TorchOptimizer


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Casts all parameters, frozen ones too; None leaves them. Buffers keep their dtype: position tables and running means are
    small and need their precision."""
    for parameter in module.parameters():
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    return module


def initial_weights(workload: Workload, device: str, dtype: torch.dtype | None = None) -> Tree:
    """The workload's initial weights in full precision, with the layout of a module in this dtype."""
    tree = Tree.of(workload.module().to(device))
    if dtype is None:
        return tree
    return Tree(Layout(tuple(replace(piece, dtype=dtype) for piece in tree.layout.pieces)), tree.wide().flat)


def needs_master_weights(weights: TrainableWeights) -> bool:
    """Whether all trainable parameters have half precision. A module of several dtypes is trained as it is."""
    return isinstance(weights, FlatModule) and weights.layout.dtype.itemsize < torch.float32.itemsize


class MasterWeights:
    """Weights of a module in single precision, their optimizer, and its moments. `params` are the first weights, in
    any precision."""

    def __init__(self, weights: TrainableWeights, rule: InnerRule, params: Tree) -> None:
        self._weights, self._rule = weights, rule
        wide = params.wide()
        self._params = wide.copy() if wide is params else wide
        self._state: Any = rule.init(self._params)

    def load(self, params: Tree) -> None:
        """Replaces the weights, all of them or some pieces, and keeps the moments."""
        self._params.paste_(params)

    def read(self, layout: Layout) -> Tree:
        """A copy of the weights in this layout, in single precision."""
        return self._params.part(layout).claim()

    def reset_moments(self) -> None:
        self._state = self._rule.init(self._params)

    def step(self, lr: float, clip_norm: float | None) -> None:
        """One step with the module's gradients, in place, and loads the result into the module."""
        (flat,) = self._weights.gradients()
        times = 1.0
        if clip_norm is not None:
            # Scaling the gradients in their own buffer would round them once more.
            times = min(1.0, clip_norm / (float(torch.linalg.vector_norm(flat, dtype=torch.float32)) + 1e-6))
        layout = self._weights.layout
        if isinstance(self._rule, TorchRule):
            gradient = Tree(layout, flat.to(self._params.flat.dtype) * times)
            self._params, self._state = self._rule.update_at(lr, self._params, gradient, self._state)
            self._weights.load(self._params)
            return
        state = with_trees(self._state, (tree.donate() for tree in trees_in(self._state)))
        rule = replace(self._rule, lr=lr)
        new = step(rule, self._params.donate(), Tree(layout, flat), state, times=times, sent=layout.dtype)
        self._params, self._state = new.params, new.state
        self._weights.load(new.sent)

    def tensors(self) -> list[Tensor]:
        """Weights and moments."""
        return [tree.flat for tree in trees_in((self._params, self._state))]

    def moments(self) -> list[Tensor | float] | TorchState:
        """The optimizer's state without the weights, as a flat list: the number of steps, then each moment. Of a torch optimizer,
        its state."""
        if isinstance(self._state, TorchState):
            return self._state
        return [leaf.flat if isinstance(leaf, Tree) else leaf for _, leaf in leaves(self._state)]

    def restore(self, moments: Sequence[Tensor | float] | TorchState) -> None:
        """Restores what `moments` returned."""
        if isinstance(moments, TorchState):
            self._state = with_trees(moments, (tree.copy() for tree in trees_in(moments)))
            return
        step, *flats = moments
        pairs: Iterator[tuple[Tree, Any]] = zip(trees_in(self._state), flats, strict=True)
        restored = (Tree(old.layout, flat.to(old.flat.device, copy=True)) for old, flat in pairs)
        self._state = with_trees(self._state, restored)._replace(step=step)


def check_exchange_dtype(algorithm: Any, layout: Layout) -> None:
    """Rejects a model of several dtypes if its slices are exchanged in their own dtype: ranks would disagree on message sizes."""
    dtypes = {piece.dtype for piece in layout.pieces}
    if isinstance(algorithm, HoldsWeights) and len(dtypes) > 1 and getattr(algorithm, "wire", "") == "own":
        raise ConfigError(
            f"the model has parameters in {sorted(map(str, dtypes))}, and its slices travel in their own precision, which differs "
            f'from slice to slice. Give the algorithm wire="fp32".'
        )
