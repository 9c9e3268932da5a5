"""Checksums of tensors: every bit and its place counts. They fit into a float, and so travel with other numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def checksum(flat: Tensor, before: int = 0) -> int:
    """Of a buffer's bits, and of those of a buffer before it, whose checksum is given: pieces in order are as good as the whole.

    A sum of numbers would be faster on a GPU, but a sum sees neither order nor two signs that have changed.

    >>> one = torch.arange(5.0)
    >>> checksum(one) == checksum(one[2:], before=checksum(one[:2]))
    True
    >>> checksum(one) == checksum(one.flip(0))
    False
    """
    memory: Any = flat.detach().cpu().contiguous().view(torch.uint8).numpy()
    return zlib.crc32(memory, before)


def combined(sums: Iterable[int], text: str = "") -> int:
    """Of several checksums, in order, and a text."""
    return zlib.crc32(",".join(map(str, sums)).encode() + text.encode())
