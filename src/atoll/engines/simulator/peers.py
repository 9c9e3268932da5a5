"""What an algorithm is handed in the simulator: a replica whose training takes virtual time, and peers it can meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.simulator.collectives import Contribution, SimCollectives
from atoll.engines.simulator.virtual_clock import ClockTask, VirtualClock, Wait
from atoll.replica.local_replica import ComputeResult, GradientJob, LocalReplica, TrainJob

S = TypeVar("S")
T = TypeVar("T")


class Computes(Protocol):
    """What an engine does for an island's replica."""

    def compute(
        self, island: int, function: Callable[[], tuple[Any, ComputeResult]], *, steps: int, batches: float, draw: str | None = None
    ) -> Wait:
        """`draw` names what the time it takes is drawn by, where that is not the stretch itself."""


class Host(Computes, Protocol):
    """What an engine does for an island's peers besides."""

    def hand_out(self, island: int, steps: int, batches: int, pieces: int) -> Work: ...

    def catch_up(self, island: int, state: Any) -> Wait | None: ...


class SimReplica:
    """An island's model under the virtual clock."""

    def __init__(self, host: Computes, island: int, replica: LocalReplica) -> None:
        self._host, self._island, self._replica = host, island, replica

    def load(self, params: Tree) -> None:
        self._replica.load(params)

    def params(self) -> Tree:
        return self._replica.borrowed()

    async def train(self, steps: int, work: Work) -> None:
        await self._host.compute(self._island, TrainJob(self._replica, steps, work), steps=steps, batches=steps)

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        gradient: Gradient = await self._host.compute(
            self._island,
            GradientJob(self._replica, work, at, onto, weigh, wide),
            steps=0,  # what is made of gradients is one update a round, and counted there
            batches=1 / work.pieces if work.pieces > 1 else 1,
            draw=f"{work.shard}.{work.start // work.pieces}" if work.pieces > 1 else None,  # pieces of a batch are slow together
        )
        return gradient


class SimPeers:
    """The islands of one round, seen from one of them."""

    def __init__(self, host: Host, room: SimCollectives, rank: int, loop: VirtualClock | None = None) -> None:
        self._host, self._room, self._rank, self._loop = host, room, rank, loop
        self._calls = itertools.count()
        self._flight: SimFlight | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._room.islands)

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        return self._host.hand_out(self._room.islands[self._rank], steps, steps if batches is None else batches, pieces)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        mean: Mean = await self._meet("mean", tree, weight, compare)
        return mean

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        tree = tree if wire in (None, tree.flat.dtype) else tree.claim(wire)
        scattered: Scattered = await self._meet("reduce_scatter", tree, weight, wide)
        return scattered

    async def all_gather(self, shard: Tree) -> Tree:
        whole: Tree = await self._meet("all_gather", shard)
        return whole

    async def total(self, number: float) -> float:
        total: float = await self._meet("total", _NOTHING, number)
        return total

    async def catch_up(self, state: S) -> S:
        wait = self._host.catch_up(self._room.islands[self._rank], state)
        return state if wait is None else await wait

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> SimFlight:
        assert self._loop is not None, "between two rounds nothing is sent"
        if self.flying:
            coroutine.close()
            raise ExchangeFailed(f"{self._room.name(self._rank)} has a flight open already. Await it before the next.")
        flight = self._flight = SimFlight()
        self._loop.launch(f"flight of {self._room.name(self._rank)}", coroutine, flight.land)
        return flight

    @property
    def flying(self) -> bool:
        """Whether a flight is open."""
        return self._flight is not None and not self._flight.done()

    def _meet(self, what: str, tree: Tree, weight: float = 1.0, option: bool = False) -> Wait:
        call = next(self._calls)

        def start(task: ClockTask) -> None:
            if self.flying and not task.flight:
                raise ExchangeFailed(
                    f"{self._room.name(self._rank)} comes to a {what} while its flight is open: its exchanges would "
                    f"overtake each other. Await the flight first, or exchange within it."
                )
            self._room.arrive(call, what, Contribution(self._rank, task, task.now_s, tree, weight), option)

        return Wait(start)


_NOTHING = Tree.of({})


class SimFlight:
    """A coroutine of an island beside its main one. A protocols.Flight."""

    def __init__(self) -> None:
        self._over = False
        self._result: Any = None
        self._waiting: ClockTask | None = None

    def done(self) -> bool:
        return self._over

    def __await__(self) -> Generator[Wait, Any, Any]:
        return Wait(self._wait).__await__()

    def _wait(self, task: ClockTask) -> None:
        self._waiting = task
        if self._over:
            self._resume(task.now_s)

    def land(self, task: ClockTask) -> None:
        """The coroutine is through."""
        self._over, self._result = True, task.result
        if self._waiting is not None:
            self._resume(task.now_s)

    def _resume(self, time_s: float) -> None:
        assert self._waiting is not None
        result, self._result = self._result, None  # it may be as large as the model
        self._waiting.resume_at(time_s, lambda: result)
