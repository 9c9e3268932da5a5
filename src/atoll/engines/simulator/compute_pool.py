"""Computing in the simulator: real training, whose duration the virtual clock decides.

The engine submits a job at the virtual moment it begins, and asks for the result at the moment it ends. On a CPU a pool of threads
computes, so islands run in parallel, and the order in which real threads finish changes nothing. On one GPU jobs are queued until
the engine asks for one of them. By then all islands that begin at the same virtual moment have submitted theirs, and
`BatchedCompute` computes them together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from atoll.core.flat_tree import free_buffer_pool
from atoll.engines.accounting import ComputeSpan
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.virtual_clock import ClockTask
from atoll.replica.local_replica import ComputeJob, ComputeResult, LocalReplica, torch_threads
from atoll.runs.cluster import Cluster

T = TypeVar("T")
_PROGRESS_S = 1.0  # seconds between two progress reports during a wait
_SWITCH_S = 0.0002


class ComputePool:
    """The threads of one run, each with the torch threads of one island. `report_progress` is called about once a second while the
    engine waits. `batched` computes jobs of several islands at once on one device; without it each job is computed by itself."""

    def __init__(self, cluster: Cluster, report_progress: Callable[[], None], batched: BatchedCompute | None = None) -> None:
        self._threads = cluster.threads_per_island
        self._batched, self._report_progress = batched, report_progress
        self._queue: dict[Future[Any], ComputeJob] = {}
        self._computing: dict[Future[Any], None] = {}  # jobs under the virtual clock whose end has not been reached
        self._pool: ThreadPoolExecutor | None = None
        self._closing = False

    @contextmanager
    def open(self, replica: LocalReplica) -> Iterator[None]:
        """Accepts jobs of replicas like this one. The number of torch threads is fixed, because the last bits of sums depend on
        it."""
        workers, init = self._workers(replica), torch.set_num_threads
        pool = self._pool = ThreadPoolExecutor(workers, "island", initializer=init, initargs=(self._threads,))
        self._closing = False
        try:
            with torch_threads(self._threads), _short_switch_interval():
                try:
                    yield
                finally:
                    self._closing = True  # before the pool waits for its threads
                    _shut_down(pool)
        finally:
            self._pool = None
            self._queue.clear()
            self._computing.clear()
            if self._batched is not None:
                self._batched.close()
            free_buffer_pool()

    def closing(self) -> bool:
        """Whether the engine no longer needs results. Replicas check it before each step, so that the end of a run, or an
        interrupt, does not wait for the end of a round."""
        return self._closing

    def _workers(self, replica: LocalReplica) -> int:
        # Torch's generators are global: two islands at a time would draw from each other's. One GPU computes for all islands.
        if replica.traits.draws_randomness or replica.device != "cpu":
            return 1
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

    def compute(self, job: ComputeJob, task: ClockTask, seconds: float, account: Callable[[ComputeSpan], object]) -> None:
        """Starts a job that takes so much virtual time. Then `account` gets the compute span, and the task its result."""
        start_s, end_s = task.now_s, task.now_s + seconds
        future: Future[tuple[Any, ComputeResult]] = self.submit(job)
        self._computing[future] = None

        def finish() -> Any:
            result, computed = self.result(future)
            del self._computing[future]
            account(ComputeSpan(start_s, end_s, job.steps, job.batches, *computed))
            return result

        task.resume_at(end_s, finish)

    def drain(self) -> None:
        """Waits for the jobs of an aborted round: their replicas are busy until then."""
        for future in self._computing:
            self.result(future)
        self._computing.clear()

    def run(self, function: Callable[[], T]) -> T:
        """Runs the function on the pool if it is open, else here. It is never parallel to jobs that draw random numbers."""
        return function() if self._pool is None else self.result(self.submit(function))

    def result(self, future: Future[T]) -> T:
        if future in self._queue:
            assert self._pool is not None
            assert self._batched is not None
            queue, self._queue = self._queue, {}
            answers = self._wait_for(self._pool.submit(self._batched, list(queue.values())))
            self._batched.report()
            for queued, answer in zip(queue, answers, strict=True):
                queued.set_result(answer)
        return self._wait_for(future)

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


def _shut_down(pool: ThreadPoolExecutor) -> None:
    """Cancels jobs that have not begun: after the run, or after an error, their results are not needed."""
    while True:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
            return
        except KeyboardInterrupt:
            continue  # threads end with their present step; a process that exits before them would abort
