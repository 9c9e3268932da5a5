"""Update rules as values: `init(params)` gives a state, and a pure `update(params, gradient, state)` the next weights and state.

The same rules serve inside an island (on gradients) and between islands (on deltas). They are bit-equal to the plain form of
`torch.optim`, and run on a whole Tree, a chunk of it or a shard.
"""
