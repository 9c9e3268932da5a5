"""A replica in a process of its own: computing takes the time it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from atoll.core.errors import TrainingDiverged
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Weigh, Work
from atoll.engines.processes.round_record import ComputeRecord
from atoll.engines.wall_clock import WallClock
from atoll.replica.local_replica import ComputeResult, LocalReplica


class ProcessReplica:
    """This process's model. A protocols.Replica.

    Args:
        replica: computes.
        clock: of the run.
        note: takes a record of each stretch of computing.
        pause_s: so long it sleeps besides for each batch, to play a slower machine.
        where: names this island, the round and a step of a stretch, for errors.
        tolerant: a loss that is not finite ends nothing here: whoever is given the weights looks at them.
    """

    def __init__(
        self,
        replica: LocalReplica,
        *,
        clock: WallClock | None = None,
        note: Callable[[ComputeRecord], object] = lambda stretch: None,
        pause_s: float = 0.0,
        where: Callable[[int], str] = lambda step: f"this island, at step {step} of the round",
        tolerant: bool = False,
    ) -> None:
        self._replica, self._clock, self._note, self._pause_s = replica, clock or WallClock(), note, pause_s
        self._where, self._tolerant = where, tolerant

    def load(self, params: Tree) -> None:
        self._replica.load(params)

    def params(self) -> Tree:
        return self._replica.params()

    def lent(self) -> Tree:
        return self._replica.lent()

    async def train(self, steps: int, work: Work) -> None:
        self._computed(lambda: (None, self._replica.train(steps, work)), steps, float(steps))

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        def compute() -> tuple[Gradient, ComputeResult]:
            return self._replica.gradient(work, at=at, onto=onto, weigh=weigh, wide=wide)

        gradient: Gradient = self._computed(compute, 0, 1 / work.pieces)
        return gradient

    def _computed(self, compute: Callable[[], tuple[Any, ComputeResult]], steps: int, batches: float) -> Any:
        start_s = self._clock.now_s()
        result, trained = compute()
        if self._pause_s:
            time.sleep(self._pause_s * batches)
        loss = math.fsum(trained.losses) / len(trained.losses)
        if trained.moved and not math.isfinite(loss) and not self._tolerant:
            step, worst = next((step, one) for step, one in enumerate(trained.losses) if not math.isfinite(one))
            raise TrainingDiverged(
                f"the loss is {worst} on {self._where(step)}. The run stops; what was saved before this round stands. Lower the "
                f"learning rate, set train.clip_norm, or look at the data there."
            )
        self._note(ComputeRecord(start_s, self._clock.now_s(), steps, batches, trained.tokens, loss, trained.moved))
        return result
