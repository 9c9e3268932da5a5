"""Samples the shard of a worker's next round, and the position in it: eqs. (2) and (3) of asynchronous Local-SGD.

Workers move between shards (arXiv 2401.09135), so the sampler keeps what belongs to the data: the steps of each shard, which are
also its position on the learning-rate schedule, and the position up to which its batches are assigned. The sampler counts a round
when it assigns it, and takes the count back if the round ends without an update.

    paper   D_i        n_i            t in eq. (3)
    here    examples   steps          steps

Eq. (2) gives shard i the chance max(|D_i| / sum |D| - n_i / sum n, 0). The paper leaves open what to do before the first round and
when every shard has exactly its share: then the chances are the sizes, and sizes within 1 % of each other count as equal. Where all
shards that can be drawn lag exactly equally, a worker keeps its shard, if it is one of them: equal workers stay on equal shards.
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
_MOST = 2**62  # products up to here fit into 64 bits; beyond it, Python's own integers are used
_SIZE_TOLERANCE = 0.01  # shards whose sizes differ by less than this share count as equal in a worker's first choice


class ShardSampler:
    """What was assigned of each shard.

    Args:
        examples: of each shard.
        policy: the next shard is drawn by deficit (eq. 2), or among those with the fewest visits (the authors' notebook).
        ties: where all shards that can be drawn lag equally, a worker keeps its last shard if it is among them, or chance decides.
    """

    def __init__(self, examples: Sequence[int], policy: Policy, ties: Ties) -> None:
        if not examples or min(examples) < 0 or sum(examples) < 1:
            raise ConfigError(
                f"shards of {list(examples)} examples: at least one shard with at least one example is needed. Add data."
            )
        self.examples = list(examples)
        self.steps: NDArray[np.int64] = np.zeros(len(examples), np.int64)  # assigned, without those of abandoned rounds
        self.visits: NDArray[np.int64] = np.zeros(len(examples), np.int64)  # rounds, likewise
        self._policy = policy
        self._ties = ties
        common = math.gcd(*examples)
        self._sizes = np.array([count // common for count in examples], np.int64)
        self._size = sum(examples) // common
        self._total_steps = 0
        self._positions = [0] * len(examples)
        # Ranges before the position, as (start, steps), whose rounds were abandoned.
        self._free: list[list[tuple[int, int]]] = [[] for _ in examples]

    def __len__(self) -> int:
        return len(self.examples)

    def choose(self, last: int, draw: Callable[[], float]) -> int:
        """The next shard of a worker whose last was `last`. `draw` gives a number in [0, 1) where chance decides."""
        behind, tolerance = self._behind() if self._policy == "deficit" else (self._least_visited(), 1)
        chances = np.maximum(behind, 0)
        greatest = chances.max()
        if self._ties == "last" and greatest - behind[last] < tolerance and greatest - chances[chances > 0].min() < tolerance:
            return last
        sums = np.cumsum(chances)
        drawn = int(np.searchsorted(sums, draw() * float(sums[-1]), side="right"))
        return min(drawn, int(np.flatnonzero(chances)[-1]))  # rounding may take a draw to the very end

    def _behind(self) -> tuple[NDArray[Any], float]:
        """How far each shard lags behind its share, and the difference below which two lag equally.

        Eq. (2) times both of its sums: whole numbers, so equal means exactly equal.
        """
        fits = self._size * self._total_steps < _MOST
        sizes, steps = (self._sizes, self.steps) if fits else (self._sizes.astype(object), self.steps.astype(object))
        behind = sizes * self._total_steps - steps * self._size
        if (behind > 0).any():
            return behind, 1
        return self._sizes, _SIZE_TOLERANCE * int(self._sizes.max())

    def _least_visited(self) -> NDArray[np.int64]:
        something = self._sizes > 0
        least: NDArray[np.bool_] = (self.visits == self.visits[something].min()) & something
        return least.astype(np.int64)

    def assign(self, shard: int, steps: int) -> Work:
        """The next `steps` batches of a shard: those of an abandoned round if it was long enough, else new ones."""
        work = Work(shard=shard, start=self._start(shard, steps), schedule=int(self.steps[shard]), examples=self.examples[shard])
        self._count(shard, steps, 1)
        return work

    def unassign(self, work: Work, steps: int) -> None:
        """The round of this work was abandoned: its batches are assigned again later."""
        self._count(work.shard, -steps, -1)
        free = self._free[work.shard]
        free.append((work.start, steps))
        while (last := next((r for r in free if r[0] + r[1] == self._positions[work.shard]), None)) is not None:
            free.remove(last)
            self._positions[work.shard] = last[0]

    def _start(self, shard: int, steps: int) -> int:
        free = self._free[shard]
        for i, (start, length) in enumerate(free):
            if steps <= length:
                free[i : i + 1] = [(start + steps, length - steps)] if steps < length else []
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
            "free": [[list(span) for span in spans] for spans in self._free],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.steps, self.visits = np.array(parts["steps"], np.int64), np.array(parts["visits"], np.int64)
        self._total_steps = sum(parts["steps"])
        self._positions = list(parts["positions"])
        self._free = [[(start, length) for start, length in spans] for spans in parts["free"]]
