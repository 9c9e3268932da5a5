"""Judging weights, beside those who train them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.replica.flat_parameters import copy_buffers, trainable_weights
from atoll.replica.master_weights import cast_parameters


class Evaluator:
    """Judges weights on held-out data with a module of its own, so that no replica is disturbed."""

    def __init__(self, workload: Workload, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._workload = workload
        self._weights = trainable_weights(cast_parameters(workload.module().to(device), dtype))

    def load(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Take these weights, and buffers if the module has some, judging nothing."""
        self._weights.load(params)
        copy_buffers(self._weights.module, buffers or {})

    def __call__(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The measures of these weights."""
        self.load(params, buffers)
        module = self._weights.module
        module.eval()
        with torch.no_grad():
            return dict(self._workload.evaluate(module))

    @property
    def module(self) -> nn.Module:
        """The module with the weights that were judged last."""
        return self._weights.module
