"""Real processes for tests: a few of them, joined by gloo on this machine, that run the same function."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, HoldsWeights, Workload
from atoll.engines.data_positions import DataPositions
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.peers import ProcessPeers
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.replicated_state import given
from atoll.optim.sgd import SGD
from atoll.replica.local_replica import InnerRule, LocalReplica

T = TypeVar("T")
_LIMIT_S = 60.0


def _context() -> Any:
    """Processes are forked off one that has imported what they need, and has done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.testing.process_runs"])
    return context


class Processes:
    """So many processes that know each other. Functions and their arguments are pickled, so functions are a module's own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pool = ProcessPoolExecutor(size, mp_context=_context())
        self._calls = 0

    def run(self, function: Callable[..., T], *arguments: Any, size: int | None = None) -> list[T]:
        """What the function returns in each process, or in `size` of them, in rank order. It is given a group and arguments."""
        size = size or self._size
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        self._calls += 1
        futures = [self._pool.submit(_joined, rank, size, store, function, arguments) for rank in range(size)]
        return [future.result() for future in futures]

    def few(self, size: int) -> Processes:
        """So many of them, as if there were no others."""
        return _Few(self, size)

    def close(self) -> None:
        self._pool.shutdown()
        self._folder.cleanup()


class _Few(Processes):
    def __init__(self, all_of_them: Processes, size: int) -> None:
        self._all, self._few = all_of_them, size

    def run(self, function: Callable[..., T], *arguments: Any, size: int | None = None) -> list[T]:
        return self._all.run(function, *arguments, size=size or self._few)

    def close(self) -> None:
        """They are not its own."""


@contextmanager
def processes(size: int) -> Iterator[Processes]:
    """So many processes, for a while."""
    started = Processes(size)
    try:
        yield started
    finally:
        started.close()


def _joined(rank: int, size: int, store: str, function: Callable[..., T], arguments: Sequence[Any]) -> T:
    torch.set_num_threads(1)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        group = dist.group.WORLD
        assert group is not None
        return function(group, *arguments)
    finally:
        dist.destroy_process_group()


def summed(group: dist.ProcessGroup, buffers: Sequence[torch.Tensor], weights: Sequence[float], piece_bytes: int) -> Any:
    """This rank's slice of the weighted sum of the buffers, one per rank; all slices; and what it sent."""
    wire = GroupCollectives(group, timeout_s=_LIMIT_S, piece_bytes=piece_bytes)
    mine = wire.reduce_scatter(buffers[wire.rank].clone(), weights)
    whole = torch.full_like(buffers[0], float("nan"))
    start = whole.numel() * wire.rank // wire.size
    whole[start : start + mine.numel()] = mine
    wire.all_gather(whole)
    return mine.clone(), whole, wire.sent_bytes


def played(
    group: dist.ProcessGroup, algorithm: Algorithm[Any], workload: Workload, rounds: int, inner: InnerRule | None = None
) -> tuple[Tree, int]:
    """An algorithm's weights after so many rounds, as far as this rank's State has them, and the payload that it sent."""
    wire, line = GroupCollectives(group, timeout_s=_LIMIT_S, piece_bytes=64), CommunicationThread()
    params, dealing = Tree.of(workload.module()), DataPositions(workload.batches)
    replica = LocalReplica(workload, optimizer=inner or SGD(lr=0.05), seed=wire.rank)
    replica.load(params)
    done = 0
    peers = ProcessPeers(wire, line, lambda steps, batches, pieces: dealing.assign(wire.rank, batches, pieces, done), params.layout)
    state = algorithm.init(params, peers)
    if isinstance(algorithm, HoldsWeights):
        replica.load(line.run(peers.all_gather(algorithm.held(state))))
    before = wire.sent_bytes
    for _ in range(rounds):
        state = line.run(algorithm.round(given(state), ProcessReplica(replica), peers))
        done += algorithm.steps_per_round
    line.close()
    return Tree(state.params.layout, state.params.flat.clone()), wire.sent_bytes - before


def outcomes(size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[int | None, Any]]:
    """What becomes of processes of which some may die: of each its exit code, and what it returned or the error that it raised."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        started = [
            context.Process(target=_telling, args=(pipe[1], rank, size, f"{folder}/store", function, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, end) in zip(started, pipes, strict=True):
            process.start()
            end.close()
        told = [_word(pipe) for pipe, _ in pipes]
        for process in started:
            process.join()
        return [(process.exitcode, word) for process, word in zip(started, told, strict=True)]


def _word(pipe: Connection) -> Any:
    """What a process says before it ends; none if it says nothing."""
    try:
        return pipe.recv() if pipe.poll(_LIMIT_S) else None
    except EOFError:
        return None


def _telling(pipe: Connection, rank: int, size: int, store: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        pipe.send(_joined(rank, size, store, function, arguments))
    except ExchangeFailed as error:
        pipe.send(error)


def cut_off(group: dist.ProcessGroup, victim: int, limit_s: float) -> None:
    """Sums without end, in which one rank is killed."""
    wire = GroupCollectives(group, timeout_s=limit_s)
    for turn in range(1000):
        if turn == 3 and wire.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        wire.reduce_scatter(torch.ones(1_000_000), [1.0] * wire.size)
