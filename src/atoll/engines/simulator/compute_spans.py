"""Computing under the virtual clock: a stretch is begun at one moment, over at another, and then entered in the books."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from atoll.core.protocols import Sink
from atoll.engines.accounting import Books
from atoll.engines.simulator.compute_pool import Computing
from atoll.engines.simulator.virtual_clock import Task, Wait
from atoll.replica.local_replica import ComputeResult
from atoll.runs.cluster import Cluster

Function = Callable[[], tuple[Any, ComputeResult]]


class Stretches:
    """Has islands, or their devices, compute.

    Args:
        cluster: says how long it takes.
        seed: of what the cluster draws.
        computing: where it really happens.
        books: where it is entered.
        sink: takes what is reported of it.
    """

    def __init__(self, cluster: Cluster, seed: int, computing: Computing, books: Books, sink: Sink) -> None:
        self._cluster, self._seed = cluster, seed
        self._computing, self._books, self._sink = computing, books, sink
        self._begun: dict[tuple[int, int | None], Future[tuple[Any, ComputeResult]]] = {}
        """What each is computing."""

    def wait(
        self,
        island: int,
        function: Function,
        *,
        steps: int,
        batches: float,
        count: Callable[[int], None],
        device: int | None = None,
        draw: str | None = None,
    ) -> Wait:
        """A stretch of so many batches that begins when it is awaited; `count` is told its tokens at the end, and `draw` names what
        its length is drawn by, if not its own number."""
        return Wait(partial(self._start, island, device, function, steps, batches, count, draw))

    def _start(
        self,
        island: int,
        device: int | None,
        function: Function,
        steps: int,
        batches: float,
        count: Callable[[int], None],
        draw: str | None,
        task: Task,
    ) -> None:
        ledger = self._books.ledger(island, device)
        number = ledger.stretches if draw is None else f"batch {draw}"
        stretch = number if device is None else f"{number}.{device}"
        step_s = self._cluster.step_time(island, self._seed) * self._cluster.jitter(island, stretch, batches, self._seed)
        ledger.stretches += 1
        start_s, end_s = task.now_s, task.now_s + batches * step_s
        future = self._begun[island, device] = self._computing.begin(function)

        def finish() -> Any:
            result, trained = self._computing.result(future)
            del self._begun[island, device]
            self._sink.emit(self._books.computed(island, start_s, end_s, steps, batches, trained, device=device))
            count(trained.tokens)
            return result

        task.resume_at(end_s, finish)

    def see_through(self) -> None:
        """Wait for what was begun and what nobody will ask for: replicas are busy with it."""
        for future in self._begun.values():
            self._computing.result(future)
        self._begun.clear()
