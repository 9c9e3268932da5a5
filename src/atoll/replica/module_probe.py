"""What a module's step does besides computing gradients, found out by taking one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Habits(NamedTuple):
    """What a step does besides: draw from torch's global generators, as dropout does; change something in the module that is no
    parameter, as BatchNorm does."""

    draws_randomness: bool
    changes_buffers: bool


def habits_of(module: nn.Module, device: str, step: Callable[[], object]) -> Habits:
    """Takes a step of this module on this device, and leaves no trace of it."""
    on_cuda = device.startswith("cuda")
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        before = _generators(on_cuda)
        step()
        draws = not all(torch.equal(one, two) for one, two in zip(before, _generators(on_cuda), strict=True))
    changes = False
    for name, buffer in module.named_buffers():
        changes = changes or not torch.equal(buffer, buffers[name])
        buffer.copy_(buffers[name])
    return Habits(draws, changes)


def _generators(on_cuda: bool) -> list[Tensor]:
    """The states of those that everybody draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]
