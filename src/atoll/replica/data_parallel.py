"""Further devices of one replica: each has a copy of the module, and takes a share of every batch.

The gradient is that of the whole batch, added up on the replica's own device, which alone has an optimizer; before each pass the
others take its weights and buffers. So a replica with several devices takes the steps that it would take with one, faster. What a
module notes in buffers while it trains (running means) is noted of the first device's share. This is one process: devices are
driven by threads, and what computes on them does not wait for Python.
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
Pass = Callable[[nn.Module, str, Part], Tensor | None]
"""Adds the gradient of a part of a batch to that of the module on this device; the part's share of the loss, if it has any."""


class DataParallelDevices:
    """The further devices.

    Args:
        workload: makes the module.
        devices: where the copies are.
        dtype: of the module's parameters; none leaves them as the workload makes them.
    """

    def __init__(self, workload: Workload, devices: Sequence[str], dtype: torch.dtype | None) -> None:
        self.devices = tuple(devices)
        self.copies: list[TrainableWeights] = [
            trainable_weights(cast_parameters(workload.module().to(device), dtype)) for device in devices
        ]
        self._pool = ThreadPoolExecutor(len(devices), thread_name_prefix="device")

    def backward(
        self, own: TrainableWeights, device: str, parts: Sequence[Part], compute: Pass[Part], *, in_turn: bool
    ) -> Tensor | None:
        """Adds the gradient of all parts to the module's own.

        Args:
            own: the replica's weights, with the gradients that are to be added to.
            device: where they are.
            parts: of a batch, one for each device.
            compute: computes one of them.
            in_turn: one after the other, because modules draw from one source of random numbers.
        """
        weights, threads = own.lent(), torch.get_num_threads()
        for copy in self.copies:  # before anybody computes: a pass may change them
            copy_buffers(copy.module, dict(own.module.named_buffers()))

        def help_with(copy: TrainableWeights, there: str, part: Part) -> Tensor | None:
            torch.set_num_threads(threads)
            with torch.cuda.device(there) if there.startswith("cuda") else nullcontext():
                copy.load(weights)
                copy.zero_gradient()
                return compute(copy.module, there, part)

        jobs = [self._pool.submit(help_with, *job) for job in zip(self.copies, self.devices, parts[1:], strict=True) if not in_turn]
        total = compute(own.module, device, parts[0])
        for number, copy in enumerate(self.copies):
            loss = jobs[number].result() if jobs else help_with(copy, self.devices[number], parts[number + 1])
            _add(own, copy)
            if loss is not None:
                total = loss.to(device) if total is None else total + loss.to(device)
        return total

    def tensors(self) -> dict[str, list[Tensor]]:
        """All that they hold, by what it is for."""
        modules = [copy.module for copy in self.copies]
        return {
            "parameters": [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())],
            "gradients": [gradient for copy in self.copies for gradient in copy.gradients()],
        }


def _add(own: TrainableWeights, copy: TrainableWeights) -> None:
    """The gradients of a copy, to the replica's own."""
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
