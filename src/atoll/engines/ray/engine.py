"""The driving process of a run on Ray: it starts the hub and the workers, replaces dead workers, shows events, and evaluates.

The hub, on the same machine, does the accounting and writes the event log. Evaluation runs here, so that it does not delay the hub,
and in a thread of its own, so that dead workers are replaced meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from atoll.core.errors import AtollError, ExchangeFailed
from atoll.core.events import Progress, RoundFinished, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.accounting import diverged_hub
from atoll.engines.ray.hub_actor import start_hub
from atoll.engines.ray.hub_client import HubClient, last_line
from atoll.engines.ray.messages import EvaluationRequest, HubProcessSpec, HubStatus, tensors_of, tree_copy
from atoll.engines.ray.worker import WorkerProcessSpec, start_worker

_STATUS_WAIT_S = 0.5
_LAST_SAVE_S = 30.0
_MAX_RESTARTS = 5  # of the hub in a row, without a newer checkpoint
_MAX_DEATHS = 5  # of one slot in a row, without an accepted update
_LOG_EVERY_S = 15.0


@dataclass
class PooledWorker:
    """A started worker. `ended`: it has ended by itself, since the hub told it that the run is over."""

    spec: WorkerProcessSpec
    actor: Any
    result: Any
    started_s: float
    ended: bool = False


class WorkerPool:
    """Starts the workers of a run, replaces dead ones, and logs dead, missing and slow ones. Workers beyond the expected number
    start when the cluster has room for them."""

    def __init__(self, ray: Any, client: HubClient, spec: WorkerProcessSpec, log: Callable[[str], object]) -> None:
        self._ray, self._client, self._spec, self._log = ray, client, spec, log
        self._started = 0
        self._deaths: dict[int, int] = {}
        """Of each slot since its last accepted update."""
        self._logged_missing_s = self._logged_overdue_s = time.monotonic()
        self.workers = {worker: self._start(worker) for worker in range(spec.engine.worker_slots(spec.run))}

    @property
    def incarnations(self) -> dict[int, int]:
        return {number: worker.spec.incarnation for number, worker in self.workers.items()}

    def _start(self, number: int) -> PooledWorker:
        """Ray starts the process as soon as it finds room."""
        spec, self._started = replace(self._spec, worker=number, incarnation=self._started), self._started + 1
        return PooledWorker(spec, *start_worker(self._ray, spec, self._client.hub), time.monotonic())

    def supervise(self, status: HubStatus) -> None:
        """Replaces dead workers and tells the hub of them. Logs missing and overdue workers every 15 s. Raises the AtollError of a
        worker whose replacement would end with it, too."""
        for number, (incarnation, was_accepted) in status.workers.items():
            if was_accepted and incarnation == self.workers[number].spec.incarnation:
                self._deaths.pop(number, None)
        ready, _ = self._ray.wait([worker.result for worker in self.workers.values()], num_returns=len(self.workers), timeout=0)
        for worker in [worker for worker in self.workers.values() if worker.result in ready]:
            cause = self._cause_of_death(worker)
            if cause is None and not worker.ended:
                worker.ended = True  # if the run is over, the next status says so
            else:
                self._replace(worker, cause or "it ended by itself")
        self._log_missing(status)
        self._log_overdue(status)

    def _replace(self, dead: PooledWorker, cause: str) -> None:
        number = dead.spec.worker
        self._client.call("worker_died", number, dead.spec.incarnation)
        deaths = self._deaths[number] = self._deaths.get(number, 0) + 1
        if deaths >= _MAX_DEATHS:
            raise ExchangeFailed(
                f"worker {number} has died {deaths} times in a row without an accepted update: {cause}. Saved checkpoints are "
                f"valid. Look at {dead.spec.log}, or at Ray's logs on a machine without that folder; fix the cause, and resume."
            )
        self._log(f"worker {number} has died ({cause}); a new one takes its slot")
        self._ray.kill(dead.actor)
        self.workers[number] = self._start(number)

    def _cause_of_death(self, worker: PooledWorker) -> str | None:
        """Why an ended worker died; None if it ended by itself. Raises an AtollError that is not about the hub: a new worker would
        end with it, too."""
        try:
            self._ray.get(worker.result)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            if isinstance(cause, AtollError) and not isinstance(cause, ExchangeFailed):
                raise cause from None
            return last_line(str(cause)) or "an error without a message"
        except self._ray.exceptions.RayError as error:
            return str(error).partition("\n")[0].rstrip(".")  # ids of Ray's follow
        return None

    def _log_missing(self, status: HubStatus) -> None:
        now_s, registered = time.monotonic(), {number: incarnation for number, (incarnation, _) in status.workers.items()}
        expected = self._spec.engine.expected_workers(self._spec.run)
        late = [n for n, worker in self.workers.items() if n < expected and now_s - worker.started_s > _LOG_EVERY_S]
        missing = [number for number in late if registered.get(number) != self.workers[number].spec.incarnation]
        if missing and now_s - self._logged_missing_s > _LOG_EVERY_S:
            self._logged_missing_s = now_s
            free = {name: amount for name, amount in self._ray.available_resources().items() if name in ("CPU", "GPU")}
            needs = f"{self._spec.cpus:g} CPU and {self._spec.gpus:g} GPU"
            self._log(f"workers {missing} have not registered yet: each needs {needs}, free are {free}")

    def _log_overdue(self, status: HubStatus) -> None:
        """The hub waits for no overdue worker, but if all are overdue, the run stands still."""
        now_s = time.monotonic()
        if status.overdue and now_s - self._logged_overdue_s > _LOG_EVERY_S:
            self._logged_overdue_s = now_s
            since = ", ".join(f"{number} for {seconds:.0f} s" for number, seconds in sorted(status.overdue.items()))
            self._log(
                f"workers are alive, but in their rounds much longer than before: {since}. See their logs; a killed one is replaced"
            )

    def kill(self) -> None:
        for worker in self.workers.values():
            self._ray.kill(worker.actor)


class RayEngine:
    """Runs one asynchronous algorithm on Ray. `evaluate` computes the metrics of weights and buffers. Events go to `sink`, lines on
    dead and hanging processes to `log`. `watch` is called about once a second, and raises if the run cannot go on."""

    def __init__(
        self,
        *,
        ray: Any,
        hub: HubProcessSpec,
        worker: WorkerProcessSpec,
        evaluate: Callable[[Tree, Mapping[str, Tensor]], Mapping[str, float]],
        sink: Sink,
        log: Callable[[str], object],
        watch: Callable[[], object] | None = None,
    ) -> None:
        self._ray, self._spec, self._worker = ray, hub, worker
        self._evaluate, self._sink, self._log = evaluate, sink, log
        self._hub = start_hub(ray, hub)
        self._client = HubClient(ray, self._hub, timeout_s=hub.engine.hub_timeout_s, log=log, watch=watch)
        self._pool: WorkerPool | None = None
        self.steps, self.steps_taken, self.round = hub.run.train.steps, 0, 0
        self.params: Tree  # of the hub, with the next two, when the run is over
        self._buffers: dict[str, Tensor]
        self._finished: RunFinished
        self._epoch, self._events_seen, self._evaluations_seen = -1, 0, 0
        self._restarts, self._saved_updates = 0, 0
        """Of the hub since its last newer checkpoint, and the local updates in that."""
        self._requests: deque[EvaluationRequest] = deque()
        self._evaluation: tuple[int, int, Future[Mapping[str, float]]] | None = None
        """Epoch and number of the request that is being evaluated, and its metrics."""

    def train(self) -> Iterator[None]:
        """Runs to the end. The hub saves checkpoints by itself, so none is ever due here."""
        yield from ()
        self._pool = WorkerPool(self._ray, self._client, self._worker, self._log)
        while True:
            while not self._step(self._pool):
                pass
            epoch, finished = self._epoch, self._client.call("finish")
            weights, buffers = self._client.call("result")
            array = self._client.fetch(weights)
            self._show(self._status(0.0))
            # Else that hub died, and the next resumes from its checkpoint; or its weights were lost, and it publishes them again.
            if finished is not None and array is not None and self._epoch == epoch:
                self.params = tree_copy(array, self._spec.layout, self._spec.dtype, "cpu")
                self._finished, self._buffers = finished, tensors_of(buffers)
                return

    def finish(self, warm_start_tokens: int) -> RunFinished:
        """The final figures, which the hub has logged."""
        return self._finished

    def buffers(self) -> dict[str, Tensor]:
        return self._buffers

    def _step(self, pool: WorkerPool) -> bool:
        """Reads the hub's status and reacts to it. Returns whether the run is over."""
        before, status = self._epoch, self._status(self._client.wait_s(_STATUS_WAIT_S))
        if status.epoch != before and before != -1:
            self._count_restart(status)
            self._client.call("set_live_workers", pool.incarnations)  # its checkpoint may name workers that have died since
        self._show(status)
        if status.error is not None:
            raise status.error
        self._run_evaluations()
        if not status.done:
            pool.supervise(status)
        elif self._evaluation is not None:
            wait([self._evaluation[2]], timeout=_STATUS_WAIT_S)
        return status.done and status.evaluated

    def _status(self, wait_s: float) -> HubStatus:
        status: HubStatus = self._client.call("status", self._epoch, self._events_seen, self._evaluations_seen, wait_s)
        if status.epoch != self._epoch:
            self._epoch, self._evaluations_seen = status.epoch, 0
            self._requests.clear()
        self._events_seen = status.events_seen
        for request in status.evaluations:
            self._requests.append(request)
            self._evaluations_seen = request.number
        return status

    def _count_restart(self, status: HubStatus) -> None:
        """An update that kills a hub may kill the next hub, too."""
        self._restarts = 0 if status.local_updates > self._saved_updates else self._restarts + 1
        self._saved_updates = status.local_updates
        if self._restarts >= _MAX_RESTARTS:
            raise ExchangeFailed(
                f"the hub has died {self._restarts} times in a row without a newer checkpoint: it resumes from "
                f"{status.local_updates} local updates each time. Saved checkpoints are valid. Look at logs/hub.log, and at the "
                f"free memory; save more often (engine.save_every_s), and resume."
            )

    def _show(self, status: HubStatus) -> None:
        for event in status.events:
            self._sink.emit(event)
            self.round = event.round if isinstance(event, RoundFinished) else self.round
        self.steps_taken = min(status.local_updates // self._spec.run.effective_cluster.islands, self.steps)
        self._sink.emit(Progress(phase="training", done=self.steps_taken, total=self.steps))

    def _run_evaluations(self) -> None:
        """Sends finished metrics to the hub, and starts the next evaluation. Only this thread calls Ray."""
        if self._evaluation is not None and self._evaluation[2].done():
            epoch, number, metrics = self._evaluation
            self._evaluation = None
            self._client.call("evaluated", epoch, number, dict(metrics.result()))
        if self._evaluation is None and self._requests:
            request = self._requests.popleft()
            array = self._client.fetch(request.weights)
            if array is None:
                self._client.call("evaluated", self._epoch, request.number, None)
            else:
                params = tree_copy(array, self._spec.layout, self._spec.dtype, "cpu")
                self._evaluation = self._epoch, request.number, _in_thread(lambda: self._metrics(request, params))

    def _metrics(self, request: EvaluationRequest, params: Tree) -> Mapping[str, float]:
        if not params.is_finite():
            raise diverged_hub(request.due.round)
        metrics = self._evaluate(params, tensors_of(dict(request.buffers)))
        params.release()
        return metrics

    def close(self, *, save: bool) -> None:
        """Kills the workers and the hub; with `save` the hub writes a checkpoint first."""
        if self._pool is not None:
            self._pool.kill()
        if save:
            try:
                saved = self._ray.get(self._hub.save.remote(), timeout=_LAST_SAVE_S)
                why = "" if saved else "it could not; logs/hub.log says why"
            except Exception as error:  # the run ends for another reason, and an older checkpoint is valid
                why = f"{type(error).__name__} after up to {_LAST_SAVE_S:g} s"
            if why:
                self._log(f"the hub did not save before it ended: {why}. The last checkpoint is valid; later rounds are lost.")
        self._ray.kill(self._hub)


def _in_thread(compute: Callable[[], Mapping[str, float]]) -> Future[Mapping[str, float]]:
    """The result of `compute` in a daemon thread. A ThreadPoolExecutor would delay the end of the process."""
    future: Future[Mapping[str, float]] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
