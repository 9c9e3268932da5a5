"""Evaluates weights on held-out data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.replica.flat_parameters import copy_buffers, trainable_weights
from atoll.replica.master_weights import cast_parameters


class Evaluator:
    """Evaluates with a module of its own, so that it changes no replica."""

    def __init__(self, workload: Workload, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._workload = workload
        self._weights = trainable_weights(cast_parameters(workload.module().to(device), dtype))

    def load(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Loads weights and buffers without evaluating them."""
        self._weights.load(params)
        copy_buffers(self.module, buffers or {})

    def __call__(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The metrics of these weights."""
        self.load(params, buffers)
        self.module.eval()
        with torch.no_grad():
            return dict(self._workload.evaluate(self.module))

    @property
    def module(self) -> nn.Module:
        """The module with the weights that were loaded last."""
        return self._weights.module
