"""Computing in the simulator: real training, whose duration the virtual clock decides.

The engine submits a job at the virtual moment it begins, and asks for the result at the moment it ends. On a CPU a pool of threads
computes, so islands run in parallel, and the order in which real threads finish changes nothing. On one GPU jobs are queued until
the engine asks for one of them, and then computed as a batch by `BatchedCompute`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from atoll.core.flat_tree import free_buffer_pool
from atoll.core.protocols import Sink
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.peers import Compute
from atoll.engines.simulator.virtual_clock import ClockTask, Wait
from atoll.replica.local_replica import ComputeJob, LocalReplica, torch_threads
from atoll.runs.cluster import Cluster

T = TypeVar("T")
_PROGRESS_S = 1.0
"""Seconds between two progress reports during a wait."""
_SWITCH_S = 0.0002


class ComputePool:
    """The threads of one run, each with the torch threads of one island.

    Args:
        report_progress: called about once a second while the engine waits.
        batched: computes jobs of several islands at once on one device; None computes each by itself.
    """

    def __init__(self, cluster: Cluster, report_progress: Callable[[], None], batched: BatchedCompute | None = None) -> None:
        self._threads = cluster.threads_per_island
        self._batched, self._report_progress = batched, report_progress
        self._queue: dict[Future[Any], ComputeJob] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._closing = False

    @contextmanager
    def open(self, replica: LocalReplica) -> Iterator[None]:
        """Accepts jobs of replicas like this one. The number of torch threads is fixed, because the last bits of sums depend on
        it."""
        self._closing = False
        try:
            pool = _Pool(self._workers(replica), self._threads)
            with torch_threads(self._threads), _short_switch_interval(), pool as self._pool:
                try:
                    yield
                finally:
                    self._closing = True  # before the pool waits for its threads
        finally:
            self._pool = None
            self._queue.clear()
            if self._batched is not None:
                self._batched.close()
            free_buffer_pool()

    def closing(self) -> bool:
        """Whether the engine no longer needs results. Replicas check it before each step, so that the end of a run, or an
        interrupt, does not wait for the end of a round."""
        return self._closing

    def _workers(self, replica: LocalReplica) -> int:
        if replica.draws_randomness:
            return 1  # torch's generators are global: two islands at a time would draw from each other's
        if replica.device != "cpu":
            return 1  # one device computes for all islands
        return max(1, (os.cpu_count() or 1) // self._threads)

    def to_part(self) -> dict[str, Any] | None:
        """How islands share the device, for a checkpoint."""
        return self._batched.to_part() if self._batched is not None else None

    def from_part(self, part: dict[str, Any] | None) -> None:
        if self._batched is not None and part is not None:
            self._batched.from_part(part)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Starts computing, or queues a job for `BatchedCompute`."""
        assert self._pool is not None, "open() comes first"
        if self._batched is None or not isinstance(function, ComputeJob):
            return self._pool.submit(function)
        future: Future[Any] = Future()
        self._queue[future] = function
        return future

    def run(self, function: Callable[[], T]) -> T:
        """Runs the function on the pool if it is open, else here. It is never parallel to jobs that draw random numbers."""
        return function() if self._pool is None else self.result(self.submit(function))

    def result(self, future: Future[T]) -> T:
        if future in self._queue:
            self._compute_queue()
        return self._wait_for(future)

    def _compute_queue(self) -> None:
        assert self._pool is not None
        assert self._batched is not None
        queue, self._queue = self._queue, {}
        answers = self._wait_for(self._pool.submit(self._batched, list(queue.values())))
        self._batched.report()
        for future, answer in zip(queue, answers, strict=True):
            future.set_result(answer)

    def _wait_for(self, future: Future[T]) -> T:
        while not wait([future], timeout=_PROGRESS_S).done:
            self._report_progress()
        return future.result()


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """The loop of the virtual clock is pure Python. With Python's default of 5 ms, each operation of a computing thread would wait
    that long for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Pool(ThreadPoolExecutor):
    """Cancels jobs that have not begun when it closes: after the run, or after an error, their results are not needed."""

    def __init__(self, workers: int, torch_threads: int) -> None:
        super().__init__(workers, "island", initializer=torch.set_num_threads, initargs=(torch_threads,))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        while True:
            try:
                self.shutdown(wait=True, cancel_futures=True)
                return
            except KeyboardInterrupt:
                continue  # threads end with their present step; a process that exits before them would abort


class TimedCompute:
    """Computes for islands, or their devices, under the virtual clock, and accounts each compute span."""

    def __init__(self, cluster: Cluster, seed: int, pool: ComputePool, accounting: RunAccounting, sink: Sink) -> None:
        self._cluster, self._seed = cluster, seed
        self._pool, self._accounting, self._sink = pool, accounting, sink
        self._running: dict[tuple[int, int | None], Future[Any]] = {}

    def wait(
        self,
        island: int,
        function: Compute,
        *,
        steps: int,
        batches: float,
        count_tokens: Callable[[int], None],
        device: int | None = None,
        draw: str | None = None,
    ) -> Wait:
        """A compute span that begins when it is awaited. At its end `count_tokens` gets its tokens. `draw` names the random draw of
        its duration, if it is not its own number."""

        def start(task: ClockTask) -> None:
            ledger = self._accounting.ledger(island, device)
            number = ledger.spans if draw is None else f"batch {draw}"
            span = number if device is None else f"{number}.{device}"
            step_s = self._cluster.step_time(island, self._seed) * self._cluster.jitter(island, span, batches, self._seed)
            ledger.spans += 1
            start_s, end_s = task.now_s, task.now_s + batches * step_s
            future = self._running[island, device] = self._pool.submit(function)

            def finish() -> Any:
                result, computed = self._pool.result(future)
                del self._running[island, device]
                event = self._accounting.computed(island, ComputeSpan(start_s, end_s, steps, batches, *computed), device=device)
                self._sink.emit(event)
                count_tokens(computed.tokens)
                return result

            task.resume_at(end_s, finish)

        return Wait(start)

    def drain(self) -> None:
        """Waits for spans that the aborted round has begun: their replicas are busy until then."""
        for future in self._running.values():
            self._pool.result(future)
        self._running.clear()
