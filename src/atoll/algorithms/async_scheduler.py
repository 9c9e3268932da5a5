"""The task scheduler of asynchronous Local-SGD: which worker trains on which shard, for how many steps, and when.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, Algorithms 2, 4 and 5 and eqs. (2), (3), (6).

A worker that arrives opens a **grace window**. The scheduler dispatches all workers that arrive within `grace_s` of that first
arrival together, from the same weights, when the window closes. A dispatched worker gets a shard (`shard_sampler.py`), the shard's
position in the data and on the learning-rate schedule (eq. 3), and a number of steps (`WorkerSpeeds`).

The scheduler has no clock. Each event carries the time and `next_s`: the earliest time at which another dispatched worker can still
arrive (None: unknown). A window closes when `next_s` lies beyond its deadline, when no worker is in a round, or at its deadline,
whichever is known first. The scheduler returns its decisions in order, and its driver carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.algorithms.shard_sampler import ShardSampler
from atoll.core.errors import ConfigError
from atoll.core.protocols import Plan, Work


class Dispatch(NamedTuple):
    """A worker is dispatched. `round` numbers all rounds of the run; a push must carry it. `version` is the hub's."""

    worker: int
    round: int
    version: int
    steps: int
    work: Work
    time_s: float


class ClosedWindow(NamedTuple):
    """A window closes. `workers` arrived in it, in this order, and `idle_s` is how long each waited."""

    window: int
    workers: tuple[int, ...]
    opened_s: float
    time_s: float
    idle_s: tuple[float, ...]


class AbandonedRound(NamedTuple):
    """A round ended without an update: its batches are free to be assigned again."""

    dispatch: Dispatch
    time_s: float


Decision = Dispatch | ClosedWindow | AbandonedRound


@dataclass
class Worker:
    """A worker that has joined."""

    shard: int  # of its last round; before the first, the one of its number
    dispatch: Dispatch | None = None  # None while it waits in a window


class Scheduler:
    """The state machine. `examples` is the number in each shard. After so many local `updates` no worker is dispatched any more.
    `draw` returns for each round a number in [0, 1), always the same, with which the sampler draws."""

    def __init__(self, plan: Plan, examples: Sequence[int], updates: int, draw: Callable[[int], float]) -> None:
        self.plan = plan
        self.shards = ShardSampler(examples, plan.shards, plan.ties)
        self.speeds = WorkerSpeeds(plan)
        self.workers: dict[int, Worker] = {}
        self.updates = updates
        self.local_updates = 0  # steps of all rounds whose updates arrived
        self.rounds = 0  # dispatched so far
        self.windows = 0  # closed so far
        self._draw = draw
        self._opened_s: float | None = None
        self._arrived_s: dict[int, float] = {}  # of each worker that waits in the window, in order
        self._latest_s = -math.inf  # the time of the last event

    @property
    def done(self) -> bool:
        return self.local_updates >= self.updates

    @property
    def deadline_s(self) -> float | None:
        """When the open window closes; None if none is open. A driver that does not know the next arrival ticks then."""
        return None if self._opened_s is None else self._opened_s + self.plan.grace_s

    def open_dispatch(self, worker: int, round: int) -> Dispatch | None:
        """The worker's dispatch, if the worker is in this round."""
        dispatch = self.workers[worker].dispatch if worker in self.workers else None
        return dispatch if dispatch is not None and dispatch.round == round else None

    # ------------------------------------------------------------------------------------------------------------- events

    def join_all(self, speeds: Mapping[int, float | None], now_s: float, version: int) -> list[Decision]:
        """Workers join and are dispatched at once, with their speeds in steps per second where the driver knows them. The scheduler
        registers all of them before it dispatches the first, so that each takes its steps in proportion to the fastest of all."""
        for worker in speeds:
            if worker in self.workers or worker < 0:
                why = "it has joined already. Let it leave first" if worker in self.workers else "numbers begin at 0"
                raise ConfigError(f"worker {worker} joins, but {why}, or give it another number.")
        self._check_time(now_s, record=False)
        self.speeds.join(speeds)
        self._latest_s = now_s
        self.workers |= {worker: Worker(worker % len(self.shards)) for worker in speeds}
        return [] if self.done else [self._dispatch(worker, now_s, version) for worker in speeds]

    def leave(self, worker: int, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """A worker leaves: its round is abandoned. A window in which only this worker waited closes."""
        gone = self._worker(worker, "leaves")
        self._check_time(now_s)
        del self.workers[worker]
        self.speeds.leave(worker)
        abandoned: list[Decision] = [self._abandon(gone.dispatch, now_s)] if gone.dispatch is not None else []
        if self._arrived_s.pop(worker, None) is not None and not self._arrived_s:
            return [*abandoned, self._close(now_s)]
        return [*abandoned, *self.tick(now_s, version, next_s)]

    def arrive(
        self, worker: int, now_s: float, version: int, next_s: float | None, seconds: float | None = None
    ) -> tuple[int, list[Decision]]:
        """A dispatched worker has arrived, and the hub has applied its update. Returns its window and the decisions that follow.
        The driver ticks before it applies the update, in case the window before has reached its deadline. `seconds` is how long the
        worker computed, where it is known; else the time since its dispatch counts."""
        arrived = self._worker(worker, "arrives")
        self._check_time(now_s)
        assert arrived.dispatch is not None, f"worker {worker} is in no round"
        steps, dispatched_s = arrived.dispatch.steps, arrived.dispatch.time_s
        self.speeds.measure(worker, steps, now_s - dispatched_s if seconds is None else seconds)
        self.local_updates += steps
        arrived.dispatch = None
        self._arrived_s[worker] = now_s
        self._opened_s = now_s if self._opened_s is None else self._opened_s
        return self.windows, self.tick(now_s, version, next_s)

    def redispatch(self, worker: int, now_s: float, version: int) -> list[Decision]:
        """The worker's update cannot be used: its round is abandoned, and the worker dispatched again unless the run is done."""
        again = self._worker(worker, "is dispatched again")
        self._check_time(now_s)
        if again.dispatch is None:
            raise ConfigError(f"worker {worker} is dispatched again, but it is in no round: it waits in a window. Tick instead.")
        abandoned = self._abandon(again.dispatch, now_s)
        again.dispatch = None
        return [abandoned] if self.done else [abandoned, self._dispatch(worker, now_s, version)]

    def tick(self, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """Time has passed, or `next_s` has become known: closes the window if it is due."""
        self._check_time(now_s)
        if self._opened_s is None or self.done or not self._is_due(now_s, next_s):
            return []
        closed = self._close(now_s)
        return [closed, *(self._dispatch(worker, now_s, version) for worker in closed.workers)]

    def _close(self, now_s: float) -> ClosedWindow:
        assert self._opened_s is not None
        idle_s = tuple(now_s - arrived_s for arrived_s in self._arrived_s.values())
        closed = ClosedWindow(self.windows, tuple(self._arrived_s), self._opened_s, now_s, idle_s)
        self.windows += 1
        self._opened_s, self._arrived_s = None, {}
        return closed

    def _is_due(self, now_s: float, next_s: float | None) -> bool:
        deadline_s = self.deadline_s
        assert deadline_s is not None
        if now_s > deadline_s or len(self._arrived_s) == len(self.workers):  # no worker is in a round
            return True
        if next_s is None or next_s < now_s:  # unknown, or an estimate that has proved wrong
            return now_s >= deadline_s
        return next_s > deadline_s

    def _check_time(self, now_s: float, *, record: bool = True) -> None:
        if not self._latest_s <= now_s < math.inf:
            raise ConfigError(
                f"the time is {now_s} s, and the last event was at {self._latest_s} s: time is finite and does not go back. Give "
                f"events in order, by one clock."
            )
        if record:
            self._latest_s = now_s

    def _worker(self, worker: int, what: str) -> Worker:
        if worker not in self.workers:
            raise ConfigError(f"worker {worker} {what}, but it is not one of the {len(self.workers)} workers. Let it join first.")
        return self.workers[worker]

    def _dispatch(self, worker: int, now_s: float, version: int) -> Dispatch:
        record = self.workers[worker]
        record.shard = self.shards.choose(record.shard, lambda: self._draw(self.rounds))
        steps = self.speeds.steps(worker)
        record.dispatch = Dispatch(worker, self.rounds, version, steps, self.shards.assign(record.shard, steps), now_s)
        self.rounds += 1
        return record.dispatch

    def _abandon(self, dispatch: Dispatch, now_s: float) -> AbandonedRound:
        self.shards.unassign(dispatch.work, dispatch.steps)
        return AbandonedRound(dispatch, now_s)

    # ------------------------------------------------------------------------------------------------------------- saving

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {
            "shards": self.shards.to_parts(),
            "speeds": self.speeds.to_parts(),
            "workers": [[i, w.shard, None if w.dispatch is None else _plain(w.dispatch)] for i, w in self.workers.items()],
            "counts": [self.local_updates, self.rounds, self.windows],
            "opened_s": self._opened_s,
            "latest_s": self._latest_s if math.isfinite(self._latest_s) else None,
            "arrived_s": [list(item) for item in self._arrived_s.items()],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.shards.from_parts(parts["shards"])
        self.speeds.from_parts(parts["speeds"])
        self.workers = {i: Worker(shard, None if d is None else _from_plain(d)) for i, shard, d in parts["workers"]}
        self.local_updates, self.rounds, self.windows = parts["counts"]
        self._opened_s = parts["opened_s"]
        self._latest_s = -math.inf if parts["latest_s"] is None else parts["latest_s"]
        self._arrived_s = {int(worker): float(arrived_s) for worker, arrived_s in parts["arrived_s"]}


def _plain(dispatch: Dispatch) -> list[Any]:
    work = dispatch.work
    return [*dispatch[:4], [work.shard, work.start, work.schedule, work.examples], dispatch.time_s]


def _from_plain(plain: Sequence[Any]) -> Dispatch:
    worker, round, version, steps, work, time_s = plain
    return Dispatch(worker, round, version, steps, Work(*work), time_s)


# -------------------------------------------------------------------------------------------- Dynamic Local Updates, eq. (6)
#     paper   v(w)    max v             H            w.steps = floor(v(w) / max v * H)
#     here    speed   fastest           plan.steps   dynamic_steps(speed, fastest, plan.steps)


def dynamic_steps(speed: float, fastest: float, most: int) -> int:
    """Eq. (6), at least 1.

    >>> [dynamic_steps(1 / step_time_s, 1 / 0.58, most=50) for step_time_s in (0.58, 0.75, 1.51, 3.33)]
    [50, 38, 19, 8]
    """
    # 1e-9 more, so that a worker of exactly half the speed does not lose a step to rounding.
    return max(1, math.floor(speed / fastest * most + 1e-9))


class WorkerSpeeds:
    """The speeds of all workers in steps per second, given or measured, and the steps of a round that follow from them. The
    reference is the fastest present worker. A worker whose speed is not known yet takes the steps of the fastest."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._present: dict[int, float | None] = {}
        self._left: dict[int, float] = {}  # measured speeds of workers that left: they may join again
        self._fastest: float | None = None  # of the present workers; None if it must be computed anew

    def join(self, speeds: Mapping[int, float | None]) -> None:
        """Workers join, with their speeds where the driver knows them. Refuses all of them if the plan needs speeds and one is not
        given, or not positive."""
        given = self._plan.pace == "given"
        self._present |= {w: self._given(w, known) if given else self._left.get(w) for w, known in speeds.items()}
        self._fastest = None

    def leave(self, worker: int) -> None:
        speed = self._present.pop(worker)
        if speed is not None:
            self._left[worker] = speed
        self._fastest = None

    def steps(self, worker: int) -> int:
        """Of this worker's next round."""
        speed = self._present[worker]
        if self._plan.pace == "even" or speed is None:
            return self._plan.steps
        if self._fastest is None:
            self._fastest = max(other for other in self._present.values() if other is not None)
        return dynamic_steps(speed, self._fastest, self._plan.steps)

    def measure(self, worker: int, steps: int, seconds: float) -> None:
        """Averages the known speed with that of this round: a lasting change shows after a few rounds, and a single slow round
        counts by half. A quotient that is no positive finite number is ignored."""
        if self._plan.pace != "measured" or not seconds > 0 or not 0 < steps / seconds < math.inf:
            return
        seen, before = steps / seconds, self._present[worker]
        speed = seen if before is None else before / 2 + seen / 2
        self._present[worker] = speed
        if self._fastest is not None and speed >= self._fastest:
            self._fastest = speed
        elif before is None or before == self._fastest:
            self._fastest = None

    def _given(self, worker: int, known: float | None) -> float:
        if self._plan.speeds:
            known = self._plan.speeds[worker] if worker < len(self._plan.speeds) else None
        if known is None or not 0 < known < math.inf:
            what = "no speed is given" if known is None else f"the speed is {known} steps per second"
            raise ConfigError(
                f"worker {worker}: {what}, and pace=given needs a positive one for every worker. Give `speeds` one figure per "
                f"worker, or use pace=measured."
            )
        return known

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {"present": [list(item) for item in self._present.items()], "left": [list(item) for item in self._left.items()]}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self._present = {int(worker): speed for worker, speed in parts["present"]}
        self._left = {int(worker): float(speed) for worker, speed in parts["left"]}
        self._fastest = None
