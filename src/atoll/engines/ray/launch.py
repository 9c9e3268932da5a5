"""Launching an asynchronous run on Ray.

This process drives: it has the run's folder, makes the warm start, shows progress and evaluates. The hub, an actor on the same
machine, writes the event log and the checkpoints. Workers need nothing but the same data.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from io import TextIOWrapper
from typing import Any

import torch

from atoll.core.errors import CheckpointError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.core.serialization import save_tree
from atoll.core.verified_files import open_to_append
from atoll.engines.checkpoints import Checkpoint
from atoll.engines.ray import bootstrap
from atoll.engines.ray.engine import RayEngine
from atoll.engines.ray.hub_checkpoints import INITIAL_WEIGHTS, lock_folder, rounds_after
from atoll.engines.ray.messages import HubProcessSpec, LostRounds, dtype_name, tree_bytes
from atoll.engines.ray.spec import Ray, gpus_per_worker
from atoll.engines.ray.worker import WorkerProcessSpec
from atoll.engines.run_lifecycle import Driver, Result, RunRequest, RunTask
from atoll.engines.user_code import LoopWorkload, workload_of_loop
from atoll.engines.warm_start_training import Prepared
from atoll.replica.evaluator import Evaluator
from atoll.runs.run_settings import Run, device_of
from atoll.runs.workloads import partitioned_by_weights
from atoll.telemetry.event_log import explained
from atoll.telemetry.sinks import Fanout

_PUBLISHED = 8
"""Versions of the weights that the object store holds besides a delta of each worker: the last published, and those to evaluate."""


def start(request: RunRequest) -> Result | None:
    fitted = request.spec.fitted(request.run) if request.run is not None and isinstance(request.spec, Ray) else None
    bootstrap.check_installed()  # libraries are of no use to a run that workers cannot carry out
    if fitted is not None and isinstance(request.spec, Ray):
        if request.spec.address is not None:
            bootstrap.check_reachable(request.spec.address)
            bootstrap.check_network(request.spec.address, trusted=request.spec.is_trusted)
        _gpus(fitted, request.spec)
    with request.open() as task:
        if isinstance(task.workload, LoopWorkload):  # the driver needs its model and its evaluation
            task = replace(task, workload=workload_of_loop(task.code, task.run.resolved))
        if task.finished:
            return task.reopen()
        assert isinstance(task.spec, Ray)
        _gpus(task.run, task.spec)
        task.log(task.spec.ignored_settings(task.run))
        if task.spec.is_trusted and bootstrap.is_beyond_loopback(task.spec.address):
            task.log(f"engine.network=trusted: {bootstrap.TRUSTED}")
        log = task.folder.path / "logs" / "ray.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # Ray prints about processes that die. The driver reports them in its own lines.
        with explained("write", log):
            file = open_to_append(log)
        with TextIOWrapper(file, encoding="utf-8") as printed, redirect_stdout(printed):
            return RayDriver(task, task.spec).carry_out()


def _gpus(run: Run, spec: Ray) -> float:
    """GPUs of each worker: one per device, or on this machine a fraction of one if there are fewer GPUs than workers."""
    if device_of(run.resolved) != "cuda":
        return 0.0
    here = spec.address is None
    return gpus_per_worker(spec.worker_slots(run), spec.devices, torch.cuda.device_count()) if here else float(spec.devices)


class RayDriver(Driver[RayEngine]):
    """Drives a run whose hub and workers are Ray actors. The hub restores and saves itself."""

    def __init__(self, task: RunTask, spec: Ray) -> None:
        super().__init__(task)
        self._spec = spec
        self._slots = spec.worker_slots(self.run)
        self._lost = LostRounds(0, 0)

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest, when no earlier hub writes the log and a checkpoint any more. Workers compute the rounds after it again."""
        os.close(lock_folder(self.folder.path, self.task.log, self._spec.hub_timeout_s))
        checkpoint = super().newest_checkpoint()
        self._lost = rounds_after(self.folder, checkpoint.metadata["events_bytes"] if checkpoint else 0)
        if checkpoint is None and self._lost.rounds:
            raise CheckpointError(
                f"{self.folder.path} has no checkpoint, but its log has {self._lost.rounds} rounds. A resume would begin again and "
                f"lose them. Restore {self.folder.checkpoints}, or start a new run in another folder."
            )
        return checkpoint

    @contextmanager
    def open_engine(self, prepared: Prepared, evaluator: Evaluator | None, sink: Sink) -> Iterator[RayEngine]:
        assert evaluator is not None
        assert self.event_log is not None
        assert isinstance(sink, Fanout)
        params = prepared.warm_start.params
        save_tree(self.folder.path / INITIAL_WEIGHTS, params)
        hub = self._hub_spec(prepared, self.event_log.position())
        self.event_log.close()  # from now on the hub writes it
        receivers = [receiver for receiver in sink.sinks if receiver is not self.event_log]
        # Faults are reverted before the stack closes the engine, which asks the hub to save.
        with self._cluster(params) as ray, ExitStack() as stack, self.task.injecting() as faults:
            shown = Fanout([*receivers, *([] if faults is None else [faults])])
            worker = self._worker_spec(ray, params)
            watch = bootstrap.ClusterHead(ray, self.task.log).check
            engine = RayEngine(ray=ray, hub=hub, worker=worker, evaluate=evaluator, sink=shown, log=self.task.log, watch=watch)
            stack.push(lambda kind, error, trace: engine.close(save=kind is not None))
            yield engine

    def _cluster(self, params: Tree) -> AbstractContextManager[Any]:
        if self._spec.address is not None:
            return bootstrap.cluster(self._spec.address, trusted=self._spec.is_trusted)
        store_bytes = (_PUBLISHED + self._slots) * params.nbytes
        gpus = torch.cuda.device_count() if device_of(self.run) == "cuda" else 0
        trusted, folder = self._spec.is_trusted, self.folder.path
        return bootstrap.own_ray(cpus=self._slots + 2, gpus=gpus, store_bytes=store_bytes, folder=folder, trusted=trusted)

    def _worker_spec(self, ray: Any, params: Tree) -> WorkerProcessSpec:
        run, spec, code = self.run, self._spec, self.task.code
        workload = None if code else self.task.workload
        weights = (ray.put(tree_bytes(params)),) if self.task.workload is None and partitioned_by_weights(run) else ()
        logs = (self.folder.path / "logs").absolute()
        gpus = _gpus(run, spec)
        return WorkerProcessSpec(run=run, engine=spec, gpus=gpus, workload=workload, code=code, weights=weights, logs=logs)

    def _hub_spec(self, prepared: Prepared, begin_bytes: int) -> HubProcessSpec:
        batches, params = prepared.workload.batches, prepared.warm_start.params
        return HubProcessSpec(
            run=self.run,
            engine=self._spec,
            examples=tuple(batches.examples(shard) for shard in range(batches.num_shards)),
            layout=params.layout,
            dtype=dtype_name(params),
            begin_bytes=begin_bytes,
            lost=self._lost,
            session=secrets.token_hex(8),
            folder=self.folder.path.absolute(),
            origin=prepared.origin,
            warm_start_tokens=prepared.warm_start.tokens,
        )
