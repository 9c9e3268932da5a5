"""From a Run to live objects: replicas, the engine, and what judges the weights. What is trained is made in `workloads`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atoll.engines.local import Evaluator, LocalReplica, Loss
from atoll.engines.sim.engine import SimEngine
from atoll.errors import ConfigError
from atoll.protocols import AsyncAlgorithm, Sink, Workload
from atoll.runs.run import Run
from atoll.runs.run import device_of as device_of
from atoll.runs.workloads import TextWorkload as TextWorkload
from atoll.runs.workloads import ToyWorkload as ToyWorkload
from atoll.runs.workloads import island_workload as island_workload
from atoll.runs.workloads import plain_workload as plain_workload
from atoll.tree import Tree


def loss_of(run: Run, workload: Workload) -> Loss:
    """The workload's loss, compiled if asked: one graph for all replicas."""
    return torch.compile(workload.loss) if run.train.compile else workload.loss


def replica_of(run: Run, workload: Workload, loss: Loss, island: int) -> LocalReplica:
    """One island's model and inner optimizer."""
    return LocalReplica(
        workload,
        optimizer=run.optimizer,
        clip_norm=run.train.clip_norm,
        micro_batches=run.train.micro_batches,
        device=device_of(run),
        autocast=run.train.precision == "bf16",
        loss=loss,
        seed=run.seed * 100_003 + island,
        fresh_optimizer=run.train.fresh_optimizer,
        peak_first=run.train.peak_first,
    )


def engine_of(
    run: Run, workload: Workload, params: Tree, sink: Sink, save: Callable[[SimEngine], None] | None
) -> tuple[SimEngine, Evaluator]:
    """The simulator for this run, and what judges the weights."""
    if isinstance(run.algorithm, AsyncAlgorithm):
        raise ConfigError(f"{type(run.algorithm).__name__} has no engine here: this one runs rounds in step. Use DDP or DiLoCo.")
    loss = loss_of(run, workload)
    evaluator = Evaluator(workload, device_of(run))
    engine = SimEngine(
        algorithm=run.algorithm,
        cluster=run.cluster,
        params=params,
        batches=workload.batches,
        make_replica=lambda island: replica_of(run, workload, loss, island),
        evaluate=evaluator,
        sink=sink,
        steps=run.train.steps,
        seed=run.seed,
        evaluate_every=run.rounds(run.keep.evaluate_every),
        save=save,
        save_every=run.rounds(run.keep.save_every),
    )
    return engine, evaluator
