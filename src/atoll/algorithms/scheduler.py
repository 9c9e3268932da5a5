"""Who works on what, for how long, and when: the task scheduler of asynchronous Local-SGD.

Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, Algorithms 2, 4 and 5 and eqs. (2), (3), (6).

A worker that arrives opens a **grace window**. Whoever arrives within `grace_s` of that first arrival is sent off together with it,
from the same weights, when the window closes; the hub applies each update when it comes. On being sent off a worker is given

    a shard       sampled by how far each lags behind its share of the data (eq. 2), counted at once, so that workers which are
                  sent off together do not choose the same
    a position    in the shard and on the learning-rate schedule: both follow the shard, whoever works on it (eq. 3)
    steps         the same for all, or in proportion to its speed (eq. 6), at least one

The scheduler neither sleeps nor asks for the time. With each event it is told the time, and `next_s`: the earliest time at which
another worker that is out can still arrive, as far as that is known (none: unknown). A window closes as soon as that lies beyond
it, when nobody is out, or when it has run out, whichever is known first. What it decides it returns, in order, and whoever drives
it carries that out. So the simulator and a real engine drive the same object, and a test drives it by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.algorithms.shards import Shards
from atoll.errors import ConfigError
from atoll.protocols import Plan, Work


class Dispatch(NamedTuple):
    """A worker is sent off. `round` numbers all rounds of the run; a push must carry it. `version` is the hub's at that moment."""

    worker: int
    round: int
    version: int
    steps: int
    work: Work
    time_s: float


class Closing(NamedTuple):
    """A window closes. `workers` are those who arrived in it, in order, and `idle_s` is how long each waited."""

    window: int
    workers: tuple[int, ...]
    opened_s: float
    time_s: float
    idle_s: tuple[float, ...]


class Return(NamedTuple):
    """A round ended without an update: what it was counted for was put back."""

    dispatch: Dispatch
    time_s: float


Decision = Dispatch | Closing | Return


@dataclass
class Worker:
    """A worker that is there.

    Attributes:
        shard: the one it worked on last; at first the one of its number.
        speed: in steps per second, as far as it is known.
        out: with what it was sent off; none while it waits in a window.
    """

    shard: int
    speed: float | None
    out: Dispatch | None = None


class Scheduler:
    """The state machine.

    Args:
        plan: the algorithm's.
        examples: of each shard.
        updates: local updates after which nobody is sent off any more.
        draw: for each round a number in [0, 1), always the same: where chance decides, it decides by this.
    """

    def __init__(self, plan: Plan, examples: Sequence[int], updates: int, draw: Callable[[int], float]) -> None:
        self.plan = plan
        self.shards = Shards(examples, plan.shards, plan.ties)
        self.workers: dict[int, Worker] = {}
        self.updates = updates
        self.local_updates = 0
        """Steps of all rounds that arrived."""
        self.rounds = 0
        """Rounds that were begun."""
        self.windows = 0
        """Windows that are closed."""
        self._draw = draw
        self._opened_s: float | None = None
        self._arrived_s: dict[int, float] = {}
        """When those who wait in the window came, in order."""
        self._fastest: float | None = None
        """The greatest of all speeds; none if it must be looked for."""

    # ---------------------------------------------------------------------------------------------------- what may be asked

    @property
    def done(self) -> bool:
        return self.local_updates >= self.updates

    @property
    def deadline_s(self) -> float | None:
        """When the open window runs out; none if none is open. A driver that does not know who comes next ticks then."""
        return None if self._opened_s is None else self._opened_s + self.plan.grace_s

    def out(self, worker: int, round: int) -> Dispatch | None:
        """With what the worker was sent off, if it is out and in this round."""
        dispatch = self.workers[worker].out if worker in self.workers else None
        return dispatch if dispatch is not None and dispatch.round == round else None

    # ------------------------------------------------------------------------------------------------------------- events

    def join(self, worker: int, now_s: float, version: int, speed: float | None = None) -> list[Decision]:
        """A worker is there, and is sent off at once. `speed` is in steps per second, where the driver knows it."""
        if worker in self.workers:
            raise ConfigError(f"worker {worker} joins, but it is here already. Let it leave first, or give it another number.")
        self.workers[worker] = Worker(worker % len(self.shards), self._given_speed(worker, speed))
        self._fastest = None
        return [] if self.done else [self._send_off(worker, now_s, version)]

    def leave(self, worker: int, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """A worker is gone: what it was out with is put back, and nobody waits for it."""
        gone = self.workers.pop(worker, None)
        if gone is None:
            raise ConfigError(f"worker {worker} leaves, but it is not here. There are: {sorted(self.workers)}.")
        self._fastest = None
        self._arrived_s.pop(worker, None)
        returned = [self._put_back(gone.out, now_s)] if gone.out is not None else []
        if not self._arrived_s:
            self._opened_s = None
        return [*returned, *self.tick(now_s, version, next_s)]

    def arrive(
        self, worker: int, now_s: float, version: int, next_s: float | None, seconds: float | None = None
    ) -> tuple[int, list[Decision]]:
        """A worker that is out has come, and its update was applied. The window it fell into, and what follows.

        The driver ticks before it applies the update, in case the window before had run out. `seconds` is how long the
        worker computed, where it is known; else the time since it was sent off counts.
        """
        here = self.workers[worker]
        assert here.out is not None, f"worker {worker} is not out"
        self._measure(worker, here.out.steps, now_s - here.out.time_s if seconds is None else seconds)
        self.local_updates += here.out.steps
        here.out = None
        self._arrived_s[worker] = now_s
        self._opened_s = now_s if self._opened_s is None else self._opened_s
        return self.windows, self.tick(now_s, version, next_s)

    def send_again(self, worker: int, now_s: float, version: int) -> list[Decision]:
        """What the worker brought cannot be used: the round is put back, and the worker sent off anew, unless all is done."""
        here = self.workers[worker]
        assert here.out is not None, f"worker {worker} is not out"
        returned = self._put_back(here.out, now_s)
        here.out = None
        return [returned] if self.done else [returned, self._send_off(worker, now_s, version)]

    def tick(self, now_s: float, version: int, next_s: float | None = None) -> list[Decision]:
        """Time has passed, or something is known that was not: closes the window if it is time."""
        if self._opened_s is None or self.done or not self._is_over(now_s, next_s):
            return []
        workers = tuple(self._arrived_s)
        idle_s = tuple(now_s - arrived_s for arrived_s in self._arrived_s.values())
        closing = Closing(self.windows, workers, self._opened_s, now_s, idle_s)
        self.windows += 1
        self._opened_s, self._arrived_s = None, {}
        return [closing, *(self._send_off(worker, now_s, version) for worker in workers)]

    def _is_over(self, now_s: float, next_s: float | None) -> bool:
        deadline_s = self.deadline_s
        assert deadline_s is not None
        if now_s > deadline_s or len(self._arrived_s) == len(self.workers):  # nobody is out
            return True
        return now_s >= deadline_s if next_s is None else next_s > deadline_s

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

    # --------------------------------------------------------------------------------------------------------------- pace

    def steps_of(self, worker: int) -> int:
        """How many steps a round of this worker has (eq. 6). One whose speed is not known yet takes those of the fastest."""
        speed = self.workers[worker].speed
        if self.plan.pace == "even" or speed is None:
            return self.plan.steps
        if self._fastest is None:
            self._fastest = max(other.speed for other in self.workers.values() if other.speed is not None)
        # A hair more, so that a worker of exactly half the speed does not lose a step to rounding.
        return max(1, math.floor(speed / self._fastest * self.plan.steps + 1e-9))

    def _given_speed(self, worker: int, known: float | None) -> float | None:
        if self.plan.pace != "given":
            return None
        if self.plan.speeds:
            known = self.plan.speeds[worker] if worker < len(self.plan.speeds) else None
        if known is None or not 0 < known < math.inf:
            what = "no speed is given" if known is None else f"the speed is {known} steps per second"
            raise ConfigError(
                f"worker {worker}: {what}, and pace=given needs a positive one for every worker. Give `speeds` one figure per "
                f"worker, or use pace=measured."
            )
        return known

    def _measure(self, worker: int, steps: int, seconds: float) -> None:
        """Half of what is known is replaced by what was just seen: a worker that slows down or recovers is known in a few rounds,
        and a single hiccup does not count for the whole."""
        here = self.workers[worker]
        if self.plan.pace != "measured" or not seconds > 0:
            return
        seen, before = steps / seconds, here.speed
        here.speed = seen if before is None else (before + seen) / 2
        if self._fastest is not None and here.speed >= self._fastest:
            self._fastest = here.speed
        elif before is None or before == self._fastest:
            self._fastest = None

    # ------------------------------------------------------------------------------------------------------------- saving

    def to_parts(self) -> dict[str, Any]:
        """All of its state, as plain data."""
        return {
            "shards": self.shards.to_parts(),
            "workers": [[i, w.shard, w.speed, None if w.out is None else _plain(w.out)] for i, w in self.workers.items()],
            "counts": [self.local_updates, self.rounds, self.windows],
            "opened_s": self._opened_s,
            "arrived_s": [list(item) for item in self._arrived_s.items()],
        }

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        self.shards.from_parts(parts["shards"])
        self.workers = {
            i: Worker(shard, speed, None if out is None else _dispatch(out)) for i, shard, speed, out in parts["workers"]
        }
        self.local_updates, self.rounds, self.windows = parts["counts"]
        self._opened_s = parts["opened_s"]
        self._arrived_s = {int(worker): float(arrived_s) for worker, arrived_s in parts["arrived_s"]}
        self._fastest = None


def _plain(dispatch: Dispatch) -> list[Any]:
    work = dispatch.work
    return [*dispatch[:4], [work.shard, work.start, work.schedule, work.examples], dispatch.time_s]


def _dispatch(plain: Sequence[Any]) -> Dispatch:
    worker, round, version, steps, work, time_s = plain
    return Dispatch(worker, round, version, steps, Work(*work), time_s)
