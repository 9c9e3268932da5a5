"""A worker's process, an actor of Ray's: it pulls, trains and pushes until the run has its local updates.

It keeps a module, an inner optimizer and nothing else that matters. A hub that dies is waited for. What the hub does not know any
more is not insisted on: the worker pulls anew, and begins with a fresh optimizer if the hub says so.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Task
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.ray.hub_client import Reach
from atoll.engines.ray.messages import Brought, Ticket, Told, Verdict, arrays_of, bits_of, expect_read_only, own_tree
from atoll.engines.round_record import ComputeRecord
from atoll.engines.wall_clock import WallClock
from atoll.engines.worker_round import run_worker_round
from atoll.replica.local_replica import LocalReplica

_ANSWER_S = 5.0  # so long a pull waits for work before it is answered with nothing


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
        self.say(f"incarnation {order.life}: {self._about}")
        self._clock = WallClock()
        self._made: Makes | None = None
        self._replica: LocalReplica | None = None
        self._last: Ticket | None = None

    def say(self, text: str) -> None:
        """Write a line into the worker's log: in the run's folder if this machine has that, else into Ray's logs here."""
        line = f"{time.strftime('%H:%M:%S')} worker {self._order.number}: {text}"
        if not self._order.log.parent.is_dir():
            sys.stdout.write(line + "\n")
            return
        with suppress(OSError), open(self._order.log, "a", encoding="utf-8") as file:  # a full disk is no reason to stop
            print(line, file=file)

    def work(self) -> int:
        """Until there is nothing left to do. How many rounds it took part in."""
        try:
            return self._work()
        except Exception:
            self.say(traceback.format_exc())
            raise

    def _work(self) -> int:
        rounds = 0
        self._made = self._order.make()
        self._introduce()
        while True:
            told: Told = self.reach.ask("pull", self._order.number, self._order.life, self._last, self.reach.patience_s(_ANSWER_S))
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
        bits = self.reach.fetch(told.weights)
        if bits is None:
            return 0
        assert self._replica is not None
        assert told.work is not None
        params = own_tree(bits, self._replica.weights.layout, told.dtype, self._replica.device)
        del bits  # the store may have its room back
        begin_s, stretches = self._clock.now_s(), list[ComputeRecord]()
        self.reach.hub.began.remote(self._order.number, self._order.life, told.ticket, begin_s)
        replica = ProcessReplica(
            self._replica,
            clock=self._clock,
            on_computed=stretches.append,
            pause_s=self._order.pause_s,
            allow_nonfinite=True,  # the hub refuses what it cannot use, and this worker is sent off again
        )
        delta = run_worker_round(self._order.algorithm, replica, Task(params, told.steps, told.work))
        self._push(told.ticket, begin_s, stretches, delta)
        if not params.given:
            params.release()
        return 1

    def _push(self, ticket: Ticket, begin_s: float, stretches: Sequence[ComputeRecord], delta: Tree) -> None:
        """Bring a delta, and hear what became of it."""
        assert self._replica is not None
        assert self._made is not None
        brought = Brought(
            self._order.number,
            self._order.life,
            ticket,
            begin_s,
            self._clock.now_s(),
            tuple(stretches),
            arrays_of(self._replica.buffers()),
        )
        reference = self._ray.put(bits_of(delta))  # once, also if it has to be sent again
        if delta.spare:
            delta.release()
        verdict: Verdict = self.reach.ask("push", brought, reference)
        self._last = ticket
        if verdict == "refused":  # its moments are as unusable as what it brought
            self._replica = self._made.replica(self._order.number)
        if verdict not in ("taken", "over"):
            self.say(f"round {ticket[0]}: {verdict}")
