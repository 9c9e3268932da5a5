"""A pass that was recorded once and is replayed: the host launches all of its kernels at one go.

A small model has hundreds of kernels of a few microseconds each, and a host that launches them one by one is slower than the GPU
that computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.replica.micro_batches import batch_tensors, map_tensors

_WARMUP_PASSES = 2
_MAX_GRAPHS = 4
"""Shapes of batches that are recorded: each holds memory of its own."""


class CudaGraphCache:
    """A function of a batch, on a GPU, whose other inputs and whose results stay where they are.

    Args:
        compute: the function. It must not wait for the device, and launches the same kernels for every batch of one shape.
    """

    def __init__(self, compute: Callable[[Any], Tensor]) -> None:
        self._compute = compute
        self._recorded: dict[tuple[Any, ...], _CapturedGraph] = {}

    def __call__(self, batch: Any) -> Tensor:
        """What the function returns."""
        shapes = tuple((part.shape, part.dtype) for part in batch_tensors(batch))
        if shapes not in self._recorded:
            if len(self._recorded) >= _MAX_GRAPHS:
                return self._compute(batch)
            self._recorded[shapes] = _CapturedGraph(self._compute, batch)
        return self._recorded[shapes].replay(batch)


class _CapturedGraph:
    def __init__(self, compute: Callable[[Any], Tensor], batch: Any) -> None:
        self._batch = map_tensors(torch.clone, batch)
        before, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP_PASSES):  # compiles, and leaves nothing to be made while it is recorded
                compute(self._batch)
        before.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = compute(self._batch)

    def replay(self, batch: Any) -> Tensor:
        map_tensors(lambda mine, theirs: mine.copy_(theirs, non_blocking=True), self._batch, batch)
        self._graph.replay()
        return self._result.clone()
