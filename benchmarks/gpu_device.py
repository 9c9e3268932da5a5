"""Synchronization, memory and matrix products of a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from progress import timed


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if is_cuda(device) else "a CPU"


def synchronize(device: str) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


def seconds(device: str, call: Callable[[], object]) -> float:
    """How long the device takes for a call, from idle to idle."""
    synchronize(device)

    def synchronized() -> None:
        call()
        synchronize(device)

    return timed(synchronized)[0]


def free_memory(device: str) -> None:
    """Frees unreachable tensors: engines and their islands are reference cycles."""
    gc.collect()
    if is_cuda(device):
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int | None:
    """Bytes that could be allocated now; None on a CPU."""
    if not is_cuda(device):
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)


def idle_pool_bytes(segments: Iterable[Mapping[str, Any]], device_index: int) -> int:
    """Bytes in the private pools of CUDA graphs that are not allocated between two replays.

    Args:
        segments: of `torch.cuda.memory_snapshot`.
        device_index: the device.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == device_index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


class Peak:
    """Peak memory since the constructor, minus the memory in use then: allocated bytes, and pools of CUDA graphs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = self._in_use() if is_cuda(device) else 0
        self.begin()

    def begin(self) -> None:
        """Resets the peak."""
        self._pool_at_begin = self.pool_bytes() or 0
        if is_cuda(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)

    def reached(self) -> int | None:
        """Peak bytes; None on a CPU. A pool that existed at the reset adds to the allocations since. A later pool was allocated
        while its pass was captured, and is in the allocator's peak already."""
        if not is_cuda(self._device):
            return None
        allocated = torch.cuda.max_memory_allocated(self._device)
        return max(allocated + self._pool_at_begin, self._in_use()) - self._before

    def pool_bytes(self) -> int | None:
        """What recorded passes keep now without its being allocated; None on a CPU."""
        if not is_cuda(self._device):
            return None
        index = torch.device(self._device).index
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return idle_pool_bytes(segments, torch.cuda.current_device() if index is None else index)

    def _in_use(self) -> int:
        return torch.cuda.memory_allocated(self._device) + (self.pool_bytes() or 0)


def product_flops_per_s(device: str, size: int, for_s: float, products: int = 20) -> float:
    """FLOP/s of a square matrix product in bfloat16, repeated for this long: a device under load for seconds is slower than an idle
    one."""
    one, two = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(one)

    def turn() -> None:
        for _ in range(products):
            torch.mm(one, two, out=out)

    turns_s: list[float] = []
    until_s = time.perf_counter() + for_s
    while len(turns_s) < 2 or time.perf_counter() < until_s:
        turns_s.append(seconds(device, turn))
    return products * 2 * size**3 / later_median(turns_s)


def later_median(turns_s: Sequence[float]) -> float:
    """The median of the later half.

    >>> later_median([9.0, 9.0, 1.0, 2.0, 4.0])
    2.0
    """
    return median(turns_s[len(turns_s) // 2 :])
