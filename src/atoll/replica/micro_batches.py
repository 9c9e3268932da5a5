"""Batches and micro-batches. A batch is a tensor, or nested tuples, lists and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def split_batch(batch: Any, pieces: int) -> Iterator[Any]:
    """Splits the batch along its first dimension."""
    if pieces == 1:
        yield batch
    elif isinstance(batch, Tensor):
        yield from torch.tensor_split(batch, pieces)
    elif isinstance(batch, Mapping):
        for parts in zip(*(split_batch(item, pieces) for item in batch.values()), strict=True):
            yield dict(zip(batch, parts, strict=True))
    else:
        for parts in zip(*(split_batch(item, pieces) for item in batch), strict=True):
            yield type(batch)(parts)


def two_examples(batch: Any) -> Any:
    """The first two examples: BatchNorm needs more than one. The whole batch if its tensors differ in their first dimension, which
    then need not count examples.

    >>> two_examples({"tokens": torch.zeros(16, 3)})["tokens"].shape
    torch.Size([2, 3])
    """
    lengths = {part.shape[0] if part.dim() else 0 for part in batch_tensors(batch)}
    return next(split_batch(batch, max(1, min(lengths) // 2))) if len(lengths) == 1 else batch


def batch_length(batch: Any) -> int:
    """The first dimension of the first tensor."""
    return next(batch_tensors(batch)).shape[0]


def to_device(batch: Any, device: str) -> Any:
    return batch if device == "cpu" else map_tensors(lambda part: part.to(device, non_blocking=True), batch)


def batch_tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from batch_tensors(item)


def map_tensors(function: Callable[..., Tensor], *batches: Any) -> Any:
    """Applies the function to each tensor of a batch, or to the corresponding tensors of several batches."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(*batches)
    if isinstance(first, Mapping):
        return {name: map_tensors(function, *(batch[name] for batch in batches)) for name in first}
    return type(first)(map_tensors(function, *items) for items in zip(*batches, strict=True))
