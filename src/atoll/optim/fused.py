"""torch's fused AdamW kernel, on ranges of a buffer, with bits that do not depend on the ranges.

The kernel reads and writes each number once: about two copies' worth of time, where the readable form takes ten. But it rounds
otherwise in the elements at an end that fill no vector, so that a shard would not have the bits of the whole. Those elements are
padded here to a whole vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

VECTOR = 64
"""Elements; a multiple of every vector width."""


class Moments(NamedTuple):
    """Flat buffers of one length (or windows on them). All but the gradient are changed in place."""

    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


def fused_adamw(
    moments: Moments,
    ranges: Iterable[tuple[int, int]],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's update number `step` (the first is 1) on these ranges of the buffers."""
    bodies, ends = _cut(moments, ranges)
    padded = [Moments(*(pad(end, (0, VECTOR - end.numel())) for end in row)) for row in ends]
    rows = bodies + padded
    if not rows:
        return
    torch._fused_adamw_(
        [row.weights for row in rows],
        [row.gradient for row in rows],
        [row.mean for row in rows],
        [row.square for row in rows],
        [],
        [torch.full((), float(step), device=moments.weights.device)] * len(rows),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for row, updated in zip(ends, padded, strict=True):
        for end, values in ((row.weights, updated.weights), (row.mean, updated.mean), (row.square, updated.square)):
            end.copy_(values[: end.numel()])


def _cut(moments: Moments, ranges: Iterable[tuple[int, int]]) -> tuple[list[Moments], list[Moments]]:
    """What fills whole vectors, and what is left at the end of each range."""
    bodies, ends = [], []
    for start, stop in ranges:
        middle = stop - (stop - start) % VECTOR
        if start < middle:
            bodies.append(Moments(*(flat[start:middle] for flat in moments)))
        if middle < stop:
            ends.append(Moments(*(flat[middle:stop] for flat in moments)))
    return bodies, ends
