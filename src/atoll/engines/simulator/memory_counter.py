"""Counting in the simulator what each island holds: whenever it waits or goes on, in a few rounds of a run.

An island holds what its replica holds, its State, and what can be reached from its coroutines: from their local variables, and from
what they are about to be handed. What islands share in one process (the outcome of an exchange, shared fields) counts for each of
them, as each would have its own.

While a replica computes on its thread, nobody looks into it: what a flight holds in the meantime is noted, and put together with
the rest when the replica is through. So the count is a function of the run, like every other figure of its log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from atoll.core.events import MemoryCounted
from atoll.engines.simulator.virtual_clock import ClockTask
from atoll.replica.local_replica import LocalReplica
from atoll.replica.memory_accounting import STATE, Storages, add_replica, add_storages, by_kind, paper_formula, total_bytes

_NOT_HELD = {"self", "replica", "peers"}
"""Local variables that are no values of an algorithm."""


def is_counted(round: int) -> bool:
    """Whether this round is: the first, and those whose number is a power of two. So the log stays short, and what begins late,
    after a warm-up without flights, is seen all the same."""
    return round & (round - 1) == 0


@dataclass
class _Island:
    """What is known of an island in this round."""

    id: int
    replica: LocalReplica
    state: Any
    named: frozenset[str]
    known: Storages
    """What its State held when the round began: computed in place, it may go by other names."""
    flight: ClockTask | None = None
    noted: list[Storages] = field(default_factory=list)
    """What its flight held since its main coroutine was last looked at."""
    peak: Storages = field(default_factory=dict)


class MemoryCounter:
    """The count of one round. It is called whenever a task waits (with none) or goes on (with what it is handed)."""

    def __init__(self) -> None:
        self._islands: dict[ClockTask, _Island] = {}

    def watch(self, task: ClockTask, island: int, replica: LocalReplica, state: Any) -> None:
        """Count what this island holds, whose coroutine this is."""
        named, known = frozenset(f.name for f in fields(state)), Storages()
        add_storages(known, state, STATE, named)
        self._islands[task] = _Island(island, replica, state, named, known)

    def __call__(self, task: ClockTask, value: Any) -> None:
        if task in self._islands:
            self._look(self._islands[task], task, value)
        elif task.launched_by in self._islands:
            island = self._islands[task.launched_by]
            island.flight = task
            island.noted.append(self._beside(island, value))

    def _look(self, island: _Island, task: ClockTask, value: Any) -> None:
        base = Storages()
        add_replica(base, island.replica)
        add_storages(base, island.state, STATE, island.named)
        _hold_locals(base, task, island.named)
        for flying in (*island.noted, self._flying(island, None)):
            self._compare(island, {**flying, **base})
        island.noted.clear()
        if value is not None:
            result = island.flight is not None and value is island.flight.result
            island.flight = None if result else island.flight
            brought = self._flying(island, None)
            add_storages(base, value, "communication", island.named)
            self._compare(island, {**brought, **base})

    def _flying(self, island: _Island, value: Any) -> Storages:
        """What a flight holds now, with what it is about to be handed."""
        holding = Storages()
        if island.flight is not None:
            _hold_locals(holding, island.flight, island.named)
            add_storages(holding, island.flight.result, "communication", island.named)
            add_storages(holding, value, "communication", island.named)
        return holding

    def _beside(self, island: _Island, value: Any) -> Storages:
        """What a flight holds of its own while its island may be computing: neither the State's nor gradients, which are the
        island's. By the time the island is looked at, a buffer of these may be another's, so they go by addresses of their own."""
        flying = self._flying(island, value)
        return {-at: held for at, held in flying.items() if at not in island.known and held[0] != "gradients"}

    def _compare(self, island: _Island, holding: Storages) -> None:
        if total_bytes(holding) > total_bytes(island.peak):
            island.peak = holding

    def events(self, algorithm: Any, round: int) -> Iterator[MemoryCounted]:
        """What was counted, island by island."""
        for island in self._islands.values():
            peak = {at: island.known[at] if island.known.get(at) == (STATE, held[1]) else held for at, held in island.peak.items()}
            kinds = by_kind(peak, trains=island.replica.has_trained)
            paper = paper_formula(algorithm, island.replica, len(self._islands))
            params = island.replica.weights.layout.numel
            yield MemoryCounted(
                island=island.id,
                round=round,
                params=params,
                **{f"{kind}_bytes": num_bytes for kind, num_bytes in kinds.items()},
                peak_bytes=sum(kinds.values()),
                formula=paper.text if paper else None,
                formula_bytes=math.ceil(paper.per_param * params) if paper else None,
            )


def _hold_locals(holding: Storages, task: ClockTask, named: frozenset[str]) -> None:
    """Add what a suspended coroutine can reach, and those that it awaits."""
    coroutine: Any = task.coroutine
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        add_storages(
            holding, {name: value for name, value in frame.f_locals.items() if name not in _NOT_HELD}, "communication", named
        )
        coroutine = coroutine.cr_await
