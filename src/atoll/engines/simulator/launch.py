"""Launching a simulated run: the driver trains in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from atoll.core.events import Arranged
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Sink, Workload
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.run_lifecycle import Driver, Result, RunRequest
from atoll.engines.simulator.async_engine import AsyncSimEngine
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.engines.training_setup import loss_of, replica_of
from atoll.engines.warm_start_training import Prepared
from atoll.replica.evaluator import Evaluator
from atoll.runs.run_settings import Run, device_of


def start(request: RunRequest) -> Result | None:
    with request.open() as task:
        if task.finished:
            return task.reopen()
        return SimulatorDriver(task).carry_out()


class SimulatorDriver(Driver[SimEngine | AsyncSimEngine]):
    """Carries out a simulated run."""

    def open_engine(
        self, prepared: Prepared, evaluator: Evaluator | None, sink: Sink
    ) -> AbstractContextManager[SimEngine | AsyncSimEngine]:
        assert evaluator is not None
        return nullcontext(engine_of(self.run, prepared.workload, prepared.warm_start.params, evaluator, sink))

    def restore(self, engine: SimEngine | AsyncSimEngine, checkpoint: Checkpoint) -> None:
        engine.restore(lambda part, like: self.checkpoints.load(checkpoint, part, like))

    def write_checkpoint(self, engine: SimEngine | AsyncSimEngine, metadata: Mapping[str, Any]) -> None:
        self.checkpoints.save(engine.round, engine.parts(), metadata)


def engine_of(
    run: Run, workload: Workload, params: Tree, evaluator: Evaluator, sink: Sink, *, saves: bool = True, count_memory: bool = True
) -> SimEngine | AsyncSimEngine:
    """The simulator for this run: with synchronous rounds, or with a hub. Without `saves` no checkpoint is ever due. Without
    `count_memory` the first rounds, which count it, take no longer than the others."""
    loss, cluster, algorithm = loss_of(run, workload), run.effective_cluster, run.algorithm

    def interval(steps: int) -> int:
        """From steps per island: in local updates of all islands where there is a hub, else in rounds."""
        return steps * cluster.islands if isinstance(algorithm, AsyncAlgorithm) else run.rounds(steps)

    setup = SimSetup(
        cluster=cluster,
        params=params,
        batches=workload.batches,
        make_replica=lambda island: replica_of(run, workload, loss, island),
        evaluate=evaluator,
        sink=sink,
        steps=run.train.steps,
        evaluate_every=interval(run.keep.evaluate_every),
        save_every=interval(run.keep.save_every) if saves else None,
        seed=run.seed,
        batched_compute=_batched_compute_of(run, workload, sink),
        gives_moments=run.train.joiner_moments == "donor",
    )
    if isinstance(algorithm, AsyncAlgorithm):
        return AsyncSimEngine(algorithm, setup)
    return SimEngine(algorithm, setup, inside=run.inside, count_memory=count_memory)


def _batched_compute_of(run: Run, workload: Workload, sink: Sink) -> BatchedCompute | None:
    """None if each island computes in its own threads."""
    if run.train.together == "apart" or (run.train.together == "auto" and device_of(run) == "cpu"):
        return None
    return BatchedCompute(
        run.train.together,
        run.effective_cluster.islands * run.effective_cluster.devices_per_island,
        workload.loss,
        compiled=run.train.compile is True,
        on_decision=lambda how, why: sink.emit(Arranged(how=how, why=why)),
    )
