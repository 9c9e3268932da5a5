"""Data parallelism within one replica and one process: each further device has a copy of the module and computes a share of every
batch.

The gradient is that of the whole batch, summed on the replica's first device, which alone has an optimizer. Before each pass the
other devices copy its weights and buffers. So several devices take the same steps as one, faster. Buffers that a module changes in
training (running means) follow the first device's share. One thread drives each device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from atoll.core.protocols import Workload
from atoll.replica.flat_parameters import FlatModule, TrainableWeights, copy_buffers, trainable_weights
from atoll.replica.master_weights import cast_parameters

Part = TypeVar("Part")
Backward = Callable[[nn.Module, str, Part], Tensor | None]
"""Adds the gradient of a part of a batch to that of the module on this device. Returns the part's share of the loss, if any."""


class DataParallelDevices:
    """The further devices of a replica."""

    def __init__(self, workload: Workload, devices: Sequence[str], dtype: torch.dtype | None) -> None:
        self.devices = tuple(devices)
        modules = [cast_parameters(workload.module().to(device), dtype) for device in devices]
        self.copies: list[TrainableWeights] = [trainable_weights(module) for module in modules]
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="device")

    def backward(
        self, own: TrainableWeights, device: str, parts: Sequence[Part], compute: Backward[Part], *, in_turn: bool
    ) -> Tensor | None:
        """Adds the gradient of all parts of a batch, one per device, to that of the replica's own weights. The first part is for
        `device`. Devices compute `in_turn` if modules draw from one random generator."""
        weights, threads = own.borrowed(), torch.get_num_threads()
        for copy in self.copies:  # before the first pass, which may change the buffers
            copy_buffers(copy.module, dict(own.module.named_buffers()))

        def compute_part(copy: TrainableWeights, there: str, part: Part) -> Tensor | None:
            torch.set_num_threads(threads)
            with torch.cuda.device(there) if there.startswith("cuda") else nullcontext():
                copy.load(weights)
                copy.zero_gradient()
                return compute(copy.module, there, part)

        jobs = list(zip(self.copies, self.devices, parts[1:], strict=True))
        futures = [] if in_turn else [self._pool.submit(compute_part, *job) for job in jobs]
        total = compute(own.module, device, parts[0])
        for number, job in enumerate(jobs):
            loss = futures[number].result() if futures else compute_part(*job)
            _add_gradients(own, job[0])
            if loss is not None:
                total = loss.to(device) if total is None else total + loss.to(device)
        return total


def _add_gradients(own: TrainableWeights, copy: TrainableWeights) -> None:
    if isinstance(own, FlatModule):
        own.gather_gradient()
        copy.gather_gradient()
        for mine, theirs in zip(own.gradients(), copy.gradients(), strict=True):
            mine.add_(theirs.to(mine.device, non_blocking=True))
        return
    for one, other in zip(own.module.parameters(), copy.module.parameters(), strict=True):
        if other.grad is not None:  # a share without tokens has none
            theirs = other.grad.to(one.device)
            one.grad = theirs.clone() if one.grad is None else one.grad.add_(theirs)
