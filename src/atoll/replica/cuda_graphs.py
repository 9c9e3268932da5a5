"""CUDA graphs of a forward-backward pass: the host launches all of its kernels at once.

A small model has hundreds of kernels of a few microseconds each. A host that launches them one by one is slower than the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.replica.micro_batches import batch_tensors, map_tensors

_WARMUP_PASSES = 2
_MAX_GRAPHS = 4
"""Batch shapes that get a graph. Each graph holds memory of its own."""


class CudaGraphCache:
    """Captures a function of a batch once per batch shape, and replays the graph from then on.

    Args:
        compute: does not wait for the device, launches the same kernels for every batch of one shape, and keeps its other inputs
            and its results in the same buffers.
    """

    def __init__(self, compute: Callable[[Any], Tensor]) -> None:
        self._compute = compute
        self._graphs: dict[tuple[Any, ...], _CapturedGraph] = {}

    def __call__(self, batch: Any) -> Tensor:
        shapes = tuple((part.shape, part.dtype) for part in batch_tensors(batch))
        if shapes not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                return self._compute(batch)
            self._graphs[shapes] = _CapturedGraph(self._compute, batch)
        return self._graphs[shapes].replay(batch)


class _CapturedGraph:
    def __init__(self, compute: Callable[[Any], Tensor], batch: Any) -> None:
        self._batch = map_tensors(torch.clone, batch)
        before, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(before)
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP_PASSES):  # these compile, so that the capture allocates nothing
                compute(self._batch)
        before.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = compute(self._batch)

    def replay(self, batch: Any) -> Tensor:
        map_tensors(lambda captured, new: captured.copy_(new, non_blocking=True), self._batch, batch)
        self._graph.replay()
        return self._result.clone()
