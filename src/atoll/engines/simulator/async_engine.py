"""The simulator of asynchronous algorithms: a hub and its workers under one virtual clock.

Each round of a worker is a coroutine that pulls, trains and pushes. Its duration is known at its dispatch, so the engine knows when
the next update arrives. Only training happens between two arrivals: the engine reports, accounts, evaluates and saves at an
arrival, after the hub's step.

A checkpoint holds the hub and, for every worker in a round, its dispatch and the state of its replica at that time. On resume such
rounds begin again at their old time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from atoll.algorithms.async_scheduler import AbandonedRound, ClosedWindow, Dispatch
from atoll.core.errors import ExchangeFailed, TrainingDiverged
from atoll.core.events import IslandJoined, IslandLeft, Progress
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Task
from atoll.engines.accounting import MAX_REFUSALS, ComputeSpan, diverged_hub
from atoll.engines.async_hub import Applied, AsyncHub, Outcome, Push, Refusal
from atoll.engines.hub_encoding import SentUpdate, encode_update
from atoll.engines.simulator.engine import BaseSimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.engines.simulator.peers import SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.engines.training_setup import passed_multiple
from atoll.replica.local_replica import ComputeJob, LocalReplica
from atoll.runs.cluster import CONTROL_BYTES, draw


@dataclass
class SimRound:
    """A round of a worker. Its times are predictions, which are exact if it pulls, trains once and pushes."""

    dispatch: Dispatch
    begin_s: float  # when the worker has received the weights
    end_s: float  # when it will have trained
    arrival_s: float  # when its update will arrive at the hub
    steps_before: int  # steps of its replica before this round
    replica_before: dict[str, Any] | None  # the replica's state before this round; None if the run saves nothing
    spans: list[ComputeSpan] = field(default_factory=list)


@dataclass
class SimWorker:
    """A worker that is present."""

    id: int
    replica: LocalReplica
    accounted_s: float  # until when its presence is accounted
    refusals: int = 0  # in a row
    unsent: Tree | None = None  # the error buffer: what the codec left out of its updates that have arrived
    round: SimRound | None = None  # None while it waits in a window
    task: ClockTask | None = None  # of its last round

    def resumable(self) -> dict[str, Any]:
        """The replica's state for a checkpoint: as it was before the present round, or as it is if there is none."""
        if self.round is None:
            return self.replica.state()
        assert self.round.replica_before is not None, "an engine that saves keeps the state before each round"
        return self.round.replica_before


class SimHub:
    """The hub, seen from one worker in one round. A protocols.Hub."""

    def __init__(self, task: Task, begin_s: float, push: Callable[[Tree], Wait]) -> None:
        self._task, self._begin_s, self._push = task, begin_s, push
        self.pushed = False

    async def pull(self) -> Task:
        task: Task = await Wait(lambda waiting: waiting.resume_at(self._begin_s, lambda: self._task))
        return task

    async def push(self, delta: Tree) -> None:
        self.pushed = True
        await self._push(delta.donate())


class AsyncSimEngine(BaseSimEngine):
    """Runs an asynchronous algorithm on a simulated cluster, whose links lead to a hub of unlimited capacity. The run ends at the
    hub step that reaches `setup.steps * cluster.islands` local updates."""

    def __init__(self, algorithm: AsyncAlgorithm[Any], setup: SimSetup) -> None:
        cluster, batches = setup.cluster, setup.batches
        cluster.check_asynchronous()
        super().__init__(setup, algorithm)
        self.hub = AsyncHub(
            algorithm,
            setup.params.copy(),  # the hub reuses its buffers; the caller keeps its own
            examples=[batches.examples(shard) for shard in range(batches.num_shards)],
            updates=setup.steps * cluster.islands,
            draw=lambda round: draw(setup.seed, "shard", round),
        )
        self.workers: dict[int, SimWorker] = {}  # the present ones
        self._clock = VirtualClock()
        self._now_s = 0.0
        self._changes_done = 0
        self._save_due = False
        self._watched_s = math.nan  # the end of the window that the clock will wake the hub for
        for island in cluster.present_at_start():
            self.workers[island] = SimWorker(island, self._work.new_replica(island), accounted_s=0.0)
        self._first_replica = next((worker.replica for worker in self.workers.values()), None) or self._work.new_replica(0)
        self._buffers = copy.deepcopy(self._first_replica.buffers())

    # -------------------------------------------------------------------------------------------------------- the whole run

    def _train(self) -> Iterator[None]:
        if not self.hub.done:
            yield from self._run_rounds()
        for worker in self.workers.values():
            self._close(worker, self._now_s)

    def _run_rounds(self) -> Iterator[None]:
        try:
            # Changes are scheduled before anything else, so that they come first among events of one moment.
            for time_s, island, joins in self.cluster.membership_changes()[self._changes_done :]:
                self._clock.spawn(f"island {island} {'joins' if joins else 'leaves'}", self._change(time_s, island, joins), time_s)
            if self.hub.scheduler.rounds > 0:  # the rounds that the checkpoint interrupted start in the order of their dispatch
                interrupted = [worker.round for worker in self.workers.values() if worker.round is not None]
                for round in sorted(interrupted, key=lambda one: one.dispatch.round):
                    self._start_round(round)
                self._tick()
            else:
                self._apply(self.hub.join_all({island: self._speed(island) for island in self.workers}, 0.0))
            self._clock.run(stop=lambda: self.hub.done or self._save_due)
            while self._save_due:
                yield
                self._save_due = False
                self._clock.run(stop=lambda: self.hub.done or self._save_due)
        finally:
            self._clock.close()
        if not self.hub.done:
            scheduler = self.hub.scheduler
            raise ExchangeFailed(
                f"at {self._now_s:.2f} s no worker is left and none will return, after {scheduler.local_updates} of "
                f"{scheduler.updates} local updates. Its checkpoints are valid, but the run cannot continue. Start a new run in "
                f"which cluster.outages have a stop_s."
            )

    @property
    def params(self) -> Tree:
        return self.hub.params

    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers of the worker whose update arrived last."""
        return self._buffers

    @property
    def virtual_time_s(self) -> float:
        return self._now_s

    @property
    def _any_replica(self) -> LocalReplica:
        return self._first_replica

    def _progress(self) -> Progress:
        """The steps that have arrived, and those of rounds under way."""
        running = sum(w.replica.steps_taken - w.round.steps_before for w in self.workers.values() if w.round is not None)
        done = (self.accounting.totals.local_updates + running) // self.cluster.islands
        return Progress(phase="training", done=min(done, self.steps), total=self.steps)

    # -------------------------------------------------------------------------------------------------- the hub's decisions

    def _apply(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Dispatch():
                    round = self._new_round(outcome)
                    self._start_round(round)
                    sent_bytes = self.hub.task_bytes(outcome.worker)
                    self._sink.emit(self.accounting.dispatched(outcome, round.begin_s, sent_bytes))
                case ClosedWindow() | AbandonedRound():
                    self._sink.emit(self.accounting.hub_event(outcome))
                case Applied():
                    self._account_update(outcome)
                case Refusal():
                    self._refuse(outcome)

    def _new_round(self, dispatch: Dispatch) -> SimRound:
        worker, link = self.workers[dispatch.worker], self.cluster.link_of(dispatch.worker)
        begin_s = dispatch.time_s + link.latency_s + self.hub.task_bytes(worker.id) / link.down_bytes_per_s
        end_s = begin_s + self._work.duration_s(worker.id, dispatch.round, dispatch.steps)
        arrival_s = end_s + link.latency_s + self.hub.update_bytes() / link.up_bytes_per_s
        replica_before = None if self._setup.save_every is None else copy.deepcopy(worker.replica.state())
        worker.round = SimRound(dispatch, begin_s, end_s, arrival_s, worker.replica.steps_taken, replica_before)
        return worker.round

    def _start_round(self, round: SimRound) -> None:
        worker = self.workers[round.dispatch.worker]
        hub = SimHub(self.hub.task(round.dispatch), round.begin_s, partial(self._push, worker, round))
        coroutine = self.algorithm.round(SimReplica(worker.replica, partial(self._compute, round)), hub)
        end = partial(self._end_round, hub, worker)
        worker.task = self._clock.spawn(f"worker {worker.id}", coroutine, round.dispatch.time_s, end)

    def _end_round(self, hub: SimHub, worker: SimWorker, task: ClockTask) -> None:
        if not hub.pushed:
            raise ExchangeFailed(
                f"the round of worker {worker.id} ended without a push, so the hub would wait for it for ever. "
                f"Every round of {type(self.algorithm).__name__} must end with `await hub.push(...)`."
            )

    def _compute(self, round: SimRound, job: ComputeJob) -> Wait:
        def start(task: ClockTask) -> None:
            number: int | str = f"{round.dispatch.round}.{len(round.spans)}" if round.spans else round.dispatch.round
            seconds = self._work.duration_s(round.dispatch.worker, number, job.batches)
            self._pool.compute(job, task, seconds, round.spans.append)

        return Wait(start)

    def _push(self, worker: SimWorker, round: SimRound, delta: Tree) -> Wait:
        sent = encode_update(self.algorithm.plan, delta, worker.unsent, round.dispatch.round)

        def start(task: ClockTask) -> None:
            link, start_s = self.cluster.link_of(worker.id), task.now_s
            end_s = start_s + sent.nbytes / link.up_bytes_per_s
            arrival_s = start_s + link.latency_s + sent.nbytes / link.up_bytes_per_s

            def arrive() -> None:
                self.accounting.sent(worker.id, sent.nbytes, CONTROL_BYTES, start_s, end_s)
                self._arrive(worker, round, sent, arrival_s)

            task.resume_at(arrival_s, arrive)

        return Wait(start)

    # ---------------------------------------------------------------------------------------------------------- an arrival

    def _arrive(self, worker: SimWorker, round: SimRound, sent: SentUpdate, now_s: float) -> None:
        """The hub gets an update. If the link lost it, the hub returns its data and dispatches the worker again."""
        self._now_s, before, number = now_s, self.accounting.totals.local_updates, round.dispatch.round
        next_s = self._next_arrival_s(but=worker.id)
        if self.cluster.delivers(worker.id, number, self._setup.seed):
            worker.unsent = sent.unsent
            seconds = math.fsum(span.end_s - span.start_s for span in round.spans)
            self._apply(self.hub.push(Push(worker.id, number, sent.delta, seconds or None), now_s, next_s))
        elif self.hub.scheduler.open_dispatch(worker.id, number) is not None:  # not a second delivery of the same update
            self._account_lost_computing(worker, self._now_s)
            self._apply(self.hub.give_up(worker.id, now_s))
        self._tick()
        self._save_due = self._setup.save_every is not None and self._is_due(before, self._setup.save_every)

    def _tick(self) -> None:
        """Gives the hub the time of the next arrival, which may close a window. If a window stays open, the clock wakes the hub at
        its deadline: a round that trains more than once arrives later than predicted."""
        self._apply(self.hub.tick(self._now_s, self._next_arrival_s()))
        deadline_s = self.hub.scheduler.deadline_s
        if deadline_s is not None and deadline_s < math.inf and deadline_s != self._watched_s:
            self._watched_s = deadline_s
            self._clock.spawn("the end of a window", self._end_window(deadline_s), deadline_s)

    async def _end_window(self, deadline_s: float) -> None:
        if self.hub.scheduler.deadline_s == deadline_s and not self.hub.done:
            outcomes = self.hub.tick(deadline_s, self._next_arrival_s())
            self._now_s = deadline_s if outcomes else self._now_s
            self._apply(outcomes)

    def _is_due(self, before: int, every: int) -> bool:
        """Whether the local updates have passed a multiple of `every`, or the run is over."""
        now = self.accounting.totals.local_updates
        return now > before and (self.hub.done or passed_multiple(before, now, every))

    def _account_update(self, applied: Applied) -> None:
        worker, before = self.workers[applied.dispatch.worker], self.accounting.totals.local_updates
        round, worker.round, worker.refusals = worker.round, None, 0
        assert round is not None, "the hub applies updates of open rounds only"
        self._buffers = copy.deepcopy(worker.replica.buffers())
        pushed_s = round.spans[-1].end_s if round.spans else round.begin_s
        for other in self.workers.values():
            self._account_presence(other, applied.time_s)
        for event in self.accounting.update_applied(
            applied, round.spans, pushed_s=pushed_s, sent_bytes=self.hub.update_bytes(), workers=len(self.workers)
        ):
            self._sink.emit(event)
        if self._is_due(before, self._setup.evaluate_every):
            self._evaluate()

    def _refuse(self, refusal: Refusal) -> None:
        self._sink.emit(self.accounting.hub_event(refusal))
        if not refusal.known:
            return
        worker = self.workers[refusal.worker]
        worker.refusals += 1
        if worker.refusals == MAX_REFUSALS:
            raise TrainingDiverged(
                f"worker {worker.id} has brought {worker.refusals} unusable updates in a row: {refusal.reason}. The run stops; its "
                f"checkpoints are valid. Lower the learning rate, or set train.clip_norm."
            )
        self._account_lost_computing(worker, self._now_s)
        # Its moments are as unusable as its update, and what the codec left out of that.
        worker.replica, worker.unsent = self._work.new_replica(worker.id), None

    def _evaluate(self) -> None:
        if not self.params.is_finite():
            raise diverged_hub(self.round)
        super()._evaluate()

    # ---------------------------------------------------------------------------------------------- the workers' timing and ledgers

    def _speed(self, island: int) -> float:
        """In steps per second."""
        return 1 / self.cluster.step_time(island, self._setup.seed)

    def _next_arrival_s(self, but: int | None = None) -> float:
        """The predicted time of the next arrival."""
        return min((w.round.arrival_s for w in self.workers.values() if w.round is not None and w.id != but), default=math.inf)

    def _close(self, worker: SimWorker, now_s: float) -> None:
        """Accounts a worker that leaves, or that is present at the end of the run."""
        self._account_presence(worker, now_s)
        self._account_lost_computing(worker, now_s)

    def _account_presence(self, worker: SimWorker, now_s: float) -> None:
        self.accounting.ledgers[worker.id].present_s += now_s - worker.accounted_s
        worker.accounted_s = now_s

    def _account_lost_computing(self, worker: SimWorker, now_s: float) -> None:
        """Accounts the computing of a round whose update is lost or refused."""
        if worker.round is not None:
            self.accounting.ledgers[worker.id].computed_s += max(0.0, min(now_s, worker.round.end_s) - worker.round.begin_s)

    # -------------------------------------------------------------------------------------------------- joining and leaving

    async def _change(self, time_s: float, island: int, joins: bool) -> None:
        self._now_s = time_s
        self._changes_done += 1
        if joins:
            self.workers[island] = SimWorker(island, self._work.new_replica(island), accounted_s=time_s)
            self._sink.emit(IslandJoined(island=island, round=self.round, virtual_time_s=time_s, donor=None, sent_bytes=0))
            self._apply(self.hub.join_all({island: self._speed(island)}, time_s))
        else:
            gone = self.workers.pop(island)
            if gone.task is not None:
                gone.task.close()
            self._close(gone, time_s)
            self._sink.emit(IslandLeft(island=island, round=self.round, virtual_time_s=time_s))
            self._apply(self.hub.leave(island, time_s, self._next_arrival_s()))
        self._tick()

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """The parts of a checkpoint. After a hub step only."""
        engine = {
            "batched_compute": self._pool.to_part(),
            "now_s": self._now_s,
            "changes_done": self._changes_done,
            "workers": [[worker.id, worker.accounted_s, worker.refusals] for worker in self.workers.values()],
        }
        workers = {f"worker-{w.id}": {"replica": w.resumable(), "unsent": w.unsent} for w in self.workers.values()}
        return {**self.accounting.hub_parts(self.hub, self._buffers, engine), **workers}

    def restore(self, load: Callable[[str, Any], Any]) -> None:
        """Restores a checkpoint. `load(part, like)` returns a part, with the types of `like`."""
        engine, self._buffers = self.accounting.restore_hub(self.hub, load)
        self._pool.from_part(engine["batched_compute"])
        self._now_s, self._changes_done = engine["now_s"], engine["changes_done"]
        fresh, self.workers = self.workers, {}
        for island, accounted_s, refusals in engine["workers"]:
            replica = fresh[island].replica if island in fresh else self._work.new_replica(island)
            saved = load(f"worker-{island}", {"replica": None, "unsent": self.params})
            replica.restore(saved["replica"])
            self.workers[island] = SimWorker(island, replica, accounted_s, refusals, saved["unsent"])
            dispatch = self.hub.scheduler.workers[island].dispatch
            if dispatch is not None:  # a finished run accounts this round without starting it again
                self._new_round(dispatch)
