"""Runs a worker's round without waiting: its task is known, and its update is returned."""

from __future__ import annotations

from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm, Replica, Task


class _RoundHub:
    """The hub, seen from one worker in one round. A protocols.Hub."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.delta: Tree | None = None

    async def pull(self) -> Task:
        return self._task

    async def push(self, delta: Tree) -> None:
        self.delta = delta.donate()


def run_worker_round(algorithm: AsyncAlgorithm[Any], replica: Replica, task: Task) -> Tree:
    """Runs one round and returns the update that it pushes. Raises ConfigError if it awaits anything else, or pushes nothing."""
    hub = _RoundHub(task)
    coroutine = algorithm.round(replica, hub)
    name = f"{type(algorithm).__name__}.round"
    try:
        coroutine.send(None)
    except StopIteration:
        if hub.delta is None:
            raise ConfigError(
                f"{name} ended without a push, so the hub would wait for it for ever. Let it end with `await hub.push(...)`."
            ) from None
        return hub.delta
    coroutine.close()
    raise ConfigError(f"{name} awaits something that is neither its replica's nor its hub's. Await these alone.")
