"""The same decoder on the same batches in a bare PyTorch loop, and with DiLoCo on simulated islands.

Both have fused AdamW, gradients clipped to a norm of 1 and, on a GPU, forward passes in bfloat16 of the same compiled loss. Tokens
are random, and batches are gathered on the device. Neither synchronizes within a turn, except an island at the end of its steps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from atoll.algorithms.diloco import DiLoCo
from atoll.core.events import Computed, Event, RoundFinished
from atoll.core.flat_tree import Tree
from atoll.engines.simulator.batched_compute import BatchedCompute, BatchMode
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.models.gpt import Decoder
from atoll.optim.adam import AdamW
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import run_engine
from gpu_device import Peak, is_cuda, seconds, synchronize
from gpu_plan import EXAMPLES, Cell, Mode, Shape
from sim_speed import fused_adamw

RULE = AdamW(lr=1e-4)
CLIP_NORM = 1.0
WARM_STEPS = 3


class RandomTokens:
    """Batches of random tokens on the device. A shard and a position determine the batch."""

    def __init__(self, shape: Shape, device: str, num_shards: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(shape.vocab_size, (EXAMPLES, shape.seq_len + 1), generator=generator, dtype=torch.int32)
        self._rows = rows.to(device)
        # Twice, so that a batch may start near the end.
        self._order = torch.randperm(EXAMPLES, generator=generator).repeat(2).to(device)
        self._batch_size, self.num_shards = shape.batch_size, num_shards

    def examples(self, shard: int) -> int:
        return EXAMPLES

    def batch(self, shard: int, position: int) -> Tensor:
        start = (17 * shard + position) * self._batch_size % EXAMPLES
        return self._rows.index_select(0, self._order[start : start + self._batch_size]).long()

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Tensor]:
        return (self.batch(shard, position) for position in range(start, start + count))

    def tokens(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)


def decoder_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    assert isinstance(module, Decoder)
    return module.loss(tokens)


class Subject:
    """A workload whose modules are created on the device."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.batches = RandomTokens(shape, device)
        # Once: random initialization of hundreds of millions of weights takes seconds on a CPU.
        self._first = shape.model.build(shape.vocab_size, shape.seq_len, seed=0).to(device)

    @cached_property
    def compiled(self) -> Loss:
        """The compiled loss of the bare loop and all islands; on a CPU the loss itself. Drops graphs of other shapes, since torch
        limits the number of graphs per function."""
        if not is_cuda(self.device):
            return decoder_loss
        torch.compiler.reset()
        return torch.compile(decoder_loss, dynamic=False)

    def module(self) -> Decoder:
        return copy.deepcopy(self._first)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        return decoder_loss(module, batch)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}


class Bare:
    """A loop without a framework: one model with ordinary parameters, its batches, clipping, AdamW."""

    def __init__(self, subject: Subject) -> None:
        self._peak = Peak(subject.device)
        self._subject, self._loss = subject, subject.compiled
        self._on_gpu = is_cuda(subject.device)
        self.module = subject.module()
        self._optimizer = fused_adamw(self.module, RULE)
        self._position = 0

    def steps(self, count: int) -> None:
        for position in range(self._position, self._position + count):
            tokens = self._subject.batches.batch(0, position)
            with torch.autocast("cuda", torch.bfloat16, enabled=self._on_gpu):
                loss = self._loss(self.module, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM, foreach=self._on_gpu)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._position += count

    def turn(self) -> float:
        """Seconds of a turn's steps."""
        return seconds(self._subject.device, lambda: self.steps(self._subject.shape.bare_steps))

    def measured(self, turns: int) -> dict[str, Any]:
        """Seconds of each turn, and peak memory during training and before."""
        begin_bytes = self._peak.reached()
        self._peak.begin()
        turns_s = [self.turn() for _ in range(turns)]
        return {"bare_s": turns_s, "peak_bytes": self._peak.reached(), "begin_bytes": begin_bytes}

    def warm_up(self) -> None:
        self.steps(WARM_STEPS)
        synchronize(self._subject.device)


class Turns:
    """A sink that times whole rounds. Before each round but the first, which is the warm-up, it runs a turn of the bare loop."""

    def __init__(self, device: str, turns: int, bare_turn: Callable[[], float]) -> None:
        self._device, self._turns, self._bare_turn = device, turns, bare_turn
        self._peak = Peak(device)
        self._start_s: float | None = None
        self._computed_s = 0.0
        self.found: dict[str, Any] = {
            **{kind: [] for kind in ("losses", "round_s", "outer_s", "bare_s")},
            **dict.fromkeys(("peak_bytes", "begin_bytes", "pool_bytes")),
        }
        """Losses include the warm-up round."""

    def emit(self, event: Event) -> None:
        if isinstance(event, Computed):
            self._computed_s = time.perf_counter()
        elif isinstance(event, RoundFinished):
            self.found["losses"].append(event.loss)
            self._end_round()

    def _end_round(self) -> None:
        synchronize(self._device)
        now_s = time.perf_counter()
        kind = "begin_bytes" if self._start_s is None else "peak_bytes"
        reached = self._peak.reached()
        self.found[kind] = None if reached is None else max(reached, self.found[kind] or 0)
        self.found["pool_bytes"] = self._peak.pool_bytes()
        if self._start_s is not None:
            self.found["round_s"].append(now_s - self._start_s)
            self.found["outer_s"].append(now_s - self._computed_s)
        if len(self.found["round_s"]) < self._turns:
            self.found["bare_s"].append(self._bare_turn())
            self._peak.begin()
            self._start_s = time.perf_counter()


def measure_islands(cell: Cell, subject: Subject, bare: Bare) -> dict[str, Any]:
    """Seconds of DiLoCo's rounds, of their part after the last inner step, and of the bare loop's turns between them; losses of all
    rounds; peak memory during training and before; and the choice of `auto`. All modes start from the same weights, and an island
    reads the same batches in all of them."""
    sink = Turns(subject.device, cell.turns, bare.turn)
    reasons: list[str] = []
    batched = batched_compute_of(cell, subject, lambda how, why: reasons.append(why))
    engine = SimEngine(
        DiLoCo(inner_steps=cell.inner_steps),
        SimSetup(
            cluster=Cluster(islands=cell.islands, threads_per_island=1),
            params=Tree.of(subject.module()),
            batches=subject.batches,
            make_replica=lambda island: replica_of(subject),
            evaluate=lambda params, buffers: {"loss": 0.0},
            sink=sink,
            steps=(1 + cell.turns) * cell.inner_steps,
            evaluate_every=1 + cell.turns,
            batched_compute=batched,
        ),
        count_memory=False,  # counting would slow down the first rounds, and there are few
    )
    run_engine(engine)
    if batched is not None and cell.mode == "auto":
        sink.found["chosen"] = {"way": chosen_by(batched), "why": reasons[-1]}
    return sink.found


def batched_compute_of(cell: Cell, subject: Subject, on_decision: Callable[[str, str], object]) -> BatchedCompute | None:
    """The batched compute of a cell's islands; None if each island computes by itself."""
    if cell.mode == "apart":
        return None
    how: BatchMode = "auto" if cell.mode == "auto" else "stacked"
    rows = 1 if cell.mode == "recorded" else cell.islands
    return BatchedCompute(how, rows, subject.loss, compiled=is_cuda(subject.device), on_decision=on_decision)


def chosen_by(batched: BatchedCompute) -> Mode:
    """The mode that `auto` chose. With a stack of one row, islands compute one after the other in recorded passes."""
    decision = batched.to_part()
    return "stacked" if decision["how"] == "stacked" else "recorded" if decision["one"] else "apart"


def replica_of(subject: Subject) -> LocalReplica:
    """One island."""
    return LocalReplica(
        subject, optimizer=RULE, clip_norm=CLIP_NORM, devices=(subject.device,), autocast=True, loss=subject.compiled
    )
