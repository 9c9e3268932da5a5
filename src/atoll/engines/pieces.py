"""Batches in pieces: a batch may be a tensor, or tuples, lists and dicts of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def cut(batch: Any, pieces: int) -> Iterator[Any]:
    """The batch in pieces along its first dimension."""
    if pieces == 1:
        yield batch
    elif isinstance(batch, Tensor):
        yield from torch.tensor_split(batch, pieces)
    elif isinstance(batch, Mapping):
        for parts in zip(*(cut(item, pieces) for item in batch.values()), strict=True):
            yield dict(zip(batch, parts, strict=True))
    else:
        for parts in zip(*(cut(item, pieces) for item in batch), strict=True):
            yield type(batch)(parts)


def length(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch.shape[0]


def to_device(batch: Any, device: str) -> Any:
    if device == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(item, device) for name, item in batch.items()}
    return type(batch)(to_device(item, device) for item in batch)
