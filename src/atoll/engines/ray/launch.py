"""Launching an asynchronous run on Ray.

This process drives: it has the run's folder, makes the warm start, shows progress and evaluates. The hub, an actor on the same
machine, writes the event log and the checkpoints. Workers need nothing but the same data.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from typing import Any

import torch

from atoll.core.errors import CheckpointError
from atoll.core.events import Progress
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.core.serialization import save_tree
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.ray import bootstrap
from atoll.engines.ray.engine import RayEngine
from atoll.engines.ray.hub_storage import INITIAL_WEIGHTS, HubStorage, LostRounds, rounds_after, wait_for_former_hub
from atoll.engines.ray.messages import HubProcessSpec, dtype_name, tree_bytes
from atoll.engines.ray.spec import Ray, gpus_per_worker
from atoll.engines.ray.worker import WorkerProcessSpec
from atoll.engines.run_lifecycle import Driver, Prepared, Result, RunRequest, RunTask
from atoll.engines.spec import refuse_torchrun
from atoll.replica.evaluator import Evaluator
from atoll.runs.run import Run, device_of
from atoll.runs.workloads import partitioned_by_weights
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.sinks import Fanout

_PUBLISHED = 8
"""Versions of the weights that the object store holds besides a delta of each worker: the last published, and those to evaluate."""


def start(request: RunRequest) -> Result:
    refuse_torchrun(Ray())
    bootstrap.check_installed()
    if request.run is not None and isinstance(request.spec, Ray):
        if request.spec.address is not None:
            bootstrap.check_reachable(request.spec.address)
        _gpus(request.spec.fitted(request.run), request.spec)
    with request.open() as task:
        if task.finished:
            return task.reopen()
        assert isinstance(task.spec, Ray)
        _gpus(task.run, task.spec)
        task.log(task.spec.ignored_settings(task.run))
        log = task.folder.path / "logs" / "ray.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # Ray prints about processes that die. The driver reports them in its own lines.
        with open(log, "a", encoding="utf-8") as printed, redirect_stdout(printed):
            return RayDriver(task, task.spec).carry_out()


def _gpus(run: Run, spec: Ray) -> float:
    """GPUs of each worker: one per device, or on this machine a fraction of one if there are fewer GPUs than workers."""
    if device_of(run.resolved) != "cuda":
        return 0.0
    here = spec.address is None
    return gpus_per_worker(spec.worker_slots(run), spec.devices, torch.cuda.device_count()) if here else float(spec.devices)


class RayDriver(Driver):
    """Drives a run whose hub and workers are Ray actors."""

    def __init__(self, task: RunTask, spec: Ray) -> None:
        super().__init__(task)
        self._spec = spec
        self._slots = spec.worker_slots(self.run)

    def carry_out(self) -> Result:
        # An earlier hub may still write the log and a checkpoint.
        wait_for_former_hub(self.folder.path, timeout_s=self._spec.hub_timeout_s, log=self.task.log)
        checkpoint = self.checkpoints.newest()
        lost = self._lost(checkpoint)
        self.note("resumed" if checkpoint else "started", round=checkpoint.round if checkpoint else 0)
        log, *others = self.open_sinks(checkpoint)
        assert isinstance(log, JsonlSink)
        with Fanout(others) as sink:
            prepared = self.prepare(Fanout([log, sink]), checkpoint)
            if checkpoint is not None:
                total = self.run.train.steps
                sink.emit(Progress(phase="resume", done=0, total=total, note=f"from round {checkpoint.round}"))
            save_tree(self.folder.path / INITIAL_WEIGHTS, prepared.warm_start.params)
            begin_bytes = log.position()
            log.close()  # from now on the hub writes it
            evaluator = self.make_evaluator(prepared.workload)
            # Faults are reverted before the stack closes the engine, which asks the hub to save.
            with self._cluster(prepared.warm_start.params) as ray, ExitStack() as stack, self._faults() as faults:
                receivers = sink if faults is None else Fanout([sink, faults])
                hub = self._hub_spec(prepared, begin_bytes, lost)
                engine = self._engine(ray, prepared, evaluator, receivers, hub)
                stack.push(lambda kind, error, trace: engine.close(save=kind is not None))
                finished, params, buffers = engine.run()
            self.write_final(params, buffers, finished, checkpoint)
        return self.result(evaluator, params, buffers)

    def _lost(self, checkpoint: Checkpoint | None) -> LostRounds:
        """The rounds in the log after the checkpoint. Workers compute them again."""
        lost = rounds_after(self.folder.events, checkpoint.metadata["events_bytes"] if checkpoint else 0)
        if checkpoint is None and lost.rounds:
            raise CheckpointError(
                f"{self.folder.path} has no checkpoint, but its log has {lost.rounds} rounds. A resume would begin again and lose "
                f"them. Restore {self.folder.checkpoints}, or start a new run in another folder."
            )
        return lost

    def _cluster(self, params: Tree) -> AbstractContextManager[Any]:
        if self._spec.address is not None:
            return bootstrap.cluster(self._spec.address)
        store_bytes = (_PUBLISHED + self._slots) * params.nbytes
        gpus = torch.cuda.device_count() if device_of(self.run) == "cuda" else 0
        return bootstrap.own_ray(cpus=self._slots + 2, gpus=gpus, store_bytes=store_bytes, folder=self.folder.path)

    def _faults(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.task.faults is None else self.task.faults.attach(self.task)

    def _engine(self, ray: Any, prepared: Prepared, evaluator: Evaluator, sink: Sink, hub: HubProcessSpec) -> RayEngine:
        run, spec, workload = self.run, self._spec, self.task.workload
        weights = (ray.put(tree_bytes(prepared.warm_start.params)),) if workload is None and partitioned_by_weights(run) else ()
        logs = (self.folder.path / "logs").absolute()
        worker = WorkerProcessSpec(run=run, engine=spec, gpus=_gpus(run, spec), workload=workload, weights=weights, logs=logs)
        return RayEngine(ray=ray, hub=hub, worker=worker, evaluate=evaluator, sink=sink, log=self.task.log)

    def _hub_spec(self, prepared: Prepared, begin_bytes: int, lost: LostRounds) -> HubProcessSpec:
        batches, params = prepared.workload.batches, prepared.warm_start.params
        return HubProcessSpec(
            run=self.run,
            engine=self._spec,
            examples=tuple(batches.examples(shard) for shard in range(batches.num_shards)),
            layout=params.layout,
            dtype=dtype_name(params),
            begin_bytes=begin_bytes,
            lost=lost,
            session=secrets.token_hex(8),
            storage=HubStorage(self.folder.path.absolute(), self.run.keep.checkpoints, prepared.origin),
            fingerprint=str(prepared.origin["data"]),
            warm_start_tokens=prepared.warm_start.tokens,
        )
