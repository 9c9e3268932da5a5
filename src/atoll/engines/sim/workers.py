"""A simulated worker, and what it is handed in a round: its hub."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from atoll.algorithms.scheduler import Dispatch
from atoll.engines.local import LocalReplica, Trained
from atoll.engines.sim.clock import Task, Wait
from atoll.protocols import Task as Sent
from atoll.tree import Tree


class Stretch(NamedTuple):
    """A worker computed."""

    start_s: float
    end_s: float
    steps: int
    batches: int
    trained: Trained


@dataclass
class SimWorker:
    """A worker that is there."""

    id: int
    replica: LocalReplica
    since_s: float
    """Up to when its presence is in the books."""
    dispatch: Dispatch | None = None
    """With what it is out."""
    begin_s: float = 0.0
    """When it has what it was sent off with."""
    end_s: float = 0.0
    """When it will have trained."""
    arrival_s: float = math.inf
    """When what it brings will be there."""
    steps_before: int = 0
    """Those that its replica had taken by then."""
    before: dict[str, Any] | None = None
    """Its inner optimizer and randomness when it was sent off; none where nothing is saved."""
    task: Task | None = None
    stretches: list[Stretch] = field(default_factory=list)
    """Of this round."""
    refusals: int = 0
    """In a row."""


class TakesPushes(Protocol):
    """What an engine does for a worker's hub."""

    def start_pushing(self, worker: SimWorker, dispatch: Dispatch, delta: Tree, task: Task) -> None: ...


class SimHub:
    """The hub, seen from one worker in one round."""

    def __init__(self, engine: TakesPushes, worker: SimWorker, dispatch: Dispatch, sent: Sent) -> None:
        self._engine, self._worker, self._dispatch, self._sent = engine, worker, dispatch, sent
        self.pushed = False

    async def pull(self) -> Sent:
        sent: Sent = await Wait(lambda task: task.resume_at(self._worker.begin_s, lambda: self._sent))
        return sent

    async def push(self, delta: Tree) -> None:
        self.pushed = True
        await Wait(partial(self._engine.start_pushing, self._worker, self._dispatch, delta))
