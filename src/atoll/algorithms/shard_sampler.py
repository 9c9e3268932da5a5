"""Which shard a worker is given next, and where in it: eqs. (2) and (3) of asynchronous Local-SGD (arXiv 2401.09135).

Workers move between shards, so what belongs to the data is kept here: how many steps each shard has had, which is also its position
on the learning-rate schedule, and up to where its batches were assigned. A round is counted when it is assigned, and put back
if nothing comes of it.

    paper   D_i        n_i            t in eq. (3)
    here    examples   steps          steps

Eq. (2) gives shard i the chance max(|D_i| / sum |D| - n_i / sum n, 0). The paper leaves open what to do before the first round and
when every shard has exactly its share: then the chances are the sizes. Where all that may be drawn lag alike, to within a step, a
worker keeps the shard it has: shards of 7,686 and 7,685 examples are alike, and equal workers stay on their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.core.protocols import Work

Policy = Literal["deficit", "visits"]
Ties = Literal["last", "chance"]
_MOST = 2**62
"""Products up to here fit into 64 bits; beyond it, Python's own numbers are used."""
_ALIKE = 0.01
"""Shards whose sizes differ by less than this share are of one size to a worker that has to choose for the first time."""


class Shards:
    """The account of all shards.

    Args:
        examples: of each shard.
        policy: the next shard is drawn by deficit (eq. 2), or among those with the fewest visits (the authors' notebook).
        ties: where all that may be drawn lag alike, the worker keeps its last shard if that is one of them, or chance decides.
    """

    def __init__(self, examples: Sequence[int], policy: Policy, ties: Ties) -> None:
        if not examples or min(examples) < 0 or sum(examples) < 1:
            raise ConfigError(f"shards of {list(examples)} examples: there must be at least one shard, and something in it.")
        self.examples = list(examples)
        self.steps: NDArray[np.int64] = np.zeros(len(examples), np.int64)
        """Assigned and not put back."""
        self.visits: NDArray[np.int64] = np.zeros(len(examples), np.int64)
        """Rounds, likewise."""
        self._policy = policy
        self._ties = ties
        common = math.gcd(*examples)
        self._sizes = np.array([count // common for count in examples], np.int64)
        self._size = sum(examples) // common
        self._total_steps = 0
        self._positions = [0] * len(examples)
        self._returned: list[list[tuple[int, int]]] = [[] for _ in examples]
        """Stretches before the position, as (start, steps), which came back untrained."""

    def __len__(self) -> int:
        return len(self.examples)

    def choose(self, last: int, draw: Callable[[], float]) -> int:
        """A worker's next shard, if it worked on shard `last`. `draw` gives a number in [0, 1) where chance decides."""
        behind, alike = self._behind() if self._policy == "deficit" else (self._least_visited(), 1)
        chances = np.maximum(behind, 0)
        greatest = chances.max()
        if self._ties == "last" and greatest - behind[last] < alike and greatest - chances[chances > 0].min() < alike:
            return last
        sums = np.cumsum(chances)
        drawn = int(np.searchsorted(sums, draw() * float(sums[-1]), side="right"))
        return min(drawn, int(np.flatnonzero(chances)[-1]))  # rounding may take a draw to the very end

    def _behind(self) -> tuple[NDArray[Any], float]:
        """How far each shard lags behind its share, which is its chance if it does, and below what difference two lag alike.

        Eq. (2) times both of its sums: whole numbers, in which a step is as much as all examples.
        """
        fits = self._size * self._total_steps < _MOST
        sizes, steps = (self._sizes, self.steps) if fits else (self._sizes.astype(object), self.steps.astype(object))
        behind = sizes * self._total_steps - steps * self._size
        if (behind > 0).any():
            return behind, self._size
        return self._sizes, _ALIKE * int(self._sizes.max())

    def _least_visited(self) -> NDArray[np.int64]:
        something = self._sizes > 0
        least: NDArray[np.bool_] = (self.visits == self.visits[something].min()) & something
        return least.astype(np.int64)

    def hand_out(self, shard: int, steps: int) -> Work:
        """The next `steps` batches of a shard: a range that was put back, if one is long enough, else what follows."""
        work = Work(shard=shard, start=self._start(shard, steps), schedule=int(self.steps[shard]), examples=self.examples[shard])
        self._count(shard, steps, 1)
        return work

    def put_back(self, work: Work, steps: int) -> None:
        """Nothing came of these."""
        self._count(work.shard, -steps, -1)
        returned = self._returned[work.shard]
        returned.append((work.start, steps))
        while (last := next((r for r in returned if r[0] + r[1] == self._positions[work.shard]), None)) is not None:
            returned.remove(last)
            self._positions[work.shard] = last[0]

    def _start(self, shard: int, steps: int) -> int:
        returned = self._returned[shard]
        for i, (start, length) in enumerate(returned):
            if steps <= length:
                returned[i : i + 1] = [(start + steps, length - steps)] if steps < length else []
                return start
        self._positions[shard] += steps
        return self._positions[shard] - steps

    def _count(self, shard: int, steps: int, visits: int) -> None:
        self.steps[shard] += steps
        self.visits[shard] += visits
        self._total_steps += steps

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {
            "steps": self.steps.tolist(),
            "visits": self.visits.tolist(),
            "positions": list(self._positions),
            "returned": [[list(stretch) for stretch in returned] for returned in self._returned],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.steps, self.visits = np.array(parts["steps"], np.int64), np.array(parts["visits"], np.int64)
        self._total_steps = sum(parts["steps"])
        self._positions = list(parts["positions"])
        self._returned = [[(start, length) for start, length in returned] for returned in parts["returned"]]
