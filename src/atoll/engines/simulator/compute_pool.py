"""Computing in the simulator: real training, whose length the virtual clock decides.

Work is handed in at the virtual moment it begins and asked for at the moment it ends. On a CPU a pool of threads takes it: islands
compute side by side, and the order in which real threads finish changes nothing. On one GPU it lies until somebody asks for some of
it, and is then computed together, see `together`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from atoll.core.flat_tree import forget_spare_buffers
from atoll.core.protocols import Sink
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.replica.local_replica import ComputeJob, ComputeResult, LocalReplica, torch_threads
from atoll.runs.cluster import Cluster

T = TypeVar("T")
_SIGN_OF_LIFE_S = 1.0  # between two reports while something computes
_TURN_S = 0.0002


class ComputePool:
    """The pool of one run.

    Args:
        cluster: says with how many torch threads an island computes.
        sign_of_life: called about once a second while something is waited for.
        together: computes what several islands have to do, if they have one device; none has each compute by itself.
    """

    def __init__(self, cluster: Cluster, sign_of_life: Callable[[], None], together: BatchedCompute | None = None) -> None:
        self._threads = cluster.threads_per_island
        self.together = together
        self._filed: dict[Future[Any], ComputeJob] = {}
        self._sign_of_life = sign_of_life
        self._pool: ThreadPoolExecutor | None = None
        self._closing = False

    @contextmanager
    def open(self, replica: LocalReplica) -> Iterator[None]:
        """While this is open, work can be handed in. `replica` is one of those that will compute; all are of one kind.

        One CPU thread setting holds throughout: reductions depend on it in the last bits.
        """
        self._closing = False
        try:
            pool = _Pool(self._workers(replica), self._threads)
            with torch_threads(self._threads), _frequent_turns(), pool as self._pool:
                try:
                    yield
                finally:
                    self._closing = True  # before the pool waits for its threads
        finally:
            self._pool = None
            self._filed.clear()
            if self.together is not None:
                self.together.close()
            forget_spare_buffers()

    def closing(self) -> bool:
        """Whether nobody will ask for what is being computed. Replicas look at it between two steps: a run that is over, or was
        interrupted, does not wait for the end of a round."""
        return self._closing

    def _workers(self, replica: LocalReplica) -> int:
        if replica.draws_randomness:
            return 1  # torch's generators are the process's: two islands at a time would draw from each other's
        if replica.device != "cpu":
            return 1  # one device computes for all: threads would only get into each other's way
        return max(1, (os.cpu_count() or 1) // self._threads)

    def to_part(self) -> dict[str, Any] | None:
        """How islands share their device, as far as that is settled: for a checkpoint."""
        return self.together.to_part() if self.together is not None else None

    def from_part(self, part: dict[str, Any] | None) -> None:
        if self.together is not None and part is not None:
            self.together.from_part(part)

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Start computing, or file it."""
        assert self._pool is not None, "open() comes first"
        if self.together is None or not isinstance(function, ComputeJob):
            return self._pool.submit(function)
        future: Future[Any] = Future()
        self._filed[future] = function
        return future

    def aside(self, function: Callable[[], T]) -> T:
        """Do something now that must not happen beside work that draws random numbers."""
        return function() if self._pool is None else self.result(self.begin(function))

    def result(self, future: Future[T]) -> T:
        """Wait for what was begun."""
        if future in self._filed:
            self._compute_what_was_filed()
        return self._waited_for(future)

    def _compute_what_was_filed(self) -> None:
        assert self._pool is not None
        assert self.together is not None
        filed, self._filed = self._filed, {}
        answers = self._waited_for(self._pool.submit(self.together, list(filed.values())))
        self.together.report()
        for future, answer in zip(filed, answers, strict=True):
            future.set_result(answer)

    def _waited_for(self, future: Future[T]) -> T:
        while not wait([future], timeout=_SIGN_OF_LIFE_S).done:
            self._sign_of_life()
        return future.result()


@contextmanager
def _frequent_turns() -> Iterator[None]:
    """While islands compute on threads, Python lets them take turns more often than every 5 ms. The loop of the virtual clock is
    all Python, and each operation of a thread that computes would wait for it so long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Pool(ThreadPoolExecutor):
    """Threads to compute on, each with its own number of torch threads. What has not begun when it closes is of no use: a run that
    is over leaves rounds behind which nobody waits for, and so does an error."""

    def __init__(self, workers: int, torch_threads: int) -> None:
        super().__init__(workers, "island", initializer=torch.set_num_threads, initargs=(torch_threads,))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        while True:
            try:
                self.shutdown(wait=True, cancel_futures=True)
                return
            except KeyboardInterrupt:
                continue  # a process that ends beside threads that compute is aborted; they end with the step they are in


Function = Callable[[], tuple[Any, ComputeResult]]


class TimedCompute:
    """Has islands, or their devices, compute.

    Args:
        cluster: says how long it takes.
        seed: of what the cluster draws.
        computing: where it really happens.
        accounting: where it is entered.
        sink: takes what is reported of it.
    """

    def __init__(self, cluster: Cluster, seed: int, computing: ComputePool, accounting: RunAccounting, sink: Sink) -> None:
        self._cluster, self._seed = cluster, seed
        self._computing, self._accounting, self._sink = computing, accounting, sink
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
        task: ClockTask,
    ) -> None:
        ledger = self._accounting.ledger(island, device)
        number = ledger.spans if draw is None else f"batch {draw}"
        stretch = number if device is None else f"{number}.{device}"
        step_s = self._cluster.step_time(island, self._seed) * self._cluster.jitter(island, stretch, batches, self._seed)
        ledger.spans += 1
        start_s, end_s = task.now_s, task.now_s + batches * step_s
        future = self._begun[island, device] = self._computing.begin(function)

        def finish() -> Any:
            result, trained = self._computing.result(future)
            del self._begun[island, device]
            self._sink.emit(self._accounting.computed(island, ComputeSpan(start_s, end_s, steps, batches, trained), device=device))
            count(trained.tokens)
            return result

        task.resume_at(end_s, finish)

    def see_through(self) -> None:
        """Wait for what was begun and what nobody will ask for: replicas are busy with it."""
        for future in self._begun.values():
            self._computing.result(future)
        self._begun.clear()
