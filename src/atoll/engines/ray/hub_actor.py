"""The hub process, a Ray actor: the hub's state behind a lock, with a clock, the object store and the run's storage.

Ray serves each call in a thread of its own. A delta is in this machine's memory before its push waits for the lock, so the next
delta is received while this one is applied. Weights are published when a worker pulls them, once per version. Two threads keep
time: one closes grace windows and reports the load, one writes checkpoints.

When the hub's process dies, Ray starts another, which resumes from the newest checkpoint. An exception may leave the state
inconsistent: it ends the run, and no checkpoint is written after it.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.core import events as ev
from atoll.core.errors import AtollError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm
from atoll.engines.hub_encoding import decode_update
from atoll.engines.ray import bootstrap, messages as msg
from atoll.engines.ray.hub_checkpoints import CheckpointWriter, lock_folder, log_line, recover
from atoll.engines.ray.hub_state import HubState, StartBarrier

_LOAD_EVERY_S = 10.0
_MAX_PUBLISHED = 3  # versions whose references are kept; workers in older rounds have fetched theirs
_MAX_EVALUATIONS = 4  # outstanding: the driving process may evaluate more slowly than the run proceeds, and each holds weights
_EXTRA_CALLS = 16  # concurrent calls of the driving process


class WeightPublisher:
    """Puts weights into the object store, each version once. `put` stores an array and returns a reference."""

    def __init__(self, put: Callable[[msg.ByteArray], Any]) -> None:
        self._put = put
        self._published: list[tuple[Tree, Any]] = []
        self._lock = threading.Lock()

    def publish(self, tree: Tree | Tensor) -> Any:
        """The reference of these weights, or of a worker's encoded ones, which no other worker is sent."""
        if isinstance(tree, Tensor):
            return self._put(tree.cpu().numpy())
        with self._lock:
            found = next((reference for other, reference in self._published if other is tree), None)
            if found is None:
                found = self._put(msg.tree_bytes(tree))
                kept = [(other, reference) for other, reference in self._published if not other.deleted]
                self._published = [*kept[-_MAX_PUBLISHED:], (tree, found)]
            return found

    def forget(self, reference: Any) -> None:
        """The store has lost it: the next caller publishes these weights again."""
        with self._lock:
            self._published = [(tree, other) for tree, other in self._published if other != reference]


class LoadMeter:
    """Measures how busy the hub is, and how long pushes wait for its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self.reset()

    def reset(self) -> None:
        self._since_s = time.monotonic()
        self._pushes, self._applied_s, self._waited_s, self._most_waiting = 0, 0.0, 0.0, 0

    def arrived(self) -> float:
        """Counts a push as waiting, and returns its time of arrival."""
        with self._lock:
            self._waiting += 1
            self._most_waiting = max(self._most_waiting, self._waiting)
        return time.monotonic()

    def applied(self, arrived_s: float, lock_s: float) -> None:
        """Counts a push that arrived then, had the hub's lock from `lock_s` on, and is applied now."""
        now_s = time.monotonic()
        with self._lock:
            self._waiting -= 1
            self._pushes += 1
            self._applied_s += now_s - lock_s
            self._waited_s += lock_s - arrived_s

    def report(self, wall_time_s: float, snapshot_s: float = 0.0) -> ev.HubLoad:
        """The load since the last report. A snapshot holds the lock too, and counts as busy."""
        with self._lock:
            passed_s, pushes = time.monotonic() - self._since_s, self._pushes
            event = ev.HubLoad(
                seconds=passed_s,
                pushes=pushes,
                busy=(self._applied_s + snapshot_s) / passed_s if passed_s > 0 else 0.0,
                apply_s=self._applied_s / pushes if pushes else 0.0,
                waited_s=self._waited_s / pushes if pushes else 0.0,
                most_waiting=self._most_waiting,
                virtual_time_s=None,
                wall_time_s=wall_time_s,
            )
            self.reset()
        return event


class EvaluationQueue:
    """Weights that are to be evaluated: claimed under the hub's lock, published without it, then requests to the driving process.
    A caller of any method but `publish` holds the lock."""

    def __init__(self, state: HubState, publisher: WeightPublisher, changed: threading.Condition) -> None:
        self._state, self._publisher, self._changed = state, publisher, changed
        self._claims: deque[tuple[ev.Evaluated, Tree, Mapping[str, Any], Sequence[Tree]]] = deque()
        """Weights to publish, with their buffers, and trees whose memory is not reused before that."""
        self._requests: dict[int, msg.EvaluationRequest] = {}
        self._publishing = threading.Lock()
        self.newest = 0  # number of the newest request

    @property
    def outstanding(self) -> int:
        return len(self._claims) + len(self._requests)

    def claim(self) -> None:
        """Claims the present weights if an evaluation is due, unless 4 are outstanding. The last weights are always claimed."""
        due, self._state.evaluation_due = self._state.evaluation_due, None
        if due is not None and (self._state.done or self.outstanding < _MAX_EVALUATIONS):
            self._claims.append((due, self._state.params, msg.arrays_of(self._state.buffers), self._state.hub.pin_weights()))

    def publish(self) -> None:
        """Publishes the claimed weights in order, while the hub applies the next update."""
        with self._publishing:
            while self._claims:
                due, params, buffers, held = self._claims[0]  # it stays there, and so outstanding, until the request exists
                reference = self._publisher.publish(params)
                with self._changed:
                    self.newest += 1
                    self._requests[self.newest] = msg.EvaluationRequest(self.newest, due, (reference,), buffers)
                    self._claims.popleft()
                    self._state.hub.unpin_weights(held)
                    self._changed.notify_all()

    def after(self, seen: int) -> list[msg.EvaluationRequest]:
        """The open requests with numbers above `seen`."""
        return [request for number, request in self._requests.items() if number > seen]

    def evaluated(self, number: int, metrics: Mapping[str, float] | None) -> None:
        """Closes a request. Without metrics its weights were lost: present weights are claimed again, older ones left out."""
        request = self._requests.pop(number, None)
        if request is not None and metrics is not None:
            self._state.record_metrics(request.due, metrics)
        elif request is not None and request.due.round == self._state.accounting.totals.round:
            self._state.evaluation_due = request.due
            self.claim()


class HubProcess:
    """The hub process. `put` stores an array and returns a reference, by default in Ray's object store."""

    def __init__(self, spec: msg.HubProcessSpec, put: Callable[[msg.ByteArray], Any] | None = None) -> None:
        torch.set_num_threads(spec.run.cluster.threads_per_island)
        msg.ignore_read_only_warning()
        self._spec = spec
        lock_folder(spec.folder, partial(log_line, spec.folder))  # until this process ends
        log_line(spec.folder, f"hub on {platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        self._epoch = secrets.randbits(48)
        assert isinstance(spec.run.algorithm, AsyncAlgorithm)
        self._codec = spec.run.algorithm.plan.codec
        self._load, self._publisher = LoadMeter(), WeightPublisher(put or bootstrap.library().put)
        self._changed = threading.Condition()
        self._error: AtollError | None = None
        self._finished: ev.RunFinished | None = None
        recovered = recover(spec, self._epoch)
        self._state, self._outbox, self._clock, self._started = recovered
        self._barrier = StartBarrier(spec.engine.expected_workers(spec.run), starting=not self._state.slots)
        self._evaluations = EvaluationQueue(self._state, self._publisher, self._changed)
        self._checkpoints = CheckpointWriter(spec, recovered, self._changed)
        self._evaluations.claim()
        self._evaluations.publish()
        for loop in (self._timer_loop, self._checkpoint_loop):
            threading.Thread(target=self._guard, args=(loop,), daemon=True).start()

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Calls `action`. An exception ends the run: the driving process reads it from the status."""
        try:
            return action()
        except Exception as error:
            with self._changed:
                self._checkpoints.stop()  # the state may be inconsistent
                if not isinstance(error, AtollError):  # a foreign exception may not survive pickling
                    log_line(self._spec.folder, traceback.format_exc())
                    what = f"{type(error).__name__}: {error}. logs/hub.log has more"
                    error = ExchangeFailed(f"the hub failed: {what}. Saved checkpoints are valid. Resume the run.")
                self._error = self._error or error
                self._changed.notify_all()
            return None

    # --------------------------------------------------------------------------------------------------------------- workers

    def register(self, worker: int, incarnation: int, fingerprint: str, about: str) -> str:
        """Registers a worker. Returns why it is refused, or an empty string."""
        expected = str(self._spec.origin["data"])
        if fingerprint != expected:
            return (
                f"worker {worker} ({about}) reads other data than the run: fingerprint {fingerprint}, not "
                f"{expected}. Give every machine the same files, or `atoll data prepare` once and copy the folder."
            )
        with self._changed:
            log_line(self._spec.folder, f"worker {worker}, incarnation {incarnation}: {about}")
            slot = self._state.slots.get(worker)
            if slot is None or slot.incarnation < incarnation:  # an older worker learns from its next pull that it is replaced
                self._barrier.add(worker, incarnation, self._clock.now_s())
                self._guard(self._release_barrier)
        return ""

    def _release_barrier(self) -> None:
        """Gives waiting workers their slots, if the barrier lets them pass."""
        with self._changed:
            released = {} if self._state.done else self._barrier.release(self._clock.now_s())
            if not released:
                return
            if not self._started:
                self._clock.set(0.0)
                self._load.reset()
                self._started = True
                self._checkpoints.save_locked()  # from here on there is always a checkpoint
            self._state.join(released, self._clock.now_s())
            self._changed.notify_all()

    def set_live_workers(self, incarnations: Mapping[int, int]) -> None:
        """Removes workers that the driving process does not know. A hub that resumes from a checkpoint may have such."""
        with self._changed:
            dead = [worker for worker, slot in self._state.slots.items() if incarnations.get(worker) != slot.incarnation]
            self._guard(lambda: self._remove(dead))

    def worker_died(self, worker: int, incarnation: int) -> None:
        with self._changed:
            self._barrier.remove(worker, incarnation)
            slot = self._state.slots.get(worker)
            self._guard(lambda: self._remove([worker] if slot is not None and slot.incarnation == incarnation else []))

    def _remove(self, workers: list[int]) -> None:
        for worker in workers if not self._state.done else []:
            self._state.leave(worker, self._clock.now_s())
        self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------------- pull and push

    def pull(self, worker: int, incarnation: int, last: msg.RoundId | None, wait_s: float) -> msg.TaskMessage:
        """Waits up to `wait_s` seconds for a task of this worker."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                task, params = self._guard(lambda: self._task(worker, incarnation, last)) or (msg.TaskMessage("finished"), None)
                left_s = until_s - time.monotonic()
                if task.status != "wait" or left_s <= 0:
                    break
                self._changed.wait(left_s)
            if task.fresh_optimizer:
                self._changed.notify_all()
        if params is None:
            return task
        return task._replace(weights=(self._publisher.publish(params),), dtype=self._spec.dtype, now_s=self._clock.now_s())

    def _task(self, worker: int, incarnation: int, last: msg.RoundId | None) -> tuple[msg.TaskMessage, Tree | Tensor | None]:
        if self._error is not None:
            return msg.TaskMessage("finished"), None
        if self._barrier.has(worker, incarnation) and not self._state.done:
            return msg.TaskMessage("wait"), None
        return self._state.pull(worker, incarnation, last, self._clock.now_s())

    def round_started(self, worker: int, incarnation: int, round_id: msg.RoundId, begin_s: float) -> None:
        """A worker has the weights of its round."""
        with self._changed:
            begin_s = min(begin_s, self._clock.now_s())
            self._guard(lambda: self._state.round_started(worker, incarnation, round_id, begin_s))

    def push(self, update: msg.UpdateMessage, array: msg.ByteArray) -> msg.PushStatus:
        """Applies a worker's update; `array` has the bytes of its delta."""
        arrived_s = self._load.arrived()
        delta = self._delta(update, array)
        status: msg.PushStatus | None = None
        with self._changed:
            lock_s = time.monotonic()
            if self._error is None:
                status = self._guard(lambda: self._state.push(update, delta, self._clock.now_s()))
                self._error = self._error or self._state.fatal_error
                self._guard(self._evaluations.claim)
                self._changed.notify_all()
            self._load.applied(arrived_s, lock_s)
        self._guard(self._evaluations.publish)
        return status or "finished"

    def _delta(self, update: msg.UpdateMessage, array: msg.ByteArray) -> Tree | None:
        """The delta that a worker has pushed, decoded; None if it has another number of bytes."""
        if array.nbytes != self._state.hub.update_bytes(encoded=update.encoded):
            return None
        if update.encoded and self._codec is not None:
            delta = decode_update(self._codec, torch.from_numpy(array), self._spec.layout, getattr(torch, self._spec.dtype))
            return delta.donate()
        return msg.tree_view(array, self._spec.layout, self._spec.dtype)

    # ---------------------------------------------------------------------------------------- calls of the driving process

    def status(self, epoch: int, events_seen: int, evaluations_seen: int, wait_s: float) -> msg.HubStatus:
        """What has happened since the given status of the hub with this epoch. Waits up to `wait_s` seconds for something new."""
        with self._changed:
            if epoch != self._epoch:
                events_seen, evaluations_seen = 0, 0
            is_new = self._outbox.count > events_seen or self._evaluations.newest > evaluations_seen
            if not is_new and self._error is None:
                self._changed.wait(wait_s)
            events, events_seen = self._outbox.after(events_seen)
            return msg.HubStatus(
                epoch=self._epoch,
                events=events,
                events_seen=events_seen,
                evaluations=self._evaluations.after(evaluations_seen),
                local_updates=self._state.hub.scheduler.local_updates,
                workers={worker: (slot.incarnation, slot.step_s is not None) for worker, slot in self._state.slots.items()},
                overdue=self._state.overdue(self._clock.now_s()),
                done=self._state.done,
                evaluated=self._evaluations.outstanding == 0,
                error=self._error,
            )

    def evaluated(self, epoch: int, number: int, metrics: Mapping[str, float] | None) -> None:
        """Takes the metrics of a request of the hub with this epoch; None if the object store has lost its weights."""
        with self._changed:
            if epoch == self._epoch:  # each hub numbers its own requests
                self._guard(lambda: self._evaluations.evaluated(number, metrics))
        self._guard(self._evaluations.publish)

    def weights_lost(self, weights: tuple[Any, ...]) -> None:
        """The object store has lost published weights. The next pull publishes them again."""
        self._publisher.forget(weights[0])

    def ping(self) -> None:
        """Returns when the hub's lock is free."""
        with self._changed:
            pass

    def save(self) -> bool:
        """Writes a checkpoint now, if the state has changed. Returns whether the present state is saved."""
        return self._checkpoints.save()

    def finish(self) -> ev.RunFinished | None:
        """Saves, and closes the event log with the final figures. None if the run is not over: this hub has replaced another."""
        self._guard(self.save)
        with self._changed:
            if self._finished is None and self._state.done and self._evaluations.outstanding == 0:
                self._guard(self._close_log)
            return self._finished

    def _close_log(self) -> None:
        now_s = self._clock.now_s()
        self._report_load(now_s)
        finished = self._state.finish(now_s, self._spec.warm_start_tokens)
        self._outbox.log.position()
        self._outbox.log.close()
        self._finished = finished
        self._changed.notify_all()

    def result(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A reference to the weights in a tuple of one, and the buffers."""
        with self._changed:
            return (self._publisher.publish(self._state.params),), msg.arrays_of(self._state.buffers)

    # --------------------------------------------------------------------------------------------------------------- threads

    def _timer_loop(self) -> None:
        """Closes grace windows at their deadlines, reports the load, and releases the start barrier after its timeout."""
        load_s = _LOAD_EVERY_S
        while True:
            with self._changed:
                now_s = self._clock.now_s()
                self._changed.wait(max(0.0, min(self._state.deadline_s, load_s, now_s + _LOAD_EVERY_S) - now_s))
                if self._finished is not None or self._error is not None:
                    return
                now_s = self._clock.now_s()
                if now_s >= self._state.deadline_s:
                    self._state.tick(now_s)
                    self._changed.notify_all()
                if now_s >= load_s:
                    load_s = now_s + _LOAD_EVERY_S
                    if self._started and not self._state.done:
                        self._report_load(now_s)
            self._release_barrier()

    def _report_load(self, now_s: float) -> None:
        self._outbox.emit(self._load.report(now_s, self._checkpoints.snapshot_seconds()))

    def _checkpoint_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state.done or self._error is not None, self._spec.engine.save_every_s)
                if self._error is not None or self._finished is not None:
                    return
            self.save()
            if self._state.done:
                return


def start_hub(ray: Any, spec: msg.HubProcessSpec) -> Any:
    """Starts the hub on this machine, which has the run's folder. Ray restarts it whenever it dies."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(HubProcess).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # the client knows which calls it may repeat
        max_concurrency=2 * spec.engine.worker_slots(spec.run) + _EXTRA_CALLS,
        scheduling_strategy=here,
    )
    return actor.remote(spec)
