"""The task scheduler of asynchronous Local-SGD: which worker trains on which shard, for how many steps, and when.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, Algorithms 2, 4 and 5 and eqs. (2), (3), (6).

A worker that arrives opens a **grace window**. Workers that arrive within `grace_s` of that first arrival are dispatched together,
from the same weights, when the window closes; the hub applies each update when it arrives. A dispatched worker gets

    a shard       sampled by how far each lags behind its share of the data (eq. 2), counted at once, so that workers which are
                  dispatched together do not choose the same
    a position    in the shard and on the learning-rate schedule: both follow the shard, not the worker (eq. 3)
    steps         the same for all, or in proportion to its speed (eq. 6), at least one

The scheduler has no clock. Each event carries the time and `next_s`: the earliest time at which another dispatched worker can still
arrive (None: unknown). A window closes when `next_s` lies beyond its deadline, when no worker is in a round, or at its deadline,
whichever is known first. The scheduler returns its decisions in order, and its driver carries them out. So the simulator and a
real engine drive the same object, and a test drives it by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.algorithms.dynamic_local_updates import Pace
from atoll.algorithms.shard_sampler import Shards
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


class Closing(NamedTuple):
    """A window closes. `workers` arrived in it, in this order, and `idle_s` is how long each waited."""

    window: int
    workers: tuple[int, ...]
    opened_s: float
    time_s: float
    idle_s: tuple[float, ...]


class Return(NamedTuple):
    """A round ended without an update: its data was put back."""

    dispatch: Dispatch
    time_s: float


Decision = Dispatch | Closing | Return


@dataclass
class Worker:
    """A worker that has joined.

    Attributes:
        shard: the one it worked on last; at first the one of its number.
        out: its dispatch; None while it waits in a window.
    """

    shard: int
    out: Dispatch | None = None


class Scheduler:
    """The state machine.

    Args:
        plan: the algorithm's.
        examples: of each shard.
        updates: local updates after which no worker is dispatched any more.
        draw: for each round a number in [0, 1), always the same: where chance decides, it decides by this.
    """

    def __init__(self, plan: Plan, examples: Sequence[int], updates: int, draw: Callable[[int], float]) -> None:
        self.plan = plan
        self.shards = Shards(examples, plan.shards, plan.ties)
        self.pace = Pace(plan)
        self.workers: dict[int, Worker] = {}
        self.updates = updates
        self.local_updates = 0
        """Steps of all rounds that arrived."""
        self.rounds = 0
        """Rounds that were begun."""
        self.windows = 0
        """Windows that are over."""
        self._draw = draw
        self._opened_s: float | None = None
        self._arrived_s: dict[int, float] = {}
        """When each worker that waits in the window arrived, in order."""
        self._latest_s = -math.inf
        """The time of the last event."""

    # ---------------------------------------------------------------------------------------------------- what may be asked

    @property
    def done(self) -> bool:
        return self.local_updates >= self.updates

    @property
    def deadline_s(self) -> float | None:
        """When the open window runs out; none if none is open. A driver that does not know the next arrival ticks then."""
        return None if self._opened_s is None else self._opened_s + self.plan.grace_s

    def out(self, worker: int, round: int) -> Dispatch | None:
        """The worker's dispatch, if the worker is in this round."""
        dispatch = self.workers[worker].out if worker in self.workers else None
        return dispatch if dispatch is not None and dispatch.round == round else None

    # ------------------------------------------------------------------------------------------------------------- events

    def join(self, worker: int, now_s: float, version: int, speed: float | None = None) -> list[Decision]:
        """A worker joins and is dispatched at once. `speed` is in steps per second, where the driver knows it."""
        return self.join_all({worker: speed}, now_s, version)

    def join_all(self, speeds: Mapping[int, float | None], now_s: float, version: int) -> list[Decision]:
        """Several workers join, with their speeds where the driver knows them. All are known before the first is dispatched, so
        that each takes its steps in proportion to the fastest of all."""
        for worker in speeds:
            if worker in self.workers or worker < 0:
                why = "it is here already. Let it leave first" if worker in self.workers else "numbers begin at 0"
                raise ConfigError(f"worker {worker} joins, but {why}, or give it another number.")
        self._check_time(now_s, note=False)
        self.pace.join(speeds)
        self._latest_s = now_s
        self.workers |= {worker: Worker(worker % len(self.shards)) for worker in speeds}
        return [] if self.done else [self._send_off(worker, now_s, version) for worker in speeds]

    def leave(self, worker: int, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """A worker leaves: the data of its round is put back. A window in which only it waited is over."""
        gone = self._worker(worker, "leaves")
        self._check_time(now_s)
        del self.workers[worker]
        self.pace.leave(worker)
        returned: list[Decision] = [self._put_back(gone.out, now_s)] if gone.out is not None else []
        if self._arrived_s.pop(worker, None) is not None and not self._arrived_s:
            return [*returned, self._close(now_s)]
        return [*returned, *self.tick(now_s, version, next_s)]

    def arrive(
        self, worker: int, now_s: float, version: int, next_s: float | None, seconds: float | None = None
    ) -> tuple[int, list[Decision]]:
        """A dispatched worker has arrived, and its update was applied. Returns its window and the decisions that follow.

        The driver ticks before it applies the update, in case the window before had run out. `seconds` is how long the
        worker computed, where it is known; else the time since its dispatch counts.
        """
        here = self._worker(worker, "arrives")
        self._check_time(now_s)
        assert here.out is not None, f"worker {worker} is not out"
        self.pace.measure(worker, here.out.steps, now_s - here.out.time_s if seconds is None else seconds)
        self.local_updates += here.out.steps
        here.out = None
        self._arrived_s[worker] = now_s
        self._opened_s = now_s if self._opened_s is None else self._opened_s
        return self.windows, self.tick(now_s, version, next_s)

    def send_again(self, worker: int, now_s: float, version: int) -> list[Decision]:
        """The worker's update cannot be used: the data is put back and the worker is dispatched again, unless the run is done."""
        here = self._worker(worker, "is sent off again")
        self._check_time(now_s)
        if here.out is None:
            raise ConfigError(f"worker {worker} is sent off again, but it is not out: it waits in a window. Tick instead.")
        returned = self._put_back(here.out, now_s)
        here.out = None
        return [returned] if self.done else [returned, self._send_off(worker, now_s, version)]

    def tick(self, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """Time has passed, or something is known that was not: closes the window if it is time."""
        self._check_time(now_s)
        if self._opened_s is None or self.done or not self._is_over(now_s, next_s):
            return []
        closing = self._close(now_s)
        return [closing, *(self._send_off(worker, now_s, version) for worker in closing.workers)]

    def _close(self, now_s: float) -> Closing:
        assert self._opened_s is not None
        idle_s = tuple(now_s - arrived_s for arrived_s in self._arrived_s.values())
        closing = Closing(self.windows, tuple(self._arrived_s), self._opened_s, now_s, idle_s)
        self.windows += 1
        self._opened_s, self._arrived_s = None, {}
        return closing

    def _is_over(self, now_s: float, next_s: float | None) -> bool:
        deadline_s = self.deadline_s
        assert deadline_s is not None
        if now_s > deadline_s or len(self._arrived_s) == len(self.workers):  # no worker is in a round
            return True
        if next_s is None or next_s < now_s:  # unknown, or an estimate that has proved wrong
            return now_s >= deadline_s
        return next_s > deadline_s

    def _check_time(self, now_s: float, *, note: bool = True) -> None:
        if not self._latest_s <= now_s < math.inf:
            raise ConfigError(
                f"the time is {now_s} s, and the last event was at {self._latest_s} s: time is finite and does not go back. Give "
                f"events in order, by one clock."
            )
        if note:
            self._latest_s = now_s

    def _worker(self, worker: int, what: str) -> Worker:
        if worker not in self.workers:
            raise ConfigError(f"worker {worker} {what}, but it is not here. There are {len(self.workers)}: let it join first.")
        return self.workers[worker]

    # --------------------------------------------------------------------------------------------------------- sending off

    def _send_off(self, worker: int, now_s: float, version: int) -> Dispatch:
        here = self.workers[worker]
        here.shard = self.shards.choose(here.shard, lambda: self._draw(self.rounds))
        steps = self.steps_of(worker)
        here.out = Dispatch(worker, self.rounds, version, steps, self.shards.hand_out(here.shard, steps), now_s)
        self.rounds += 1
        return here.out

    def _put_back(self, dispatch: Dispatch, now_s: float) -> Return:
        self.shards.put_back(dispatch.work, dispatch.steps)
        return Return(dispatch, now_s)

    def steps_of(self, worker: int) -> int:
        """How many steps this worker's next round has."""
        return self.pace.steps(worker)

    # ------------------------------------------------------------------------------------------------------------- saving

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {
            "shards": self.shards.to_parts(),
            "pace": self.pace.to_parts(),
            "workers": [[i, w.shard, None if w.out is None else _plain(w.out)] for i, w in self.workers.items()],
            "counts": [self.local_updates, self.rounds, self.windows],
            "opened_s": self._opened_s,
            "latest_s": self._latest_s if math.isfinite(self._latest_s) else None,
            "arrived_s": [list(item) for item in self._arrived_s.items()],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.shards.from_parts(parts["shards"])
        self.pace.from_parts(parts["pace"])
        self.workers = {i: Worker(shard, None if out is None else _dispatch(out)) for i, shard, out in parts["workers"]}
        self.local_updates, self.rounds, self.windows = parts["counts"]
        self._opened_s = parts["opened_s"]
        self._latest_s = -math.inf if parts["latest_s"] is None else parts["latest_s"]
        self._arrived_s = {int(worker): float(arrived_s) for worker, arrived_s in parts["arrived_s"]}


def _plain(dispatch: Dispatch) -> list[Any]:
    work = dispatch.work
    return [*dispatch[:4], [work.shard, work.start, work.schedule, work.examples], dispatch.time_s]


def _dispatch(plain: Sequence[Any]) -> Dispatch:
    worker, round, version, steps, work, time_s = plain
    return Dispatch(worker, round, version, steps, Work(*work), time_s)
