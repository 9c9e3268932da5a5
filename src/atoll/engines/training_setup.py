"""What an engine trains: the setup of a run, replicas as a Run describes them, and the batches that each reader gets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Batches, Gradient, Sink, Weigh, Work, Workload
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica, RoundStart
from atoll.runs.run_settings import Run, device_of, dtype_of


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What an engine trains, for how long, and what it reports. The last weights are always evaluated and saved."""

    params: Tree  # the initial weights, the same on all ranks
    batches: Batches  # in a synchronous run reader i reads shard i modulo the number of shards
    make_replica: Callable[[int], LocalReplica]
    """Makes the replica of a reader, with a fresh optimizer. Where islands have devices with an algorithm of their own, device j of
    island i is reader i * devices_per_island + j; else island i is reader i."""
    evaluate: Callable[[Tree, Mapping[str, torch.Tensor]], Mapping[str, float]]  # of weights and buffers
    sink: Sink
    steps: int  # inner steps of each island
    evaluate_every: int = 1  # rounds between evaluations (local updates in an asynchronous run)
    save_every: int | None = None  # as `evaluate_every`, between checkpoints; None: the run is not saved


def passed_multiple(before: int, now: int, interval: int) -> bool:
    """Whether a count has passed a multiple of `interval` since it was `before`.

    >>> [now for now in range(1, 10) if passed_multiple(now - 1, now, 4)]
    [4, 8]
    """
    return now // interval > before // interval


def loss_of(run: Run, workload: Workload) -> Loss:
    """The workload's loss; with train.compile one compiled graph for all replicas."""
    assert run.train.compile != "auto", "a resolved run says whether it compiles"
    return torch.compile(workload.loss) if run.train.compile else workload.loss


@contextmanager
def matrix_products(run: Run) -> Iterator[None]:
    """Computes the products of single-precision matrices in TF32 on CUDA, unless the run has fp32-strict. torch keeps this in flags
    of the process, which are restored at the end. Every process that computes for a run does so within this context."""
    if device_of(run) == "cpu":
        yield
        return
    tf32 = run.train.precision != "fp32-strict"
    with _tf32(torch.backends.cuda.matmul, (torch.backends.cuda.matmul,), tf32):
        cudnn = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn) if hasattr(torch.backends.cudnn, "conv") else ()
        with _tf32(torch.backends.cudnn, cudnn, tf32):
            yield


@contextmanager
def _tf32(backend: Any, operators: Sequence[Any], allowed: bool) -> Iterator[None]:
    """Sets `allow_tf32`, which torch.compile reads too. Where the user has set `fp32_precision` of some operators instead, torch
    does not say what `allow_tf32` is; then this sets the operators' and restores them."""
    try:
        before = backend.allow_tf32
    except RuntimeError:
        precisions = [operator.fp32_precision for operator in operators]
        for operator in operators:
            operator.fp32_precision = "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            for operator, precision in zip(operators, precisions, strict=True):
                operator.fp32_precision = precision
        return
    backend.allow_tf32 = allowed
    try:
        yield
    finally:
        backend.allow_tf32 = before


def replica_of(
    run: Run, workload: Workload, loss: Loss, island: int, device: str | None = None, more_devices: Sequence[str] = ()
) -> LocalReplica:
    """One island's model and inner optimizer on `device`, or on the run's. `more_devices` share its batches."""
    return LocalReplica(
        workload,
        optimizer=run.optimizer,
        clip_norm=run.train.clip_norm,
        micro_batches=run.train.micro_batches,
        devices=(device or device_of(run), *more_devices),
        autocast=run.train.precision == "bf16",
        dtype=dtype_of(run),
        loss=loss,
        seed=replica_seed(run, island),
        round_start=RoundStart(run.train.fresh_optimizer, run.train.peak_first),
    )


def replica_seed(run: Run, number: int) -> int:
    """The seed of the random numbers that one island, or one device of an island, draws while it computes."""
    return run.seed * 100_003 + number


class ReplicaAccess:
    """The weights and moments of a replica, for an algorithm. Engines add the computing, which takes time on their clocks."""

    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica

    def load(self, params: Tree) -> None:
        self._replica.load(params)

    def params(self) -> Tree:
        return self._replica.borrowed()

    def moments(self) -> dict[str, Tree]:
        return self._replica.moments()

    def load_moments(self, moments: Mapping[str, Tree]) -> None:
        self._replica.load_moments(moments)


class TrainingOnlyReplica:
    """The Replica of an island whose devices have an algorithm of their own: it trains, and has no gradients."""

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        raise ConfigError(
            "an island whose devices have an algorithm of their own (inside) trains, and has no gradient to give. Use an "
            "algorithm between islands that trains, such as DiLoCo, or inside=none."
        )


class DataPositions:
    """The position in each shard. Reader i reads shard i modulo the number of shards; readers of one shard never read the same
    batch."""

    def __init__(self, batches: Batches) -> None:
        self.positions = [Fraction(0)] * batches.num_shards
        """In batches."""
        self._batches = batches
        self._assigned: dict[int, deque[tuple[int, Work]]] = {}
        """Work, and its batches or pieces, that readers were assigned in this round before they asked."""

    def begin_round(self) -> None:
        """Discards what readers were assigned in the last round and did not ask for."""
        self._assigned.clear()

    def assign(self, reader: int, count: int, pieces: int, schedule: int) -> Work:
        """The next `count` batches, or pieces of batches, for a reader at this schedule position."""
        shard = reader % self._batches.num_shards
        start = math.ceil(self.positions[shard] * pieces)  # a reader of other pieces than the last begins with a whole one
        self.positions[shard] = Fraction(start + count, pieces)
        return Work(shard=shard, start=start, schedule=schedule, examples=self._batches.examples(shard), pieces=pieces)

    def assign_in_step(self, reader: int, count: int, pieces: int, schedule: int, readers: Iterable[int]) -> Work:
        """The same, if all readers ask for the same in a round. The first request assigns work to all readers of the shard in
        order, so the result does not depend on which reader is faster. Processes that do not see each other's requests assign
        in this way, too."""
        if not self._assigned.get(reader):
            for other in readers:
                if (other - reader) % self._batches.num_shards == 0:
                    self._assigned.setdefault(other, deque()).append((count, self.assign(other, count, pieces, schedule)))
        assigned, work = self._assigned[reader].popleft()
        if (assigned, work.pieces) != (count, pieces):  # this reader asks for something else
            return self.assign(reader, count, pieces, schedule)
        return replace(work, schedule=schedule)

    def check_readers(self, readers: int, *algorithms: Any) -> None:
        """Rejects more readers than shards if their batches per round differ: none would know how far the others have read."""
        shards = len(self.positions)
        if readers > shards and not same_batches_everywhere(*algorithms):
            raise ConfigError(
                f"{readers} processes read {shards} shards of the data, and with batch=free no process knows how far the others "
                f"have read. Use data.shards={readers}, or batch=fixed."
            )

    def examples(self, readers: Iterable[int]) -> int:
        """The number of examples in the shards of these readers."""
        return sum(self._batches.examples(shard) for shard in {reader % self._batches.num_shards for reader in readers})

    def to_parts(self) -> list[tuple[int, int]]:
        return [position.as_integer_ratio() for position in self.positions]

    def from_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        self.positions = [Fraction(*position) for position in parts]


def same_batches_everywhere(*algorithms: Any) -> bool:
    """Whether all members that run these algorithms ask for the same number of batches in a round."""
    return all(getattr(algorithm, "batch", None) != "free" for algorithm in algorithms)
