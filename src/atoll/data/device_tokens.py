"""Tokens on a device: put there once, and gathered there into batches.

A batch that comes from the host's memory makes the host wait until the device has come to it, at every step. So the tokens are
uploaded once, and for a stretch of steps only the numbers of its examples travel, together. Where the tokens would take too much of
the device's memory, examples are read on the host instead, many steps at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.examples import Examples

_AT_A_TIME_BYTES = 64 << 20
"""Of batches that are gathered ahead."""
_SHARE = 8
"""At most one part in so many of the device's free memory is taken by tokens."""


class Uploaded:
    """The examples of some tokens, on a device.

    Args:
        examples: of the tokens.
        device: where they are read.
    """

    def __init__(self, examples: Examples, device: str) -> None:
        self._examples, self._device = examples, torch.device(device)
        self._rows = self._upload() if self._fits() else None

    def _fits(self) -> bool:
        if self._device.type != "cuda" or self._examples.tokens.is_on(str(self._device)):
            return True
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        free_bytes += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)  # torch's own reserve
        return len(self._examples.tokens) * 4 <= free_bytes // _SHARE

    def _upload(self) -> Tensor:
        """All examples as rows that overlap, as `Examples` has them."""
        length = self._examples.seq_len
        return self._examples.tokens.on(str(self._device)).as_strided((self._examples.count, length + 1), (length, 1))

    def batches(self, chosen: Iterator[NDArray[Any]]) -> Iterator[Tensor]:
        """Batches of these examples, on the device, some time ahead of whoever asks."""
        row_bytes = 8 * (self._examples.seq_len + 1)
        waiting: list[NDArray[Any]] = []
        for indices in chosen:
            waiting.append(indices)
            if sum(map(len, waiting)) * row_bytes >= _AT_A_TIME_BYTES:
                yield from self._gathered(waiting)
                waiting = []
        if waiting:
            yield from self._gathered(waiting)

    def _gathered(self, batches: Sequence[NDArray[Any]]) -> Iterator[Tensor]:
        indices = np.concatenate(batches)
        if self._rows is None:
            rows = self._moved(torch.from_numpy(self._examples.read(indices)))
        else:
            rows = self._rows.index_select(0, self._moved(torch.from_numpy(indices.astype(np.int64)))).long()
        yield from torch.split(rows, [len(batch) for batch in batches])

    def _moved(self, tensor: Tensor) -> Tensor:
        """From memory that the device can read by itself, so that nobody waits."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
