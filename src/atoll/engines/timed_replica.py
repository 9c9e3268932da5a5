"""The replica of a process: it computes in real time, and records each span of computing. A worker of a hub runs its round with
it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Gradient, Replica, Task, Weigh, Work
from atoll.engines.accounting import ComputeSpan, diverged_loss
from atoll.engines.round_record import WallClock
from atoll.engines.training_setup import ReplicaAccess
from atoll.replica.local_replica import ComputeResult

T = TypeVar("T")


class ProcessReplica(ReplicaAccess):
    """This process's model. A protocols.Replica.

    Args:
        pause_s: it sleeps this long for each batch, to emulate a slower machine.
        where: names the island, the round and a step of the span, for errors.
        allow_nonfinite: a loss that is not finite is no error here: the receiver of the weights checks them.
    """

    def __init__(
        self,
        replica: Any,  # a LocalReplica; a device that FSDP2 trains uses `compute` alone
        *,
        clock: WallClock | None = None,
        on_computed: Callable[[ComputeSpan], object] = lambda span: None,
        pause_s: float = 0.0,
        where: Callable[[int], str] = lambda step: f"this island, at step {step} of the round",
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(replica)
        self._clock, self._on_computed, self._pause_s = clock or WallClock(), on_computed, pause_s
        self._where, self._allow_nonfinite = where, allow_nonfinite

    async def train(self, steps: int, work: Work) -> int:
        def compute() -> tuple[int, ComputeResult]:
            result = self._replica.train(steps, work)
            return result.tokens, result

        return self.compute(compute, steps, float(steps))

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        compute = partial(self._replica.gradient, work, at=at, onto=onto, weigh=weigh, wide=wide)
        return self.compute(compute, 0, 1 / work.pieces)

    def compute(self, compute: Callable[[], tuple[T, ComputeResult]], steps: int, batches: float) -> T:
        """Computes and records a span of so many steps and batches. Raises TrainingDiverged if a loss is not finite."""
        start_s = self._clock.now_s()
        value, result = compute()
        if self._pause_s:
            time.sleep(self._pause_s * batches)
        worst = next(((step, loss) for step, loss in enumerate(result.losses) if not math.isfinite(loss)), None)
        if worst is not None and result.moved and not self._allow_nonfinite:
            raise diverged_loss(worst[1], self._where(worst[0]))
        loss = worst[1] if worst else math.fsum(result.losses) / len(result.losses)  # fsum refuses inf beside -inf
        self._on_computed(ComputeSpan(start_s, self._clock.now_s(), steps, batches, [loss], result.tokens, result.moved))
        return value


class _RoundHub:
    """The hub, seen from one worker in one round. A protocols.Hub."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.delta: Tree | None = None

    async def pull(self) -> Task:
        return self._task

    async def push(self, delta: Tree) -> None:
        self.delta = delta.donate()


def run_worker_round(algorithm: AsyncAlgorithm[Any], replica: Replica, task: Task) -> Tree:
    """Runs one round and returns the update that it pushes. Raises ConfigError if it awaits anything else, or pushes nothing."""
    hub = _RoundHub(task)
    coroutine = algorithm.round(replica, hub)
    name = f"{type(algorithm).__name__}.round"
    try:
        coroutine.send(None)
    except StopIteration:
        if hub.delta is None:
            raise ConfigError(
                f"{name} ended without a push, so the hub would wait for it for ever. Let it end with `await hub.push(...)`."
            ) from None
        return hub.delta
    coroutine.close()
    raise ConfigError(f"{name} awaits something that is neither its replica's nor its hub's. Await these alone.")
