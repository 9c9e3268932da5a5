"""Counts each simulated island's memory whenever its task waits or resumes, in a few rounds of a run.

An island holds its replica, its State, and what its coroutines can reach: their local variables, and the value they resume with.
Tensors that islands share in one process (results of exchanges, shared fields) count for each of them, as on real islands.

While a replica computes on its thread, the counter does not read it. It notes what the island's flight holds in the meantime, and
combines that with the replica when it is done. So the count is deterministic.
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

_IGNORED = {"self", "replica", "peers"}  # local variables that are not values of an algorithm


def is_counted(round: int) -> bool:
    """The first round, and rounds whose number is a power of two: few enough for the log, and late enough to see flights that begin
    after a warm-up."""
    return round & (round - 1) == 0


@dataclass
class _CountedIsland:
    id: int
    replica: LocalReplica
    state: Any
    named: frozenset[str]  # the fields of its State
    known: Storages  # Storages of its State at the beginning of the round. Computing in place may give them other names.
    flights: list[ClockTask] = field(default_factory=list)
    noted: list[Storages] = field(default_factory=list)  # what its flights held since its main task was last counted
    peak: Storages = field(default_factory=dict)


class MemoryCounter:
    """The count of one round. The clock calls it whenever a task waits (with None) or resumes (with its value)."""

    def __init__(self) -> None:
        self._islands: dict[ClockTask, _CountedIsland] = {}

    def watch(self, task: ClockTask, island: int, replica: LocalReplica, state: Any) -> None:
        """Counts this island, whose main task this is."""
        named, known = frozenset(f.name for f in fields(state)), Storages()
        add_storages(known, state, STATE, named)
        self._islands[task] = _CountedIsland(island, replica, state, named, known)

    def __call__(self, task: ClockTask, value: Any) -> None:
        if task in self._islands:
            self._count(self._islands[task], task, value)
        elif task.launched_by in self._islands:
            # The island may compute meanwhile. So count what the flight alone holds: not the State's storages, and not gradients,
            # which are the island's. Addresses are negated, because another tensor may have them when the island is counted.
            island = self._islands[task.launched_by]
            if task not in island.flights:
                island.flights.append(task)
            held = self._flight_storages(island, value).items()
            island.noted.append({-at: one for at, one in held if at not in island.known and one[0] != "gradients"})

    def _count(self, island: _CountedIsland, task: ClockTask, value: Any) -> None:
        base = Storages()
        add_replica(base, island.replica)
        add_storages(base, island.state, STATE, island.named)
        _add_locals(base, task, island.named)
        for flight in (*island.noted, self._flight_storages(island)):
            island.peak = max(island.peak, {**flight, **base}, key=total_bytes)
        island.noted.clear()
        if value is not None:
            island.flights = [flight for flight in island.flights if not (flight.done and value is flight.result)]
            add_storages(base, value, "communication", island.named)
            island.peak = max(island.peak, {**self._flight_storages(island), **base}, key=total_bytes)

    def _flight_storages(self, island: _CountedIsland, value: Any = None) -> Storages:
        """What the flights hold now, with the value that one of them resumes with."""
        storages = Storages()
        for flight in island.flights:
            _add_locals(storages, flight, island.named)
            add_storages(storages, flight.result, "communication", island.named)
        if island.flights:
            add_storages(storages, value, "communication", island.named)
        return storages

    def events(self, algorithm: Any, round: int) -> Iterator[MemoryCounted]:
        """The peak of each island."""
        for island in self._islands.values():
            peak = {at: island.known[at] if island.known.get(at) == (STATE, held[1]) else held for at, held in island.peak.items()}
            kinds = by_kind(peak, trains=island.replica.has_trained)
            paper, params = paper_formula(algorithm, island.replica, len(self._islands)), island.replica.weights.layout.numel
            yield MemoryCounted(
                island=island.id,
                round=round,
                params=params,
                **{f"{kind}_bytes": num_bytes for kind, num_bytes in kinds.items()},
                peak_bytes=sum(kinds.values()),
                formula=paper.text if paper else None,
                formula_bytes=math.ceil(paper.per_param * params) if paper else None,
            )


def _add_locals(storages: Storages, task: ClockTask, named: frozenset[str]) -> None:
    """Adds what a suspended coroutine, and those that it awaits, can reach."""
    coroutine: Any = task.coroutine
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        values = {name: value for name, value in frame.f_locals.items() if name not in _IGNORED}
        add_storages(storages, values, "communication", named)
        coroutine = coroutine.cr_await
