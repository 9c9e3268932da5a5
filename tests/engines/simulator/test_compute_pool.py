"""Computing on a pool: results on request, errors that propagate, and settings that are restored."""

import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from atoll.core.protocols import Work
from atoll.engines.simulator.compute_pool import ComputePool
from atoll.optim.sgd import SGD
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression


def computing(threads=1):
    return ComputePool(Cluster(threads_per_island=threads), report_progress=lambda: None)


def replica(dropout=0.0):
    return LocalReplica(Regression(hidden=3, dropout=dropout), optimizer=SGD(lr=0.1))


def test_results_can_be_asked_for_in_any_order():
    pool = computing()
    with pool.open(replica()):
        futures = [pool.submit(lambda number=number: number * number) for number in range(20)]
        assert [pool.result(future) for future in reversed(futures)] == [number * number for number in reversed(range(20))]


def test_an_error_in_a_job_is_raised_by_result():
    pool = computing()
    with pool.open(replica()):
        future = pool.submit(lambda: 1 / 0)
        assert pool.result(pool.submit(lambda: "others go on")) == "others go on"
        with pytest.raises(ZeroDivisionError):
            pool.result(future)


def test_jobs_are_refused_before_open_and_after_close():
    pool = computing()
    with pool.open(replica()):
        pass
    with pytest.raises(AssertionError, match="comes first"):
        pool.submit(lambda: None)


def test_run_works_with_and_without_an_open_pool():
    pool = computing()
    here = threading.current_thread()
    assert pool.run(threading.current_thread) is here
    with pool.open(replica()):
        assert pool.run(threading.current_thread) is not here


def test_jobs_that_draw_random_numbers_run_one_at_a_time():
    """Torch's generators are the process's. Two jobs that wait for each other to begin therefore never begin."""
    pool, meeting = computing(), threading.Barrier(2, timeout=0.05)
    with pool.open(replica(dropout=0.5)):
        first = pool.submit(meeting.wait)
        with pytest.raises(threading.BrokenBarrierError):
            pool.run(meeting.wait)
        with pytest.raises(threading.BrokenBarrierError):
            pool.result(first)


@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_have_the_clusters_torch_threads_and_the_callers_number_is_restored(threads):
    pool = computing(threads)
    with pool.open(replica()):
        assert pool.result(pool.submit(torch.get_num_threads)) == threads
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 1


def test_torch_threads_are_restored_after_an_error():
    pool = computing(2)
    with pytest.raises(ZeroDivisionError), pool.open(replica()):
        pool.result(pool.submit(lambda: 1 / 0))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_closing_stops_jobs_whose_results_are_not_needed(error):
    """Whether the run is over or was interrupted, a replica gives up at its next step: a million would take minutes."""
    pool, mine, begun = computing(), replica(), threading.Event()
    mine.cancelled = lambda: begun.set() or pool.closing()
    with pytest.raises(error) if error else nullcontext(), pool.open(mine):
        future = pool.submit(lambda: mine.train(10**6, Work(shard=0, start=0, schedule=0, examples=1)))
        assert begun.wait(timeout=60)
        if error:
            raise error
    with pytest.raises(CancelledError):
        future.result()
    assert mine.steps_taken < 10**6


def test_a_second_interrupt_does_not_leave_threads_behind(monkeypatch):
    """A process that ends while a thread computes is aborted, so an interrupted run waits for the end of a step."""
    pool, calls = computing(), []
    shutdown = ThreadPoolExecutor.shutdown

    def impatient(self, wait=True, *, cancel_futures=False):
        calls.append(wait)
        if len(calls) == 1:
            raise KeyboardInterrupt
        shutdown(self, wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", impatient)
    with pool.open(replica()):
        assert pool.result(pool.submit(lambda: 3)) == 3
    assert calls == [True, True]


def test_the_switch_interval_is_short_while_the_pool_is_open():
    before, pool = sys.getswitchinterval(), computing()
    with pool.open(replica()):
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
