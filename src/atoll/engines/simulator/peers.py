"""What the simulator gives an algorithm: a replica whose computing takes virtual time, and peers to exchange with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.simulator.collectives import Contribution, SimCollectives
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.engines.training_setup import ReplicaAccess
from atoll.replica.local_replica import ComputeJob, GradientJob, LocalReplica, TrainJob

S = TypeVar("S")
T = TypeVar("T")
_NOTHING = Tree.of({})


class SimReplica(ReplicaAccess):
    """A replica whose jobs take virtual time, as `compute` decides. A protocols.Replica."""

    def __init__(self, replica: LocalReplica, compute: Callable[[ComputeJob], Wait]) -> None:
        super().__init__(replica)
        self._compute = compute

    async def train(self, steps: int, work: Work) -> int:
        tokens: int = await self._compute(TrainJob(self._replica, steps, work))
        return tokens

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        gradient: Gradient = await self._compute(GradientJob(self._replica, work, at, onto, weigh, wide))
        return gradient


class SimFlight:
    """A background coroutine of a member. A protocols.PendingExchange."""

    def __init__(self) -> None:
        self._done = False
        self._result: Any = None
        self._waiting: ClockTask | None = None
        self._next: ClockTask | None = None
        """The flight that was started after this one, if it waits for the link."""

    def done(self) -> bool:
        return self._done

    def __await__(self) -> Generator[Wait, Any, Any]:
        return Wait(self._wait).__await__()

    def _wait(self, task: ClockTask) -> None:
        self._waiting = task
        if self._done:
            self._resume(task.now_s)

    async def follow(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine of the next flight, from the end of this one."""
        await Wait(self._queue)
        return await coroutine

    def _queue(self, task: ClockTask) -> None:
        self._next = task

    def finish(self, task: ClockTask) -> None:
        self._done, self._result = True, task.result
        if self._next is not None:
            self._next.resume_at(task.now_s, lambda: None)
        if self._waiting is not None:
            self._resume(task.now_s)

    def _resume(self, time_s: float) -> None:
        assert self._waiting is not None
        result, self._result = self._result, None  # it may be as large as the model
        self._waiting.resume_at(time_s, lambda: result)


class SimPeers:
    """The members of one round, seen from one of them. A protocols.Peers. Without a clock it exchanges nothing. Its first work has
    this schedule position; `catch_up` fetches shared fields that it missed, or returns None."""

    def __init__(
        self,
        collectives: SimCollectives,
        rank: int,
        clock: VirtualClock | None = None,
        schedule: int = 0,
        catch_up: Callable[[Any], Wait | None] = lambda state: None,
    ) -> None:
        self.rank, self.size, self._name = rank, len(collectives.members), collectives.name(rank)
        self._collectives, self._clock, self._schedule, self._catch_up = collectives, clock, schedule, catch_up
        self._calls = itertools.count()
        self._flights: list[SimFlight] = []
        """Those that may still be open."""

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        member, inside, schedule = self._collectives.members[self.rank], self._collectives.inside, self._schedule
        island, device = (member, None) if inside is None else (inside, member)
        if device is None:  # a round inside has one position
            self._schedule += steps
        return self._collectives.work.assign(island, device, steps if batches is None else batches, pieces, schedule)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        mean: Mean = await self._exchange("mean", tree, weight, compare, encoding)
        return mean

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        tree = tree if wire in (None, tree.flat.dtype) else tree.claim(wire)
        scattered: Scattered = await self._exchange("reduce_scatter", tree, weight, wide)
        return scattered

    async def all_gather(self, shard: Tree) -> Tree:
        whole: Tree = await self._exchange("all_gather", shard)
        return whole

    async def total(self, number: float) -> float:
        total: float = await self._exchange("total", _NOTHING, number)
        return total

    async def catch_up(self, state: S) -> S:
        # A round that is over has nothing for a late island: the newest weights are those of a later round.
        wait = self._catch_up(state) if self.rank not in self._collectives.late else None
        return state if wait is None else await wait

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> SimFlight:
        assert self._clock is not None, "between two rounds nothing is sent"
        flight, before = SimFlight(), [each for each in self._flights if not each.done()]
        self._flights = [*before, flight]
        queued = before[-1].follow(coroutine) if before else coroutine
        self._clock.launch(f"flight of {self._name}", queued, flight.finish)
        return flight

    @property
    def has_flight(self) -> bool:
        """Whether a flight is open."""
        return not all(flight.done() for flight in self._flights)

    def check_closed(self) -> None:
        """Called when the member leaves the round."""
        if self.has_flight:
            raise ExchangeFailed(
                f"{self._name} leaves round {self._collectives.round} with a background exchange open. Await it within the round."
            )

    def _exchange(self, what: str, tree: Tree, weight: float = 1.0, option: bool = False, encoding: Encoding | None = None) -> Wait:
        call = next(self._calls)

        def start(task: ClockTask) -> None:
            if self.has_flight and not task.flight:
                raise ExchangeFailed(
                    f"{self._name} calls {what} while its background exchange is open: the two would overtake each other. Await "
                    f"the background exchange first, or exchange within it."
                )
            self._collectives.contribute(call, what, Contribution(self.rank, task, tree, weight, encoding), option)

        return Wait(start)
