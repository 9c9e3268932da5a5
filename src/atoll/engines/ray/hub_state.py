"""The hub's state machine: algorithm state, dispatched rounds, worker slots and accounting. It knows neither Ray nor a clock: its
caller passes the time. docs/ray.md describes slots, incarnations, and how the hub accepts every round once.

A worker names its last round when it pulls. If a resumed hub has another record of it, the worker's inner optimizer has seen data
that the hub counts as unread, so the worker joins again with a fresh one. The moments of a worker thus come from rounds in the log
only, and the log can be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Dispatch, WorkerSpeeds
from atoll.core.errors import TrainingDiverged
from atoll.core.events import Evaluated, IslandJoined, IslandLeft, Refused, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Sink
from atoll.engines.accounting import MAX_REFUSALS, Ledger, RunAccounting
from atoll.engines.async_hub import Applied, AsyncHub, Outcome, Push, Refusal
from atoll.engines.ray.messages import PushStatus, Rejection, RoundId, TaskMessage, UpdateMessage, tensors_of
from atoll.engines.ray.spec import Ray
from atoll.engines.training_setup import passed_multiple
from atoll.runs.cluster import CONTROL_BYTES, draw
from atoll.runs.run_settings import Run

_OVERDUE_FACTOR, _OVERDUE_S, _FIRST_OVERDUE_S = 10.0, 30.0, 300.0
"""A worker is overdue after this multiple of its last round's time, at least `_OVERDUE_S`; in its first round after the third."""
_START_TIMEOUT_S = 60.0


@dataclass
class WorkerSlot:
    """The worker process that holds a slot."""

    incarnation: int
    counted_s: float  # its presence is in the ledger up to this time
    last: RoundId | None = None  # that was accepted or refused
    verdict: Literal["accepted", "refused"] = "accepted"  # on the last round
    refusals: int = 0  # in a row
    # Of its last round, None before its first. They are not saved.
    step_s: float | None = None  # per step, from dispatch to arrival
    compute_step_s: float | None = None  # of computing per step


class StartBarrier:
    """Registered workers that have no slot yet. At the start of a run they wait for the expected number, at most 60 s."""

    def __init__(self, workers: int, *, starting: bool) -> None:
        self._workers, self._starting = workers, starting
        self._waiting: dict[int, int] = {}
        self._since_s = math.inf

    def add(self, worker: int, incarnation: int, now_s: float) -> None:
        self._waiting[worker] = max(incarnation, self._waiting.get(worker, -1))
        self._since_s = min(self._since_s, now_s)

    def has(self, worker: int, incarnation: int) -> bool:
        return self._waiting.get(worker) == incarnation

    def remove(self, worker: int, incarnation: int) -> None:
        if self.has(worker, incarnation):
            del self._waiting[worker]

    def release(self, now_s: float) -> dict[int, int]:
        """The incarnations of the workers that may take their slots now."""
        timed_out = now_s - self._since_s > _START_TIMEOUT_S
        if not self._waiting or (self._starting and len(self._waiting) < self._workers and not timed_out):
            return {}
        released, self._waiting, self._since_s, self._starting = self._waiting, {}, math.inf, False
        return released


class HubState:
    """The state machine of one run, which is resolved. It takes over `params`, the initial weights; `examples` are those of each
    shard, and `epoch` identifies this hub process."""

    def __init__(self, run: Run, engine: Ray, params: Tree, examples: Sequence[int], *, epoch: int, sink: Sink) -> None:
        assert isinstance(run.algorithm, AsyncAlgorithm)
        islands = run.effective_cluster.islands
        self._epoch, self._emit, self._devices = epoch, sink.emit, engine.devices
        self._evaluate_every = run.keep.evaluate_every * islands  # in local updates; the last weights are always evaluated
        updates = run.train.steps * islands
        self.hub = AsyncHub(
            run.algorithm, params, examples=examples, updates=updates, draw=lambda round: draw(run.seed, "shard", round)
        )
        plan, self._speeds = engine.plan(run)
        self.hub.scheduler.plan, self.hub.scheduler.speeds = plan, WorkerSpeeds(plan)
        self.slots: dict[int, WorkerSlot] = {}
        self.buffers: dict[str, Tensor] = {}
        self.evaluation_due: Evaluated | None = None
        """The due evaluation of the present weights, without its metrics."""
        self.fatal_error: TrainingDiverged | None = None
        """Ends the run. The state is consistent up to here."""
        self.accounting = RunAccounting(islands, real=True)
        self._max_workers = max(islands, engine.worker_slots(run))
        self._add_ledgers()
        self._round_epochs: dict[int, int] = {}
        """For each open round, the epoch of the hub that dispatched it."""
        self._logged: set[int] = set()
        """Open rounds whose dispatch is in the log: logged when the worker has the weights, at the latest when the round ends."""

    def _add_ledgers(self) -> None:
        self.accounting.ledgers += [Ledger() for _ in range(self._max_workers - len(self.accounting.ledgers))]

    @property
    def done(self) -> bool:
        return self.hub.done

    @property
    def params(self) -> Tree:
        return self.hub.params

    # ------------------------------------------------------------------------------------------------------ workers and time

    def join(self, incarnations: Mapping[int, int], now_s: float) -> None:
        """Workers take their slots together. The previous holders of these slots leave."""
        for worker in [worker for worker in incarnations if worker in self.slots]:
            self.leave(worker, now_s)
        starting = self.hub.scheduler.rounds == 0
        for worker, incarnation in incarnations.items():
            self.slots[worker] = WorkerSlot(incarnation, now_s)
            if not starting:
                number = self.accounting.totals.round
                joined = IslandJoined(island=worker, round=number, donor=None, sent_bytes=0, virtual_time_s=None, wall_time_s=now_s)
                self._emit(joined)
        given = self._speeds
        speeds = {worker: given[worker % len(given)] if given else None for worker in incarnations}
        self._process(self.hub.join_all(speeds, now_s))

    def leave(self, worker: int, now_s: float) -> None:
        """A worker is gone; the scheduler dispatches its round again."""
        self._count_presence(worker, self.slots.pop(worker), now_s)
        out = self.hub.scheduler.workers[worker].dispatch
        if out is not None:
            self._log_dispatch(out, out.time_s)
        self._emit(IslandLeft(island=worker, round=self.accounting.totals.round, virtual_time_s=None, wall_time_s=now_s))
        self._process(self.hub.leave(worker, now_s, self._next_arrival_s(now_s)))

    def _rejection(self, worker: int, incarnation: int) -> Rejection | None:
        """Why a worker's call is not served; None if the worker holds its slot."""
        if self.done:
            return "finished"
        slot = self.slots.get(worker)
        if slot is None or slot.incarnation < incarnation:
            return "register"
        return "replaced" if slot.incarnation > incarnation else None

    def pull(self, worker: int, incarnation: int, last: RoundId | None, now_s: float) -> tuple[TaskMessage, Tree | Tensor | None]:
        """The reply to a worker whose own last round is `last`, without its weights; and the weights, or their encoded form. Only a
        worker with the weights of its last round, which the hub knows, is sent the latter."""
        rejection = self._rejection(worker, incarnation)
        if rejection is not None:
            return TaskMessage(rejection), None
        fresh = self.slots[worker].last != last
        if fresh:
            self.join({worker: incarnation}, now_s)
        out = self.hub.scheduler.workers[worker].dispatch
        if out is None:
            return TaskMessage("wait"), None
        task, encoded = self.hub.task(out), self.hub.encoded.get(worker)
        message = TaskMessage(
            "train", self.round_id(out), task.steps, task.work, encoded=encoded is not None, fresh_optimizer=fresh
        )
        return message, task.params if encoded is None else encoded

    def tick(self, now_s: float) -> None:
        self._process(self.hub.tick(now_s, self._next_arrival_s(now_s)))

    @property
    def deadline_s(self) -> float:
        """When the open grace window closes."""
        deadline_s = None if self.done else self.hub.scheduler.deadline_s
        return math.inf if deadline_s is None else deadline_s

    def _count_presence(self, worker: int, slot: WorkerSlot, now_s: float) -> None:
        self.accounting.ledgers[worker].present_s += now_s - slot.counted_s
        slot.counted_s = now_s

    def _next_arrival_s(self, now_s: float, but: int | None = None) -> float | None:
        """When the next dispatched worker will arrive, from the time of each worker's last round. None if a worker has no last
        round, or is late: it may arrive at any moment."""
        arrivals = []
        for number, out in self._open_rounds():
            if number != but:
                step_s = self.slots[number].step_s if number in self.slots else None
                if step_s is None or out.time_s + step_s * out.steps < now_s:
                    return None
                arrivals.append(out.time_s + step_s * out.steps)
        return min(arrivals, default=None)

    def overdue(self, now_s: float) -> dict[int, float]:
        """Seconds since dispatch of each worker that should have arrived long ago."""
        found = {}
        for number, out in self._open_rounds():
            if number in self.slots:
                step_s = self.slots[number].step_s
                limit_s = _FIRST_OVERDUE_S if step_s is None else max(_OVERDUE_S, _OVERDUE_FACTOR * step_s * out.steps)
                if now_s - out.time_s > limit_s:
                    found[number] = now_s - out.time_s
        return found

    def _open_rounds(self) -> list[tuple[int, Dispatch]]:
        """The workers that have a round, and their rounds."""
        workers = self.hub.scheduler.workers
        return [(number, worker.dispatch) for number, worker in workers.items() if worker.dispatch is not None]

    def round_id(self, dispatch: Dispatch) -> RoundId:
        return dispatch.round, self._round_epochs[dispatch.round]

    def _open_round(self, worker: int, round_id: RoundId) -> Dispatch | None:
        out = self.hub.scheduler.open_dispatch(worker, round_id[0])
        return out if out is not None and self.round_id(out) == round_id else None

    def round_started(self, worker: int, incarnation: int, round_id: RoundId, begin_s: float) -> None:
        """A worker has the weights of its round."""
        out = self._open_round(worker, round_id) if self._rejection(worker, incarnation) is None else None
        if out is not None:
            self._log_dispatch(out, begin_s)

    def _log_dispatch(self, dispatch: Dispatch, begin_s: float) -> None:
        """Logs the dispatch of an open round, once."""
        if dispatch.round not in self._logged:
            self._logged.add(dispatch.round)
            begin_s, sent_bytes = max(begin_s, dispatch.time_s), self.hub.task_bytes(dispatch.worker)
            self._emit(self.accounting.dispatched(dispatch, begin_s, sent_bytes, devices=self._devices))

    def _end_round(self, dispatch: Dispatch) -> None:
        self._logged.discard(dispatch.round)
        del self._round_epochs[dispatch.round]

    def push(self, update: UpdateMessage, delta: Tree | None, now_s: float) -> PushStatus:
        """A worker's update has arrived; `delta` is None if its length is wrong."""
        worker, rejection = update.worker, self._rejection(update.worker, update.incarnation)
        if rejection is not None:
            return rejection
        slot = self.slots[worker]
        sent_bytes = 0 if delta is None else self.hub.update_bytes(encoded=update.encoded)
        self.accounting.sent(worker, sent_bytes, CONTROL_BYTES, min(update.pushed_s, now_s), now_s)
        out = self._open_round(worker, update.round_id)
        if out is None:
            return self._reject_closed_round(update, slot, now_s)
        self._log_dispatch(out, update.begin_s)
        outcomes = self._push_to_hub(update, out, delta, now_s)
        slot.last = update.round_id
        slot.verdict = "accepted" if any(isinstance(outcome, Applied) for outcome in outcomes) else "refused"
        self._process(outcomes, update)
        if not self.done:
            self.tick(now_s)
        return slot.verdict

    def _push_to_hub(self, update: UpdateMessage, out: Dispatch, delta: Tree | None, now_s: float) -> Sequence[Outcome]:
        """The hub's outcomes. An update of the wrong length or with a loss that is not finite does not reach the hub."""
        worker, losses = update.worker, [record.loss for record in update.computed if not math.isfinite(record.loss)]
        if delta is None or losses:
            num_bytes = self.hub.update_bytes(encoded=update.encoded)
            reason = f"its loss is {losses[0]}" if losses else f"its delta has not the {num_bytes} bytes of an update"
            return [Refusal(worker, out.round, now_s, reason, True), *self.hub.give_up(worker, now_s)]
        push = Push(worker, out.round, delta, update.computed_s or None)
        return self.hub.push(push, now_s, self._next_arrival_s(now_s, but=worker))

    def _reject_closed_round(self, update: UpdateMessage, slot: WorkerSlot, now_s: float) -> PushStatus:
        """The round was pushed before, or the hub that dispatched it died before it saved the dispatch."""
        again, number = slot.last == update.round_id, update.round_id[0]
        why = "it was delivered twice" if again else "a hub that died had dispatched it, and this hub has no record of it"
        reason = f"round {number} of worker {update.worker} is not open: {why}"
        # A round of this hub with that number is another round: the log must not call that one refused.
        if self.hub.scheduler.open_dispatch(update.worker, number) is None:
            self._emit(Refused(island=update.worker, round=number, virtual_time_s=None, wall_time_s=now_s, reason=reason))
        if again:  # the first reply may have been lost
            return "duplicate" if slot.verdict == "accepted" else "refused"
        return "unknown"

    def _process(self, outcomes: Sequence[Outcome], update: UpdateMessage | None = None) -> None:
        for outcome in outcomes:
            match outcome:
                case ClosedWindow():
                    self._emit(self.accounting.hub_event(outcome))
                case AbandonedRound(dispatch=dispatch):
                    self._log_dispatch(dispatch, dispatch.time_s)
                    self._end_round(dispatch)
                    self._emit(self.accounting.hub_event(outcome))
                case Applied():
                    assert update is not None
                    self._applied(outcome, update)
                case Refusal():
                    assert update is not None
                    self._refused(outcome, update)
                case Dispatch():  # the worker learns of it when it pulls
                    self._round_epochs[outcome.round] = self._epoch

    def _applied(self, applied: Applied, update: UpdateMessage) -> None:
        """Accounts a hub step, and requests an evaluation if one is due."""
        dispatch, before = applied.dispatch, self.accounting.totals.local_updates
        slot = self.slots[dispatch.worker]
        slot.refusals = 0
        slot.step_s = (applied.time_s - dispatch.time_s) / dispatch.steps
        slot.compute_step_s = update.computed_s / dispatch.steps
        self.buffers = tensors_of(update.buffers)
        self._end_round(dispatch)
        for worker, present in self.slots.items():
            self._count_presence(worker, present, applied.time_s)
        spans = [span._replace(end_s=min(span.end_s, applied.time_s)) for span in update.computed]
        pushed_s, workers = min(update.pushed_s, applied.time_s), len(self.slots)
        sent_bytes = self.hub.update_bytes(encoded=update.encoded)
        for event in self.accounting.update_applied(applied, spans, pushed_s=pushed_s, sent_bytes=sent_bytes, workers=workers):
            self._emit(event)
        if self.done or passed_multiple(before, self.accounting.totals.local_updates, self._evaluate_every):
            self.request_evaluation(applied.time_s)

    def _refused(self, refusal: Refusal, update: UpdateMessage) -> None:
        self._emit(self.accounting.hub_event(refusal))
        self.accounting.ledgers[refusal.worker].computed_s += update.computed_s
        slot = self.slots[refusal.worker]
        slot.refusals += 1
        if slot.refusals == MAX_REFUSALS:
            self.fatal_error = TrainingDiverged(
                f"worker {refusal.worker} has pushed {slot.refusals} unusable updates in a row: {refusal.reason}. The run stops; "
                f"its checkpoints are valid. Lower the learning rate, set train.clip_norm, or look at this worker's machine."
            )

    def request_evaluation(self, now_s: float) -> None:
        self.evaluation_due = self.accounting.evaluation_due(now_s)

    def record_metrics(self, due: Evaluated, metrics: Mapping[str, float]) -> None:
        self.accounting.set_metrics(metrics)
        self._emit(replace(due, metrics=self.accounting.totals.metrics))

    def finish(self, now_s: float, warm_start_tokens: int) -> RunFinished:
        """Ends the run. Open rounds count as computing time only, at most as much as the worker's steps took in its last round."""
        for number, slot in self.slots.items():
            self._count_presence(number, slot, now_s)
        for number, out in self._open_rounds():
            self._log_dispatch(out, out.time_s)
            compute_step_s = self.slots[number].compute_step_s if number in self.slots else None
            if compute_step_s is not None:
                self.accounting.ledgers[number].computed_s += min(now_s - out.time_s, compute_step_s * out.steps)
        finished = self.accounting.finished(now_s, warm_start_tokens, self.params.digest())
        self._emit(finished)
        return finished

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def to_parts(self, now_s: float) -> dict[str, Any]:
        """All parts of a checkpoint, which is one atomic write: no round is saved in part."""
        engine = {
            "now_s": now_s,
            "slots": [[n, s.incarnation, s.counted_s, s.last, s.verdict, s.refusals] for n, s in self.slots.items()],
            "logged_rounds": sorted(self._logged),
            "round_epochs": [list(item) for item in self._round_epochs.items()],
        }
        return self.accounting.hub_parts(self.hub, self.buffers, engine)

    def from_parts(self, load: Callable[[str, Any], Any]) -> float:
        """Restores a checkpoint, and returns its time. `load(part, like)` gives a part with the types of `like`."""
        engine, self.buffers = self.accounting.restore_hub(self.hub, load)
        self._add_ledgers()
        for worker, incarnation, counted_s, last, verdict, refusals in engine["slots"]:
            round_id = None if last is None else (last[0], last[1])
            self.slots[worker] = WorkerSlot(incarnation, counted_s, round_id, verdict, refusals)
        self._logged, self._round_epochs = set(engine["logged_rounds"]), dict(engine["round_epochs"])
        return float(engine["now_s"])
