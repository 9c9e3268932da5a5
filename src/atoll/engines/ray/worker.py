"""A worker's process, an actor of Ray's: it pulls, trains and pushes until the run has its local updates.

It keeps a module, an inner optimizer and nothing else that matters. A hub that dies is waited for. What the hub does not know any
more is not insisted on: the worker pulls anew, and begins with a fresh optimizer if the hub says so.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.engines.dist.clock import WallClock
from atoll.engines.dist.diary import Stretch
from atoll.engines.dist.replica import DistReplica
from atoll.engines.local import LocalReplica
from atoll.engines.ray.reaching import Reach
from atoll.engines.ray.wire import Brought, Ticket, Told, Verdict, arrays_of, bits_of, expect_read_only, own_tree
from atoll.errors import ConfigError, ExchangeFailed
from atoll.protocols import AsyncAlgorithm, Task
from atoll.tree import Tree


class Makes(Protocol):
    """Makes what a worker trains; has read the data once for all."""

    @property
    def fingerprint(self) -> str:
        """Of the data."""

    def replica(self, number: int) -> LocalReplica:
        """A worker's replica, with a fresh optimizer."""


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """What a worker is made of.

    Attributes:
        number: its place among all.
        life: which of those who have held that place it is.
        algorithm: what it does.
        make: reads its data, and then makes what it trains.
        threads: of torch.
        pause_s: so long it sleeps besides for each batch, to play a slower machine.
        limit_s: how long a hub that does not answer is waited for.
        log: where it writes its log.
    """

    number: int
    life: int
    algorithm: AsyncAlgorithm[Any]
    make: Callable[[], Makes]
    threads: int
    pause_s: float
    limit_s: float
    log: Path


class Worker:
    """A worker's process.

    Args:
        order: what it is made of.
        ray: the library.
        hub: the actor it works for.
    """

    def __init__(self, order: WorkerOrder, ray: Any, hub: Any) -> None:
        torch.set_num_threads(order.threads)
        expect_read_only()
        self._order, self._ray = order, ray
        self.reach = Reach(ray, hub, limit_s=order.limit_s, say=self.say)
        self._about = f"process {os.getpid()} on {platform.node()}, {order.threads} thread(s)"
        self.say(f"worker {order.number}, life {order.life}: {self._about}")
        self._clock = WallClock()
        self._made: Makes | None = None
        self._replica: LocalReplica | None = None
        self._last: Ticket | None = None

    def say(self, text: str) -> None:
        """Write a line into the worker's own log, if there is room for one."""
        with suppress(OSError):
            self._order.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._order.log, "a", encoding="utf-8") as file:
                print(f"{time.strftime('%H:%M:%S')} {text}", file=file)

    def work(self) -> int:
        """Until there is nothing left to do. How many rounds it took part in."""
        rounds = 0
        self._made = self._order.make()
        self._introduce()
        while True:
            told: Told = self.reach.ask("pull", self._order.number, self._order.life, self._last)
            match told.word:
                case "over" | "replaced":
                    self.say(f"ends after {rounds} rounds: {told.word}")
                    return rounds
                case "hello":
                    self._introduce()
                case "go":
                    if told.fresh:
                        self._begin_anew("the hub does not know its last round")
                    rounds += self._round(told)
                case "wait":
                    pass

    def _introduce(self) -> None:
        assert self._made is not None
        self._begin_anew("it is new to the hub" if self._last is not None else "")
        reason = self.reach.ask("hello", self._order.number, self._order.life, self._made.fingerprint, self._about)
        if reason:
            raise ConfigError(reason)

    def _begin_anew(self, why: str) -> None:
        """With a fresh inner optimizer."""
        if self._replica is None or why:
            assert self._made is not None
            self._replica = self._made.replica(self._order.number)
        self._last = None
        if why:
            self.say(f"begins anew: {why}")

    def _round(self, told: Told) -> int:
        """One round; whether there was one."""
        self._clock.set(told.now_s)
        bits = self._fetched(told)
        if bits is None:
            return 0
        assert self._replica is not None
        layout = self._replica.weights.layout
        params = own_tree(bits, layout, told.dtype, self._replica.device)
        del bits  # the store may have its room back
        visit = _Visit(self, told, params, self._clock.now_s())
        self.reach.hub.began.remote(self._order.number, self._order.life, told.ticket, visit.begin_s)
        replica = DistReplica(
            self._replica,
            clock=self._clock,
            note=visit.stretches.append,
            pause_s=self._order.pause_s,
            where=lambda step: f"worker {self._order.number}, at step {step} of round {told.ticket[0]}",
        )
        _drive(self._order.algorithm.round(replica, visit), visit)
        if not params.given:
            params.release()
        return 1

    def _fetched(self, told: Told) -> Any:
        """The weights; none if they were lost with the hub that had published them: the next one publishes them again."""
        try:
            return self._ray.get(told.weights[0])
        except self.reach.gone as error:
            self.say(f"the weights of round {told.ticket[0]} are lost ({type(error).__name__}); it asks again")
            return None

    def push(self, visit: _Visit, delta: Tree) -> None:
        """Bring a delta, and hear what became of it."""
        assert self._replica is not None
        brought = Brought(
            self._order.number,
            self._order.life,
            visit.told.ticket,
            visit.begin_s,
            self._clock.now_s(),
            tuple(visit.stretches),
            arrays_of(self._replica.buffers()),
        )
        reference = self._ray.put(bits_of(delta))  # once, also if it has to be sent again
        if delta.spare:
            delta.release()
        verdict: Verdict = self.reach.ask("push", brought, reference)
        self._last = visit.told.ticket
        if verdict == "refused":
            # Its moments are as unusable as what it brought.
            assert self._made is not None
            self._replica = self._made.replica(self._order.number)
        if verdict not in ("taken", "over"):
            self.say(f"round {visit.told.ticket[0]}: {verdict}")


class _Visit:
    """The hub, seen from one worker in one round. A protocols.Hub."""

    def __init__(self, worker: Worker, told: Told, params: Tree, begin_s: float) -> None:
        self._worker, self.told, self._params, self.begin_s = worker, told, params, begin_s
        self.stretches: list[Stretch] = []
        self.pushed = False

    async def pull(self) -> Task:
        assert self.told.work is not None
        return Task(self._params, self.told.steps, self.told.work)

    async def push(self, delta: Tree) -> None:
        self.pushed = True
        self._worker.push(self, delta)


def _drive(coroutine: Coroutine[Any, Any, None], visit: _Visit) -> None:
    """A worker's round, to its end: here nothing that it awaits is still to come."""
    try:
        coroutine.send(None)
    except StopIteration:
        if not visit.pushed:
            raise ExchangeFailed(
                "the round of a worker ended without a push, so the hub would wait for it for ever. Every round must end with "
                "`await hub.push(...)`."
            ) from None
        return
    coroutine.close()
    raise ExchangeFailed("the round of a worker awaits something that is neither its replica's nor its hub's. Await these alone.")
