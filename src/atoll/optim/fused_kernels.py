"""torch's fused kernels, on flat buffers, with bits that do not depend on where a buffer is cut.

A kernel reads and writes each number once: AdamW's takes about two copies' worth of time, where the readable form takes ten. But it
rounds otherwise in the elements at an end that fill no vector, so that a shard would not have the bits of the whole. Those elements
are padded here to a whole vector (AdamW), or left to the readable form (SGD).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
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


def fused_momentum(
    weights: Tensor, gradient: Tensor, velocity: Tensor, *, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> int:
    """A step of SGD with momentum in place, on as many elements from the first on as it says: all that fill whole vectors, or none
    where the kernel has not the bits of the readable form."""
    if weights.device.type != "cpu" or weights.dtype not in (torch.float32, torch.float64) or not _rounds_as_the_readable_form():
        return 0
    whole = weights.numel() - weights.numel() % VECTOR
    if whole:
        _momentum(weights[:whole], gradient[:whole], velocity[:whole], lr, momentum, nesterov, weight_decay)
    return whole


def _momentum(
    weights: Tensor, gradient: Tensor, velocity: Tensor, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> None:
    torch._fused_sgd_(
        [weights],
        [gradient],
        [velocity],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


@cache
def _rounds_as_the_readable_form() -> bool:
    """Where the kernel rounds depends on how torch was compiled: it is tried once, on numbers of which a fourth would show it."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        w, g, m = torch.randn(3, 16 * VECTOR, generator=generator, dtype=dtype)
        decayed = torch.add(g, w, alpha=0.3)
        moved = m.mul(0.9).add_(decayed)
        ahead = torch.add(decayed, moved, alpha=0.9)
        expected = torch.add(w, ahead, alpha=-0.7)
        _momentum(w, g, m, 0.7, 0.9, True, 0.3)
        if not (torch.equal(m, moved) and torch.equal(w, expected)):
            return False
    return True
