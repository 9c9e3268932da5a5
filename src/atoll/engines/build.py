"""From a Run to live objects: replicas, the engine, and what judges the weights. What is trained is made in `workloads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from atoll.core.events import Arranged, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Sink, Workload
from atoll.engines.accounting import RunAccounting
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.engine import SimEngine, SimSetup
from atoll.replica.evaluator import Evaluator
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica, RoundStart
from atoll.runs.run import Run
from atoll.runs.run import device_of as device_of
from atoll.runs.run import dtype_of as dtype_of
from atoll.runs.workloads import TextWorkload as TextWorkload
from atoll.runs.workloads import ToyWorkload as ToyWorkload
from atoll.runs.workloads import island_workload as island_workload
from atoll.runs.workloads import plain_workload as plain_workload


def loss_of(run: Run, workload: Workload) -> Loss:
    """The workload's loss, compiled if asked: one graph for all replicas."""
    return torch.compile(workload.loss) if run.train.compile else workload.loss


def replica_of(
    run: Run, workload: Workload, loss: Loss, island: int, device: str | None = None, more_devices: Sequence[str] = ()
) -> LocalReplica:
    """One island's model and inner optimizer, on the run's device unless another is given, and with the help of more devices."""
    return LocalReplica(
        workload,
        optimizer=run.optimizer,
        clip_norm=run.train.clip_norm,
        micro_batches=run.train.micro_batches,
        devices=(device or device_of(run), *more_devices),
        autocast=run.train.precision == "bf16",
        dtype=dtype_of(run),
        loss=loss,
        seed=seed_of(run, island),
        round_start=RoundStart(run.train.fresh_optimizer, run.train.peak_first),
    )


def seed_of(run: Run, number: int) -> int:
    """Of the random numbers that one island, or one device of an island, draws while it computes."""
    return run.seed * 100_003 + number


def batched_compute_of(run: Run, workload: Workload, sink: Sink) -> BatchedCompute | None:
    """What computes for several islands at a time; none where each has threads of its own."""
    if run.train.together == "apart" or (run.train.together == "auto" and device_of(run) == "cpu"):
        return None
    return BatchedCompute(
        run.train.together,
        run.world.islands * run.world.devices_per_island,
        workload.loss,
        compiled=run.train.compile,
        on_decision=lambda how, why: sink.emit(Arranged(how=how, why=why)),
    )


class Engine(Protocol):
    """What carries out a run: the simulator for rounds in step, or the one with a hub."""

    steps: int
    accounting: RunAccounting

    @property
    def params(self) -> Tree: ...

    @property
    def round(self) -> int: ...

    def run(self, warm_start_tokens: int = 0) -> RunFinished: ...

    def buffers(self) -> dict[str, torch.Tensor]: ...

    def parts(self) -> dict[str, Any]: ...

    def restore(self, load: Callable[[str, Any], Any]) -> None: ...


def engine_of(
    run: Run, workload: Workload, params: Tree, sink: Sink, save: Callable[[Engine], None] | None
) -> tuple[Engine, Evaluator]:
    """The simulator for this run, and what judges the weights."""
    loss = loss_of(run, workload)
    evaluator = Evaluator(workload, device_of(run), dtype_of(run))
    common: dict[str, Any] = {
        "cluster": run.world,
        "params": params,
        "batches": workload.batches,
        "make_replica": lambda island: replica_of(run, workload, loss, island),
        "evaluate": evaluator,
        "sink": sink,
        "steps": run.train.steps,
        "seed": run.seed,
        "save": save,
        "batched_compute": batched_compute_of(run, workload, sink),
    }
    every = (run.keep.evaluate_every, run.keep.save_every)
    if isinstance(run.algorithm, AsyncAlgorithm):  # intervals are steps per island there too, and count the steps of all
        evaluate_every, save_every = (steps * run.world.islands for steps in every)
        return AsyncSimEngine(run.algorithm, SimSetup(evaluate_every=evaluate_every, save_every=save_every, **common)), evaluator
    evaluate_every, save_every = (run.rounds(steps) for steps in every)
    setup = SimSetup(evaluate_every=evaluate_every, save_every=save_every, **common)
    return SimEngine(run.algorithm, setup, inside=run.inside), evaluator
