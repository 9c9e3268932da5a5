"""What an outer step costs, in copies of the model's weights.

A copy of the weights into a buffer that is there is what memory can do; the outer step is delta, mean and Nesterov's update, by the
very operations that a round of DiLoCo makes.
"""

from __future__ import annotations

import torch

from atoll.core.flat_tree import Tree
from atoll.core.pytree import recycle
from atoll.engines.simulator.collectives import weighted_mean
from atoll.models.gpt import GPT
from atoll.optim.sgd import Nesterov
from atoll.replica.local_replica import torch_threads
from timing import timed

COPY, DELTA, MEAN, UPDATE = "copy", "delta", "mean", "update"


class OuterStep:
    """The weights of some islands, and an outer rule over them.

    Args:
        model: whose weights.
        vocab_size: of the model.
        islands: how many.
    """

    def __init__(self, model: GPT, vocab_size: int, islands: int) -> None:
        self.params = Tree.of(model.build(vocab_size, seq_len=8, seed=0))
        self.islands = islands
        self._rule = Nesterov(lr=0.7, momentum=0.9)
        self._state = self._rule.init(self.params)
        self._weights = [self.params * (1 + 1e-3 * (island + 1)) for island in range(islands)]
        self._buffer = torch.empty_like(self.params.flat)

    def seconds(self) -> dict[str, float]:
        """One measurement of each part, on one thread: the deltas of all islands, their mean, one update."""
        with torch_threads(1):
            taken, _ = timed(lambda: self._buffer.copy_(self.params.flat))
            times = {COPY: taken}
            times[DELTA], deltas = timed(lambda: [self.params - weights for weights in self._weights])
            times[MEAN], mean = timed(lambda: weighted_mean(deltas, [1.0] * self.islands))
            times[UPDATE], after = timed(lambda: self._rule.update(self.params, mean, self._state))
        # As an engine does between two rounds: what nobody holds any more is used again.
        recycle([deltas, mean, self.params, self._state], [after])
        self.params, self._state = after
        return times
