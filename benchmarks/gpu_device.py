"""A device seen from outside: waiting for it, its memory, and the fastest that it multiplies."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from timing import timed


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def wait_for(device: str) -> None:
    """Until it has done all that it was told."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


def seconds(device: str, do: Callable[[], object]) -> float:
    """How long the device takes for it, from nothing to do to nothing to do."""
    wait_for(device)

    def done() -> None:
        do()
        wait_for(device)

    return timed(done)[0]


def tidy(device: str) -> None:
    """What nobody can reach any more gives its memory back: engines and their islands know each other."""
    gc.collect()
    if is_cuda(device):
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int | None:
    """That could be allocated now; None on a CPU, where nobody asks."""
    if not is_cuda(device):
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)


class Peak:
    """The most that was allocated at one time, beyond what lay there when this was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device) if is_cuda(device) else 0
        self.begin()

    def begin(self) -> None:
        """Forget what was reached before."""
        if is_cuda(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)

    def reached(self) -> int | None:
        """Bytes; None on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) - self._before if is_cuda(self._device) else None


def product_flops_per_s(device: str, size: int, turns: int = 5, products: int = 20) -> float:
    """Of a square matrix product in bfloat16, in the fastest of some turns."""
    one, two = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(one)

    def turn() -> None:
        for _ in range(products):
            torch.mm(one, two, out=out)

    turn()
    return products * 2 * size**3 / min(seconds(device, turn) for _ in range(turns))
