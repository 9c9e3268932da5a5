"""The simulator for asynchronous algorithms: a hub and its workers under one virtual clock.

Each round of a worker is a coroutine: it pulls, trains and pushes, and what that takes is known the moment it is sent off. So the
hub is told exactly when the next one comes. All that happens between two arrivals is training; whatever is reported, counted,
judged or saved is so at an arrival, after the hub's step.

A checkpoint holds the hub and, for every worker that is out, what it was sent off with and its inner optimizer as it was then. On
resume such rounds begin again at their old time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from atoll.algorithms.async_hub import Applied, Hub, Outcome, Push, Refusal
from atoll.algorithms.async_scheduler import Closing, Dispatch, Return
from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import IslandJoined, IslandLeft, Progress, RunFinished
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Batches, Sink
from atoll.engines.accounting import ComputeSpan, RunAccounting, dispatched, refused, returned, window_closed
from atoll.engines.simulator.async_workers import SimHub, SimWorker, SimWorkers
from atoll.engines.simulator.batched_compute import BatchedCompute
from atoll.engines.simulator.compute_pool import ComputePool
from atoll.engines.simulator.peers import SimReplica
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.replica.local_replica import ComputeResult, LocalReplica
from atoll.runs.cluster import Cluster, draw
from atoll.runs.network import CONTROL_BYTES

_MOST_REFUSALS = 3  # of one worker in a row: it will not get better


class AsyncSimEngine:
    """Runs one asynchronous algorithm on a simulated cluster.

    Args:
        algorithm: what workers and hub do.
        cluster: the workers and their lines to the hub, which has room for all.
        params: the weights to begin with.
        batches: the data, in any number of shards.
        make_replica: makes worker i's replica, with a fresh optimizer.
        evaluate: judges the hub's weights, with the buffers of the worker that came last.
        sink: takes events.
        steps: inner steps per island: the run stops at the hub step that reaches `steps * islands` local updates.
        seed: of everything the cluster draws.
        evaluate_every: local updates between evaluations; the last weights are always evaluated.
        save: writes a checkpoint of the engine it is given; none saves nothing.
        save_every: local updates between checkpoints; the last hub step is always saved.
        together: computes for several islands at a time, where one device serves them all.
    """

    def __init__(
        self,
        *,
        algorithm: AsyncAlgorithm[Any],
        cluster: Cluster,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[int], LocalReplica],
        evaluate: Callable[[Tree, Mapping[str, torch.Tensor]], Mapping[str, float]],
        sink: Sink,
        steps: int,
        seed: int = 0,
        evaluate_every: int = 1,
        save: Callable[[AsyncSimEngine], None] | None = None,
        save_every: int = 1,
        together: BatchedCompute | None = None,
    ) -> None:
        cluster.check_asynchronous()
        if steps < 1:
            raise ConfigError(f"steps={steps}: there must be at least 1 inner step per island.")
        self.algorithm = algorithm
        self.cluster = cluster
        self.steps = steps
        self.seed = seed
        self.accounting = RunAccounting(cluster.islands)
        self.hub = Hub(
            algorithm,
            params.copy(),  # the hub's buffers go back into circulation; the caller keeps its own
            examples=[batches.examples(shard) for shard in range(batches.num_shards)],
            updates=steps * cluster.islands,
            draw=lambda round: draw(seed, "shard", round),
        )
        self._evaluate = evaluate
        self._sink = sink
        self._evaluate_every = evaluate_every
        self._save = save
        self._save_every = save_every
        self._computing = ComputePool(cluster, lambda: sink.emit(self._progress()), together)
        self.crew = SimWorkers(cluster, seed, self.accounting, self._computing, make_replica)
        self._loop = VirtualClock()
        self._now_s = 0.0
        self._changes_done = 0
        self._watched_s = math.nan
        """The end of the window that the loop will come back to."""
        for island in cluster.present_at_start():
            self.crew.admit(island, 0.0)
        first = next((worker.replica for worker in self.workers.values()), None) or self.crew.replica(0)
        self._kind = first
        """A replica, of the kind of all others."""
        self._buffers = copy.deepcopy(first.buffers())

    # -------------------------------------------------------------------------------------------------------- the whole run

    def run(self, warm_start_tokens: int = 0) -> RunFinished:
        """Until the run has its local updates."""
        with self._computing.open(self._kind):
            begun = self.hub.scheduler.rounds > 0
            if not self.accounting.totals.metrics:
                self._judge()
            if not self.hub.done:
                self._play(begun)
        for worker in self.workers.values():
            self.crew.settle(worker, self._now_s)
        finished = self.accounting.finished(self._now_s, warm_start_tokens, self.params.digest())
        self._sink.emit(finished)
        return finished

    def _play(self, begun: bool) -> None:
        try:
            self._file_changes()
            if begun:
                self._begin_again()
            else:
                self._begin()
            self._loop.run(stop=lambda: self.hub.done)
        finally:
            self._loop.close()
        if not self.hub.done:
            scheduler = self.hub.scheduler
            raise ExchangeFailed(
                f"at {self._now_s:.2f} s nobody is left and nobody will come back, after {scheduler.local_updates} of "
                f"{scheduler.updates} local updates. What was saved stands, but cannot go on. Start a new run in which "
                f"cluster.outages have a stop_s."
            )

    def _begin(self) -> None:
        self._carry_out(self.hub.join_all({island: self.crew.speed(island) for island in self.workers}, 0.0))

    def _begin_again(self) -> None:
        """Rounds that a checkpoint interrupted, in the order in which they were begun."""
        out = [worker for worker in self.workers.values() if worker.dispatch is not None]
        for worker in sorted(out, key=lambda w: w.dispatch.round):  # type: ignore[union-attr]
            assert worker.dispatch is not None
            self._send_off(worker.dispatch)
        self._watch_window()

    @property
    def workers(self) -> dict[int, SimWorker]:
        """Those who are there."""
        return self.crew.workers

    @property
    def params(self) -> Tree:
        """The hub's weights."""
        return self.hub.params

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the module of the worker that came last keeps besides its weights."""
        return self._buffers

    @property
    def round(self) -> int:
        """Rounds that are over: the hub's steps."""
        return self.accounting.totals.round

    @property
    def virtual_time_s(self) -> float:
        return self._now_s

    def _progress(self) -> Progress:
        """What arrived, and how far those who are out have come."""
        out = sum(w.replica.steps_taken - w.steps_before for w in self.workers.values() if w.dispatch is not None)
        done = (self.accounting.totals.local_updates + out) // self.cluster.islands
        return Progress(phase="training", done=min(done, self.steps), total=self.steps)

    # -------------------------------------------------------------------------------------------------- what the hub decides

    def _carry_out(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Dispatch():
                    self._send_off(outcome)
                    self._sink.emit(dispatched(outcome, self.workers[outcome.worker].begin_s, self.params.nbytes))
                case Closing():
                    self._sink.emit(window_closed(outcome))
                case Return():
                    self._sink.emit(returned(outcome))
                case Applied():
                    self._take(outcome)
                case Refusal():
                    self._turn_down(outcome)

    def _send_off(self, dispatch: Dispatch) -> None:
        worker = self.workers[dispatch.worker]
        worker.dispatch, worker.stretches, worker.steps_before = dispatch, [], worker.replica.steps_taken
        self.crew.foresee(worker, dispatch, self.params.nbytes)
        if self._save is not None:
            worker.before = copy.deepcopy(worker.replica.state())
        hub = SimHub(self, worker, dispatch, self.hub.task(dispatch))
        coroutine = self.algorithm.round(SimReplica(self, worker.id, worker.replica), hub)
        worker.task = self._loop.spawn(f"worker {worker.id}", coroutine, dispatch.time_s, partial(self._came_back, hub, worker))

    def _came_back(self, hub: SimHub, worker: SimWorker, task: ClockTask) -> None:
        if not hub.pushed:
            raise ExchangeFailed(
                f"the round of worker {worker.id} ended without a push, so the hub would wait for it for ever. "
                f"Every round of {type(self.algorithm).__name__} must end with `await hub.push(...)`."
            )

    # ------------------------------------------------------------------------------------------------- what workers ask for

    def compute(
        self, island: int, function: Callable[[], tuple[Any, ComputeResult]], *, steps: int, batches: float, draw: str | None = None
    ) -> Wait:
        return Wait(partial(self._start_computing, self.workers[island], function, steps, batches))

    def _start_computing(
        self, worker: SimWorker, function: Callable[[], tuple[Any, ComputeResult]], steps: int, batches: float, task: ClockTask
    ) -> None:
        assert worker.dispatch is not None
        start_s = task.now_s
        end_s = start_s + self.crew.duration_s(worker.id, worker.dispatch.round, batches, len(worker.stretches))
        future = self._computing.begin(function)

        def finish() -> Any:
            result, trained = self._computing.result(future)
            worker.stretches.append(ComputeSpan(start_s, end_s, steps, batches, trained))
            return result

        task.resume_at(end_s, finish)

    def start_pushing(self, worker: SimWorker, dispatch: Dispatch, delta: Tree, task: ClockTask) -> None:
        line, pushed_s = self.cluster.line(worker.id), task.now_s
        arrival_s = pushed_s + line.latency_s + delta.nbytes / line.up_bytes_per_s
        task.resume_at(arrival_s, lambda: self._arrive(worker, dispatch, delta, arrival_s))

    # ---------------------------------------------------------------------------------------------------------- an arrival

    def _arrive(self, worker: SimWorker, dispatch: Dispatch, delta: Tree, now_s: float) -> None:
        """What the worker brought is there, unless it was lost on the way: then it is sent off again."""
        self._now_s, before = now_s, self.accounting.totals.local_updates
        next_s = self.crew.next_arrival_s(but=worker.id)
        self.accounting.sent([worker.id], [delta.nbytes], [CONTROL_BYTES])
        if self.cluster.heard(worker.id, dispatch.round, self.seed):
            seconds = math.fsum(stretch.end_s - stretch.start_s for stretch in worker.stretches)
            self._carry_out(self.hub.push(Push(worker.id, dispatch.round, delta, seconds or None), now_s, next_s))
        elif self.hub.scheduler.out(worker.id, dispatch.round) is not None:  # not a second delivery of what was taken
            self.crew.count_computing(worker, self._now_s)
            self._carry_out(self.hub.give_up(worker.id, now_s))
        self._tick()
        if self._is_due(before, self._save_every) and self._save is not None:
            self._save(self)

    def _tick(self) -> None:
        """What was just decided may have told when the next one comes, and so that a window is over. If one stays open, the hub is
        asked again when it runs out: a round that trains more than once comes later than was foreseen."""
        self._carry_out(self.hub.tick(self._now_s, self.crew.next_arrival_s()))
        self._watch_window()

    def _watch_window(self) -> None:
        deadline_s = self.hub.scheduler.deadline_s
        if deadline_s is not None and deadline_s < math.inf and deadline_s != self._watched_s:
            self._watched_s = deadline_s
            self._loop.spawn("the end of a window", self._run_out(deadline_s), deadline_s)

    async def _run_out(self, deadline_s: float) -> None:
        if self.hub.scheduler.deadline_s == deadline_s and not self.hub.done:
            outcomes = self.hub.tick(deadline_s, self.crew.next_arrival_s())
            self._now_s = deadline_s if outcomes else self._now_s
            self._carry_out(outcomes)

    def _is_due(self, before: int, every: int) -> bool:
        """Whether the local updates have passed a multiple of this; at the end, always."""
        now = self.accounting.totals.local_updates
        return now > before and (self.hub.done or now // every > before // every)

    def _take(self, applied: Applied) -> None:
        """The hub took its step: count, report and judge."""
        worker, before = self.workers[applied.dispatch.worker], self.accounting.totals.local_updates
        worker.dispatch, worker.refusals = None, 0
        self._buffers = copy.deepcopy(worker.replica.buffers())
        pushed_s = worker.stretches[-1].end_s if worker.stretches else worker.begin_s
        for other in self.workers.values():
            self.crew.note_presence(other, applied.time_s)
        for event in self.accounting.update_applied(
            applied, worker.stretches, pushed_s=pushed_s, sent_bytes=self.params.nbytes, workers=len(self.workers)
        ):
            self._sink.emit(event)
        if self._is_due(before, self._evaluate_every):
            self._judge()

    def _turn_down(self, refusal: Refusal) -> None:
        self._sink.emit(refused(refusal))
        if not refusal.known:
            return
        worker = self.workers[refusal.worker]
        worker.refusals += 1
        if worker.refusals == _MOST_REFUSALS:
            raise TrainingDiverged(
                f"worker {worker.id} has brought {worker.refusals} unusable updates in a row: {refusal.reason}. The run stops; "
                f"what was saved stands. Lower the learning rate, or set train.clip_norm."
            )
        self.crew.count_computing(worker, self._now_s)
        worker.replica = self.crew.replica(worker.id)  # its moments are as unusable as what it brought

    def _judge(self) -> None:
        if not self.params.is_finite():
            raise TrainingDiverged(
                f"the hub's weights are no longer finite after {self.round} arrivals, though every delta was. The run stops; what "
                f"was saved stands. Lower the outer learning rate, or the weight of each arrival."
            )
        metrics = self._computing.result(self._computing.begin(lambda: self._evaluate(self.params, self._buffers)))
        self._sink.emit(self.accounting.evaluated(metrics, self._now_s))

    # ---------------------------------------------------------------------------------------------------- coming and going

    def _file_changes(self) -> None:
        """All comings and goings that remain. They are filed first, so that at one and the same time they come first."""
        for time_s, island, comes in self.cluster.changes()[self._changes_done :]:
            change: Coroutine[Any, Any, None] = self._change(time_s, island, comes)
            self._loop.spawn(f"island {island} {'comes' if comes else 'goes'}", change, time_s)

    async def _change(self, time_s: float, island: int, comes: bool) -> None:
        self._now_s = time_s
        self._changes_done += 1
        if comes:
            self.crew.admit(island, time_s)
            self._sink.emit(IslandJoined(island=island, round=self.round, virtual_time_s=time_s, donor=None, sent_bytes=0))
            self._carry_out(self.hub.join(island, time_s, self.crew.speed(island)))
        else:
            gone = self.workers.pop(island)
            if gone.task is not None:
                gone.task.close()
            self.crew.settle(gone, time_s)
            self._sink.emit(IslandLeft(island=island, round=self.round, virtual_time_s=time_s))
            self._carry_out(self.hub.leave(island, time_s, self.crew.next_arrival_s()))
        self._tick()

    # -------------------------------------------------------------------------------------------------------------- saving

    def parts(self) -> dict[str, Any]:
        """Everything a checkpoint must hold, by part. After a hub step only."""
        hub = self.hub.to_parts()
        return {
            "engine": {
                **self.accounting.to_parts(),
                "together": self._computing.to_part(),
                "hub": hub["plain"],
                "now_s": self._now_s,
                "changes_done": self._changes_done,
                "workers": [[worker.id, worker.since_s, worker.refusals] for worker in self.workers.values()],
                "versions": list(hub["versions"]),
            },
            "hub": {"state": hub["state"]},
            "buffers": {"buffers": self._buffers},
            **{f"version-{name}": {"params": tree} for name, tree in hub["versions"].items()},
            **{f"worker-{worker.id}": {"replica": worker.resumable()} for worker in self.workers.values()},
        }

    def restore(self, load: Callable[[str, Any], Any]) -> None:
        """Go on from a checkpoint. `load(part, like)` gives a part back, with the types of `like`."""
        engine = load("engine", None)
        self.accounting.from_parts(engine)
        self._computing.from_part(engine.get("together"))
        self._now_s, self._changes_done = engine["now_s"], engine["changes_done"]
        versions = {name: load(f"version-{name}", {"params": self.params})["params"] for name in engine["versions"]}
        state = load("hub", {"state": self.hub.state})["state"]
        self.hub.from_parts(state, versions, engine["hub"])
        self._buffers = load("buffers", None)["buffers"]
        fresh, self.crew.workers = self.workers, {}
        for island, since_s, refusals in engine["workers"]:
            replica = fresh[island].replica if island in fresh else self.crew.replica(island)
            replica.restore(load(f"worker-{island}", None)["replica"])
            out = self.hub.scheduler.workers[island].out
            worker = self.workers[island] = SimWorker(island, replica, since_s, dispatch=out, refusals=refusals)
            if out is not None:  # a run that is over settles its accounting without beginning the round again
                self.crew.foresee(worker, out, self.params.nbytes)
