"""Update rules as values: `init(params)` gives a state, and a pure `update(params, gradient, state)` the next weights and state.

The same rules serve inside an island (on gradients) and between islands (on deltas). They are bit-equal to the plain form of
`torch.optim`, and run on a whole Tree, a chunk of it or a shard.

>>> import torch
>>> from atoll.core.flat_tree import Tree
>>> weights, gradient = Tree.of({"w": torch.ones(2)}), Tree.of({"w": torch.full((2,), 0.25)})
>>> rule = Nesterov(lr=0.7, momentum=0.9)
>>> weights, state = rule.update(weights, gradient, rule.init(weights))
>>> weights["w"], state.velocity["w"], state.step
(tensor([0.6675, 0.6675]), tensor([0.2500, 0.2500]), 1)
"""

from atoll.optim.adam import Adam, AdamState, AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import WSD, Constant, Cosine, Schedule, at
from atoll.optim.sgd import SGD, Momentum, MomentumState, Nesterov, SGDState
from atoll.optim.staleness import DelayCompensation, Polynomial

__all__ = [
    "SGD",
    "WSD",
    "Adam",
    "AdamState",
    "AdamW",
    "Buffered",
    "Constant",
    "Cosine",
    "DelayCompensation",
    "DelayedNesterov",
    "Momentum",
    "MomentumState",
    "Nesterov",
    "Polynomial",
    "SGDState",
    "Schedule",
    "at",
]
