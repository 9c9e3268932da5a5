"""The worker process, a Ray actor: it pulls, trains and pushes until the run has its local updates.

Its state is a module and an inner optimizer; with a codec also the weights of its last round, and what the codec left out of its
updates. It waits for a hub that dies. It drops a round that a restarted hub has no record of, and resets its optimizer if the hub
says so.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Task, Workload
from atoll.engines.accounting import ComputeSpan
from atoll.engines.hub_encoding import decode_weights, encode_update
from atoll.engines.liveness import append_log_line, write_log_line
from atoll.engines.ray import bootstrap, messages as msg
from atoll.engines.ray.hub_client import HubClient
from atoll.engines.ray.spec import Ray, further_devices
from atoll.engines.round_record import WallClock
from atoll.engines.timed_replica import ProcessReplica, run_worker_round
from atoll.engines.training_setup import loss_of, matrix_products, replica_of
from atoll.engines.user_code import LoopMember, LoopWorkload, load_user_code
from atoll.engines.warm_start_training import RunPreparation
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import LocalReplica
from atoll.runs.run_settings import Run, device_of
from atoll.runs.workloads import data_fingerprint

_PULL_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WorkerProcessSpec:
    """What a worker process is made of: what all workers of a run share, and its slot and incarnation."""

    run: Run  # resolved
    engine: Ray
    gpus: float
    workload: Workload | None  # trained instead of the Run's model and data
    code: str = ""  # by which the worker loads the user's workload or loop; then `workload` is None
    weights: tuple[Any, ...]  # a reference to the bytes of the warm start, if the data are partitioned by it
    logs: Path
    worker: int = 0
    incarnation: int = 0  # higher than that of each worker that had the slot before

    @property
    def log(self) -> Path:
        return self.logs / f"worker-{self.worker}.log"

    @property
    def cpus(self) -> float:
        """A local Ray has one for each worker. On a cluster a worker requests as many as it has threads."""
        return 1.0 if self.engine.address is None else float(self.run.cluster.threads_per_island * self.engine.devices)


class WorkerProcess:
    """The worker process. `hub` is the handle of the hub's actor."""

    def __init__(self, spec: WorkerProcessSpec, hub: Any) -> None:
        run, threads = spec.run, spec.run.cluster.threads_per_island
        torch.set_num_threads(threads)
        msg.ignore_read_only_warning()
        self._spec, self._run, self._ray = spec, run, bootstrap.library()
        self._client = HubClient(self._ray, hub, timeout_s=spec.engine.hub_timeout_s, log=self._log)
        self._about = f"process {os.getpid()} on {platform.node()}, {threads} thread(s)"
        self._log(f"incarnation {spec.incarnation}: {self._about}")
        self._clock = WallClock()
        self._pause_s = spec.engine.delay_s(run, spec.worker)
        self._workload: Workload
        self._loss: Loss
        self._replica: LocalReplica
        self._last: msg.RoundId | None = None
        self.rounds = 0
        assert isinstance(run.algorithm, AsyncAlgorithm)
        self._algorithm: AsyncAlgorithm[Any] = run.algorithm
        self._held: Tree | None = None
        """With a codec, the weights of the last round, in CPU memory: the hub's decoder is there."""
        self._unsent: Tree | None = None

    def _log(self, text: str) -> None:
        """Appends a line to the worker's log in the run's folder, or to Ray's logs on a machine without that folder."""
        line = f"worker {self._spec.worker}: {text}"
        if not self._spec.log.parent.is_dir():
            write_log_line(sys.stdout, line)
            return
        append_log_line(self._spec.log, line)

    def work(self) -> int:
        """Works until the run is over. Returns the number of its rounds."""
        try:
            with matrix_products(self._run):
                own = load_user_code(self._spec.code) if self._spec.code else None
                if own is None or own.loop is None:
                    self._workload = self._load_workload(None if own is None else own.open())
                    return self.run()
                member = LoopMember(self._run, self._enter, f"worker {self._spec.worker}", device_of(self._run))
                own.loop(member)
                member.check_entered()
                return self.rounds
        except Exception:
            self._log(traceback.format_exc())
            raise

    def _enter(self, workload: LoopWorkload) -> WorkerProcess:
        self._workload = workload
        return self

    @property
    def final_params(self) -> None:
        """The hub has them."""

    def run(self) -> int:
        """Works until the run is over. Returns the number of its rounds."""
        spec = self._spec
        self._loss = loss_of(self._run, self._workload)
        self._new_replica()
        self._register()
        while True:
            wait_s = self._client.wait_s(_PULL_WAIT_S)
            task: msg.TaskMessage = self._client.call("pull", spec.worker, spec.incarnation, self._last, wait_s)
            match task.status:
                case "finished" | "replaced":
                    self._log(f"ends after {self.rounds} rounds: {task.status}")
                    return self.rounds
                case "register":
                    self._register()
                case "train":
                    if task.fresh_optimizer:
                        self._reset("the hub has no record of its last round")
                    self.rounds += self._round(task)
                case "wait":
                    pass

    def _load_workload(self, own: Workload | None) -> Workload:
        preparation = RunPreparation(self._run, own or self._spec.workload)
        if not self._spec.weights:  # the partition does not depend on weights
            return preparation.sharded(Tree.of({}))
        like, array = preparation.initial_weights(), self._ray.get(self._spec.weights[0])
        return preparation.sharded(msg.tree_view(array, like.layout, msg.dtype_name(like)).copy())

    def _new_replica(self) -> None:
        """Starts again with a fresh optimizer and an empty error buffer."""
        if isinstance(self._workload, LoopWorkload):
            self._replica = self._workload.make_replica()
        else:
            devices = further_devices(device_of(self._run), self._spec.engine.devices)
            self._replica = replica_of(self._run, self._workload, self._loss, self._spec.worker, more_devices=devices)
        self._unsent = None

    def _register(self) -> None:
        if self._last is not None:
            self._reset("the hub does not know this worker")
        fingerprint = str(data_fingerprint(self._workload))
        reason = self._client.call("register", self._spec.worker, self._spec.incarnation, fingerprint, self._about)
        if reason:
            raise ConfigError(reason)

    def _reset(self, why: str) -> None:
        """Continues with a fresh inner optimizer."""
        self._new_replica()
        self._last = None
        self._log(f"resets its optimizer: {why}")

    def _round(self, task: msg.TaskMessage) -> int:
        """Trains one round and pushes the delta. Returns the number of rounds: 0 if the weights were lost."""
        self._clock.set(task.now_s)
        array = self._client.fetch(task.weights)
        if array is None:
            return 0
        assert task.work is not None
        params = self._weights(task, array)
        del array  # frees its room in the object store
        begin_s, computed = self._clock.now_s(), list[ComputeSpan]()
        self._client.hub.round_started.remote(self._spec.worker, self._spec.incarnation, task.round_id, begin_s)
        replica = ProcessReplica(
            self._replica,
            clock=self._clock,
            on_computed=computed.append,
            pause_s=self._pause_s,
            allow_nonfinite=True,  # the hub refuses an unusable update, and dispatches the round again
        )
        delta = run_worker_round(self._algorithm, replica, Task(params, task.steps, task.work))
        self._push(task.round_id, begin_s, computed, delta)
        if not (params.deleted or params.borrowed):
            params.release()
        return 1

    def _weights(self, task: msg.TaskMessage, array: msg.ByteArray) -> Tree:
        """The weights of a round, on the replica's device."""
        codec, layout, device = self._algorithm.plan.codec, self._replica.weights.layout, self._replica.device
        if codec is None:
            return msg.tree_copy(array, layout, task.dtype, device)
        if not task.encoded:
            self._held = msg.tree_copy(array, layout, task.dtype, "cpu")
        else:
            assert self._held is not None, "the hub encodes for workers that have the weights of their last round"
            self._held = decode_weights(codec, self._held, torch.from_numpy(array))
        return self._held.borrow().to(device)

    def _push(self, round_id: msg.RoundId, begin_s: float, computed: Sequence[ComputeSpan], delta: Tree) -> None:
        spec, pushed_s, buffers = self._spec, self._clock.now_s(), msg.arrays_of(self._replica.buffers())
        sent = encode_update(self._algorithm.plan, delta, self._unsent, round_id[0])
        self._unsent, encoded = sent.unsent, sent.data is not None
        update = msg.UpdateMessage(spec.worker, spec.incarnation, round_id, begin_s, pushed_s, tuple(computed), buffers, encoded)
        array = msg.tree_bytes(sent.delta) if sent.data is None else sent.data.cpu().numpy()
        reference = self._ray.put(array)  # once, also for a repeated push
        if sent.delta.donated:
            sent.delta.release()
        status: msg.PushStatus = self._client.call("push", update, reference)
        self._last = round_id
        if status == "refused":  # the optimizer's moments are as unusable as the update
            self._new_replica()
        if status not in ("accepted", "finished"):
            self._log(f"round {round_id[0]}: {status}")


def start_worker(ray: Any, spec: WorkerProcessSpec, hub: Any) -> tuple[Any, Any]:
    """Starts a worker on a machine with room. Returns its handle and a reference to the result of its work."""
    actor = ray.remote(WorkerProcess).options(num_cpus=spec.cpus, num_gpus=spec.gpus, max_restarts=0, max_task_retries=0)
    worker = actor.remote(spec, hub)
    return worker, worker.work.remote()
