"""Update rules as values: `init(params)` gives a state, and a pure `update(params, gradient, state)` the next weights and state.

The same rules serve inside an island (on gradients) and between islands (on deltas). They are bit-equal to the plain form of
`torch.optim`, and run on a whole Tree, a chunk of it or a shard.

>>> import torch
>>> from atoll.core.flat_tree import Tree
>>> from atoll.optim.sgd import Nesterov
>>> weights, gradient = Tree.of({"w": torch.ones(2)}), Tree.of({"w": torch.full((2,), 0.25)})
>>> rule = Nesterov(lr=0.7, momentum=0.9)
>>> weights, state = rule.update(weights, gradient, rule.init(weights))
>>> weights["w"], state.velocity["w"], state.step
(tensor([0.6675, 0.6675]), tensor([0.2500, 0.2500]), 1)
"""
