"""Real processes for tests and for benchmarks/outer_step.py: a pool of ranks on this machine, joined by gloo, and runs on them."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from atoll.algorithms.zero import FSDP
from atoll.core.errors import ExchangeFailed
from atoll.core.events import Event, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Workload
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.processes.engine import ProcessEngine, ProcessSetup
from atoll.engines.processes.fsdp import ShardedModel
from atoll.engines.processes.rank_context import RankContext, create_context
from atoll.optim.sgd import SGD
from atoll.replica.evaluator import Evaluator
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.testing.simulated_runs import Recorder, run_engine

T = TypeVar("T")
_TIMEOUT_S = 60.0
_PRELOADED = ("atoll.engines.processes.engine", "atoll.engines.processes.fsdp", "atoll.testing.simulated_runs")

# ------------------------------------------------------------------------------------------------------------------ processes


def _forkserver() -> Any:
    """Processes are forked from a server that has imported the engine and has done nothing else. The server cannot import this
    module: it does not get this process's sys.path, only its children do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class ProcessPool:
    """Processes that form a group in each call. Functions and arguments are pickled, so a function belongs to a module."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pool = ProcessPoolExecutor(size, mp_context=_forkserver())
        self._calls = itertools.count()

    def run(self, function: Callable[..., T], *arguments: Any, size: int | None = None) -> list[T]:
        """Call the function in each process, or in `size` of them, with their group and the arguments. Returns the results in rank
        order."""
        size = size or self._size
        store = str(Path(self._folder.name) / f"store-{next(self._calls)}")
        futures = [self._pool.submit(_call_in_group, rank, size, store, function, arguments) for rank in range(size)]
        return [future.result() for future in futures]

    def subset(self, size: int) -> ProcessPool:
        """The first `size` processes of this pool, which closes them."""
        subset = copy.copy(self)
        subset._size = size
        return subset

    def close(self) -> None:
        self._pool.shutdown()
        self._folder.cleanup()


def _call_in_group(rank: int, size: int, store: str, function: Callable[..., T], arguments: Sequence[Any]) -> T:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        group = dist.group.WORLD
        assert group is not None
        return function(group, *arguments)
    finally:
        dist.destroy_process_group()


def outcomes(size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[int | None, Any]]:
    """Call a function in processes that may die. Returns the exit code of each, and its result or the ExchangeFailed it raised."""
    context = _forkserver()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        started = [
            context.Process(target=_send_result, args=(pipe[1], rank, size, f"{folder}/store", function, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, end) in zip(started, pipes, strict=True):
            process.start()
            end.close()
        results = [_received(pipe) for pipe, _ in pipes]
        for process in started:
            process.join()
        return [(process.exitcode, result) for process, result in zip(started, results, strict=True)]


def _received(pipe: Connection) -> Any:
    """What a process sends before it ends; None if it sends nothing."""
    try:
        return pipe.recv() if pipe.poll(_TIMEOUT_S) else None
    except EOFError:
        return None


def _send_result(
    pipe: Connection, rank: int, size: int, store: str, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    try:
        pipe.send(_call_in_group(rank, size, store, function, arguments))
    except ExchangeFailed as error:
        pipe.send(error)


# ----------------------------------------------------------------------------------------------- functions for these processes


def sum_until_killed(group: dist.ProcessGroup, victim: int, timeout_s: float) -> None:
    """Sum without end; one rank is killed in the fourth sum."""
    collectives = GroupCollectives(group, timeout_s=timeout_s)
    for turn in range(1000):
        if turn == 3 and collectives.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.reduce_scatter(torch.ones(1_000_000), [1.0] * collectives.size)


def context_of(group: dist.ProcessGroup, devices: int = 1, *, inside: bool = False) -> RankContext:
    """This process's context, with the group as islands of this many devices, which may have an algorithm of their own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    store = FileStore(str(Path(folder[0]) / "store"), size)
    return create_context(store, rank, size, devices=devices, inside=inside, start_limit_s=_TIMEOUT_S)


def engine_of(
    context: RankContext,
    algorithm: Algorithm[Any],
    workload: Workload,
    steps: int,
    inner: InnerRule | None = None,
    inside: Algorithm[Any] | None = None,
    *,
    pause_s: float = 0.0,
    timeout_s: float = _TIMEOUT_S,
    **setup_options: Any,
) -> tuple[ProcessEngine, Recorder]:
    """An engine and the sink that it reports to, with the same choices as `simulated_runs.simulator`."""
    sink = Recorder()

    def make_sharded(mesh: Any) -> ShardedModel:
        assert isinstance(inside, FSDP)
        return ShardedModel(workload, mesh=mesh, algorithm=inside, device="cpu", seed=context.rank)

    setup = ProcessSetup(
        params=Tree.of(workload.module()),
        batches=workload.batches,
        make_replica=lambda rank: LocalReplica(workload, optimizer=inner or SGD(lr=0.05), seed=rank),
        make_sharded=make_sharded,
        pause_s=pause_s,
        sink=sink,
        steps=steps,
        **{"evaluate": Evaluator(workload), **setup_options},
    )
    return ProcessEngine(algorithm, context, setup, inside=inside, timeout=ExchangeTimeout(timeout_s)), sink


class ProcessRun(NamedTuple):
    """The result of a run on one rank. Only rank 0 has figures and events."""

    params: Tree
    finished: RunFinished | None
    events: list[Event]


def run_on_processes(
    group: dist.ProcessGroup,
    algorithm: Algorithm[Any],
    workload: Workload,
    steps: int,
    inner: InnerRule | None = None,
    inside: Algorithm[Any] | None = None,
    devices: int = 1,
) -> ProcessRun:
    """A whole run of an algorithm, on this rank of a group."""
    context = context_of(group, devices, inside=inside is not None)
    engine, sink = engine_of(context, algorithm, workload, steps, inner, inside)
    finished = run_engine(engine)
    params = engine.params.copy()
    engine.close()
    return ProcessRun(params, finished, sink.events)
