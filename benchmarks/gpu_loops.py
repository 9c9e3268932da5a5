"""Two ways to train the same decoder on the same batches: a bare PyTorch loop, and DiLoCo on simulated islands.

Both have fused AdamW, gradients clipped to a norm of 1 and, on a GPU, forward passes in bfloat16 of one and the same compiled loss.
Tokens are random and lie on the device, where batches are gathered. Neither waits for the device within a turn, but for an island
at the end of its steps.
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
from atoll.engines.simulator.engine import SimEngine, SimSetup
from atoll.models.gpt import Decoder
from atoll.optim.adam import AdamW
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica
from atoll.runs.cluster import Cluster
from gpu_device import Peak, is_cuda, seconds, wait_for
from gpu_plan import EXAMPLES, Cell, Shape, Way

RULE = AdamW(lr=1e-4)
CLIP_NORM = 1.0
WARM_STEPS = 3


class RandomTokens:
    """Batches of random tokens that lie on the device; the same shard and position give the same batch to anybody."""

    def __init__(self, shape: Shape, device: str, num_shards: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(shape.vocab_size, (EXAMPLES, shape.seq_len + 1), generator=generator, dtype=torch.int32)
        self._rows = rows.to(device)
        # Twice, so that a batch may begin near the end.
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
    """What is trained: a workload of the engine's kind, whose modules begin on the device."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.batches = RandomTokens(shape, device)
        # Drawn once: to draw hundreds of millions of weights takes a CPU seconds.
        self._first = shape.model.build(shape.vocab_size, shape.seq_len, seed=0).to(device)

    @cached_property
    def compiled(self) -> Loss:
        """One graph for the bare loop and all islands; on a CPU the loss itself. What was compiled for other shapes is dropped,
        since torch compiles one function for so many kinds of arguments and no more."""
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
    """What one would write without a framework: one model with ordinary parameters, its batches, clipping, AdamW."""

    def __init__(self, subject: Subject) -> None:
        self._peak = Peak(subject.device)
        self._subject, self._loss = subject, subject.compiled
        self._on_gpu = is_cuda(subject.device)
        self.module = subject.module()
        matrices = [parameter for parameter in self.module.parameters() if parameter.dim() >= 2]
        rest = [parameter for parameter in self.module.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": RULE.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=RULE.betas, eps=RULE.eps, fused=True)
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
        """Seconds of its steps."""
        return seconds(self._subject.device, lambda: self.steps(self._subject.shape.bare_steps))

    def measured(self, turns: int) -> dict[str, Any]:
        """By itself: seconds of each turn, and the memory that it takes while it trains and before."""
        begin_bytes = self._peak.reached()
        self._peak.begin()
        turns_s = [self.turn() for _ in range(turns)]
        return {"bare_s": turns_s, "peak_bytes": self._peak.reached(), "begin_bytes": begin_bytes}

    def warm_up(self) -> None:
        self.steps(WARM_STEPS)
        wait_for(self._subject.device)


class Turns:
    """A sink that takes the time of whole rounds. Before each of them but the first, which warms up, the other has its turn."""

    def __init__(self, device: str, turns: int, other: Callable[[], float]) -> None:
        self._device, self._turns, self._other = device, turns, other
        self._peak = Peak(device)
        self._began_s: float | None = None
        self._computed_s = 0.0
        self.found: dict[str, Any] = {
            **{kind: [] for kind in ("losses", "round_s", "outer_s", "bare_s")},
            **dict.fromkeys(("peak_bytes", "begin_bytes", "pool_bytes")),
        }
        """Losses are of all rounds, with the one that warms up."""

    def emit(self, event: Event) -> None:
        if isinstance(event, Computed):
            self._computed_s = time.perf_counter()
        elif isinstance(event, RoundFinished):
            self.found["losses"].append(event.loss)
            self._round_over()

    def _round_over(self) -> None:
        wait_for(self._device)
        now_s = time.perf_counter()
        kind = "begin_bytes" if self._began_s is None else "peak_bytes"
        reached = self._peak.reached()
        self.found[kind] = None if reached is None else max(reached, self.found[kind] or 0)
        self.found["pool_bytes"] = self._peak.pool_bytes()
        if self._began_s is not None:
            self.found["round_s"].append(now_s - self._began_s)
            self.found["outer_s"].append(now_s - self._computed_s)
        if len(self.found["round_s"]) < self._turns:
            self.found["bare_s"].append(self._other())
            self._peak.begin()
            self._began_s = time.perf_counter()


def islands_measured(cell: Cell, subject: Subject, bare: Bare) -> dict[str, Any]:
    """Seconds of DiLoCo's rounds and of what lies between the last inner step and the next round, those of the bare loop's turns
    between them, losses of all rounds, memory while islands train and before, and what was chosen where there was a choice. All
    ways begin with the same weights, and an island reads the same batches in all of them."""
    clock = Turns(subject.device, cell.turns, bare.turn)
    told: list[str] = []
    together = together_of(cell, subject, lambda how, why: told.append(why))
    engine = SimEngine(
        DiLoCo(inner_steps=cell.inner_steps),
        SimSetup(
            cluster=Cluster(islands=cell.islands, threads_per_island=1),
            params=Tree.of(subject.module()),
            batches=subject.batches,
            make_replica=lambda island: replica_of(subject),
            evaluate=lambda params, buffers: {"loss": 0.0},
            sink=clock,
            steps=(1 + cell.turns) * cell.inner_steps,
            evaluate_every=1 + cell.turns,
            batched_compute=together,
        ),
        count_memory=False,  # rounds in which it is counted take longer, and the first are all of them
    )
    engine.run()
    if together is not None and cell.way == "auto":
        clock.found["chosen"] = {"way": chosen_by(together), "why": told[-1]}
    return clock.found


def together_of(cell: Cell, subject: Subject, tell: Callable[[str, str], object]) -> BatchedCompute | None:
    """What computes for a cell's islands; none where each computes by itself."""
    if cell.way == "apart":
        return None
    how: BatchMode = "auto" if cell.way == "auto" else "stacked"
    rows = 1 if cell.way == "recorded" else cell.islands
    return BatchedCompute(how, rows, subject.loss, compiled=is_cuda(subject.device), on_decision=tell)


def chosen_by(together: BatchedCompute) -> Way:
    """Which way was settled. Where there is a stack of one row, islands that compute one after the other have recorded passes."""
    settled = together.to_part()
    return "stacked" if settled["how"] == "stacked" else "recorded" if settled["one"] else "apart"


def replica_of(subject: Subject) -> LocalReplica:
    """An island of the subject."""
    return LocalReplica(
        subject, optimizer=RULE, clip_norm=CLIP_NORM, devices=(subject.device,), autocast=True, loss=subject.compiled
    )
