"""Pruning and merging of deltas after TIES (Yadav et al., arXiv 2306.01708): trim, elect signs, merge disjointly.

DiLoCo prunes each island's delta "per neuron", based on signs, before averaging (its Table 6), and leaves the details to TIES.
Here a neuron is a row of a matrix, or the whole of a vector. Its prevailing sign is the one with the greater total magnitude.
Values of the other sign go first, the smallest first, then the smallest of the prevailing sign, until the asked fraction is gone.

A disjoint merge is another mean of deltas. Each weight's sign is elected: it is the sign of the deltas' sum, so that of the greater
total magnitude. The merged value is the mean over those islands only whose delta has that sign.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout


def prune(delta: Tree, fraction: float, by: Literal["sign", "magnitude"] = "sign") -> Tree:
    """The delta, which is donated, with `fraction` of every neuron's values set to zero (rounded down); itself at 0."""
    if fraction == 0:
        return delta
    assert all(piece.whole for piece in delta.layout.pieces), "a neuron must lie whole on this device to be pruned"
    flat = delta.flat
    out = empty(flat.numel(), flat.dtype, flat.device).copy_(flat)
    for view in _rows(delta.layout, out):
        gone = int(view.shape[1] * fraction)
        if gone:
            view.scatter_(1, _least_worth_first(view, by)[:, :gone], 0.0)
    delta.release()
    return Tree(delta.layout, out)


def agreeing(delta: Tree, elected: Tree) -> tuple[Tree, Tree]:
    """The values of a delta that have the elected sign, with zeros elsewhere, and a Tree that is 1 where they have it.

    >>> mine, votes = agreeing(Tree.of({"w": torch.tensor([3.0, -2.0, 0.0])}), Tree.of({"w": torch.tensor([1.0, 1.0, 1.0])}))
    >>> mine["w"], votes["w"]
    (tensor([3., 0., 0.]), tensor([1., 0., 0.]))
    """
    agrees = (delta.flat * elected.flat > 0).to(delta.flat.dtype)
    return Tree(delta.layout, torch.where(agrees > 0, delta.flat, 0.0)), Tree(delta.layout, agrees)


def disjoint_mean(values: Tree, votes: Tree) -> Tree:
    """The mean over the islands that agree, from the means of `agreeing`'s two Trees over all islands; 0 where no island does."""
    return Tree(values.layout, torch.where(votes.flat > 0, values.flat / votes.flat, 0.0))


def _rows(layout: Layout, flat: Tensor) -> list[Tensor]:
    """Every tensor as a matrix of neurons, sharing memory with the buffer."""
    views = layout.views(flat).values()
    return [view.view(view.shape[0], -1) if view.dim() > 1 else view.view(1, -1) for view in views if view.numel()]


def _least_worth_first(rows: Tensor, by: Literal["sign", "magnitude"]) -> Tensor:
    """For each row the order in which its values go."""
    order = rows.abs().argsort(dim=1, stable=True)
    if by == "magnitude":
        return order
    prevailing = torch.where(rows.sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
    agrees = rows * prevailing > 0  # zeros do not: they go first and cost nothing
    # A stable sort by sign keeps the order by magnitude within each sign.
    return order.gather(1, agrees.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
