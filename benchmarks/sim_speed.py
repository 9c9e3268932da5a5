"""The speed of simulated islands, compared with bare PyTorch loops that train as many models for as many steps.

Bare loops run one after the other on one thread, and in parallel, as many as the simulator computes in parallel: as threads, and as
processes, which do not share an interpreter lock. All read the same batches and have one torch thread per model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import recycle
from atoll.engines.simulator.collectives import weighted_mean
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.engines.training_setup import loss_of, replica_of
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.optim.schedules import at
from atoll.optim.sgd import Nesterov
from atoll.replica.local_replica import torch_threads
from atoll.runs.run_settings import Run, candidates
from atoll.runs.workloads import TextWorkload, sharded_workload
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.simulated_runs import run_engine
from cells import FIRST_DEMO
from progress import timed

SIMULATED = "simulated DiLoCo"
ONE_BY_ONE, THREADS, PROCESSES = "bare, one after the other", "bare, in threads", "bare, in processes"


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """The workload: decoder and batch of the first demo, so that records compare."""

    islands: int = 4
    steps: int = 40  # of each island
    inner_steps: int = 20  # per round
    more: tuple[str, ...] = ()  # further settings of the recipe
    processes: bool = True  # whether to run bare loops in processes, too

    def run(self) -> Run:
        settings = (
            *FIRST_DEMO,
            f"algorithm.inner_steps={self.inner_steps}",
            f"cluster.islands={self.islands}",
            "cluster.threads_per_island=1",
            f"train.steps={self.steps}",
            "train.warm_start_steps=0",
            "data.limit_bytes=1000000",
            *self.more,
        )
        return override(recipes.recipe("demo-diloco"), settings, candidates).resolved

    @property
    def tokens(self) -> int:
        run = self.run()
        return self.islands * self.steps * run.train.batch_size * run.data.seq_len


@cache
def workload_of(plan: SpeedPlan) -> TextWorkload:
    """The sharded text; loaded once per process."""
    run = plan.run()
    return sharded_workload(run, run.data.load(), Tree.of({}))


class Contest:
    """Runs and times each method. A context: it holds threads and processes."""

    def __init__(self, plan: SpeedPlan) -> None:
        self._plan = plan
        self._open = ExitStack()
        workers = min(plan.islands, os.cpu_count() or 1)
        alone, threads = (ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) for count in (1, workers))
        pools: dict[str, Executor] = {ONE_BY_ONE: alone, THREADS: threads}
        if plan.processes:
            # Spawned, not forked: torch's threads do not survive a fork.
            pools[PROCESSES] = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
        self.methods: Mapping[str, Callable[[int], None]] = {
            SIMULATED: partial(simulate, plan),
            **{name: partial(self._bare, self._open.enter_context(pool)) for name, pool in pools.items()},
        }

    def seconds(self, method: str) -> float:
        """One measurement."""
        start = time.perf_counter()
        self.methods[method](self._plan.steps)
        return time.perf_counter() - start

    def warm_up(self, method: str) -> None:
        """The first steps, which load libraries and text and fill caches."""
        self.methods[method](self._plan.inner_steps)

    def _bare(self, pool: Executor, steps: int) -> None:
        list(pool.map(bare_loop, *zip(*((self._plan, island, steps) for island in range(self._plan.islands)), strict=True)))

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()


def simulate(plan: SpeedPlan, steps: int) -> None:
    """DiLoCo in the simulator, with its checks and its event log, without evaluation."""
    run, workload = plan.run(), workload_of(plan)
    with TemporaryDirectory(prefix="atoll-benchmark-") as folder:
        sink = JsonlSink(Path(folder) / "events.jsonl")
        engine = SimEngine(
            run.algorithm,
            SimSetup(
                cluster=run.cluster,
                params=Tree.of(workload.module()),
                batches=workload.batches,
                make_replica=partial(replica_of, run, workload, loss_of(run, workload)),
                evaluate=lambda params, buffers: {"loss": 0.0},
                sink=sink,
                steps=steps,
            ),
        )
        run_engine(engine)
        sink.close()


def bare_loop(plan: SpeedPlan, island: int, steps: int) -> float:
    """A loop without a framework: one model, its batches, clipping, AdamW. Returns the mean loss."""
    run, workload = plan.run(), workload_of(plan)
    rule = run.optimizer
    assert isinstance(rule, AdamW)
    module, batches = workload.module(), workload.batches
    optimizer = fused_adamw(module, rule)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = at(rule.lr, step)
        loss = module.loss(batches.batch(island, step))
        loss.backward()  # type: ignore[no-untyped-call]
        if run.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), run.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def fused_adamw(module: torch.nn.Module, rule: AdamW) -> torch.optim.AdamW:
    """torch's AdamW with the rule's settings: only matrices have weight decay. The caller sets the rate."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": rule.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=at(rule.lr, 0), betas=rule.betas, eps=rule.eps, fused=True)


COPY, DELTA, MEAN, UPDATE = "copy", "delta", "mean", "update"


class OuterStep:
    """The weights of some islands, and an outer rule over them."""

    def __init__(self, model: GPT, vocab_size: int, islands: int) -> None:
        self.params = Tree.of(model.build(vocab_size, seq_len=8, seed=0))
        self.islands = islands
        self._rule = Nesterov(lr=0.7, momentum=0.9)
        self._state = self._rule.init(self.params)
        self._weights = [self.params * (1 + 1e-3 * (island + 1)) for island in range(islands)]
        self._buffer = torch.empty_like(self.params.flat)

    def seconds(self) -> dict[str, float]:
        """One measurement of each part, on one thread: the deltas of all islands, their mean, one update."""
        with torch_threads(1):
            taken, _ = timed(lambda: self._buffer.copy_(self.params.flat))
            times = {COPY: taken}
            times[DELTA], deltas = timed(lambda: [self.params - weights for weights in self._weights])
            times[MEAN], mean = timed(lambda: weighted_mean(deltas, [1.0] * self.islands))
            times[UPDATE], after = timed(lambda: self._rule.update(self.params, mean, self._state))
        # The engine reuses released buffers between two rounds.
        recycle([deltas, mean, self.params, self._state], [after])
        self.params, self._state = after
        return times
