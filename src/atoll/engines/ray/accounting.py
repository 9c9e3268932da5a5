"""What a hub's workers did, in the books and in the log: who was there, what each computed, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.algorithms.async_hub import Applied, Refusal
from atoll.algorithms.async_scheduler import Worker
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.accounting import Books, Ledger
from atoll.engines.ray.messages import Brought
from atoll.engines.ray.worker_slots import Seat, on_the_wall
from atoll.engines.simulator import async_events
from atoll.replica.local_replica import ComputeResult
from atoll.runs.network import CONTROL_BYTES


class Accounts:
    """The books of a hub.

    Args:
        islands: how many the local updates were planned for: steps are counted as if these had shared them.
        places: how many workers there are at most.
        sink: takes events.
    """

    def __init__(self, islands: int, places: int, sink: Sink) -> None:
        self.books = Books(islands, real=True)
        self._places, self._emit = places, sink.emit
        self._widen()

    def _widen(self) -> None:
        """Every place has a ledger."""
        self.books.ledgers += [Ledger() for _ in range(self._places - len(self.books.ledgers))]

    def sent(self, number: int, delta: Tree | None) -> None:
        """A worker has sent something, and this is what it was."""
        self.books.sent([number], [0 if delta is None else delta.nbytes], [CONTROL_BYTES])

    def present(self, number: int, seat: Seat, now_s: float) -> None:
        """A worker has been there up to now."""
        self.books.ledgers[number].present_s += now_s - seat.since_s
        seat.since_s = now_s

    def applied(self, applied: Applied, brought: Brought, seats: Mapping[int, Seat], sent_bytes: int) -> None:
        """The hub took a step."""
        dispatch, totals = applied.dispatch, self.books.totals
        for stretch in brought.stretches:
            trained = ComputeResult([stretch.loss], stretch.tokens, stretch.moved)
            span = (stretch.start_s, min(stretch.end_s, applied.time_s))
            self._emit(self.books.computed(dispatch.worker, *span, stretch.steps, stretch.batches, trained, round=dispatch.round))
            totals.tokens += stretch.tokens * applied.counted
        totals.version = applied.version
        totals.outer_steps += applied.moved
        self._emit(on_the_wall(async_events.arrived(applied, min(brought.pushed_s, applied.time_s), sent_bytes)))
        for number, seat in seats.items():
            self.present(number, seat, applied.time_s)
        self._emit(self.books.hub_stepped(len(seats), applied.time_s))

    def refused(self, refusal: Refusal, brought: Brought) -> None:
        """A worker has computed in vain."""
        self._emit(on_the_wall(async_events.refused(refusal)))
        self.books.ledgers[refusal.worker].computed_s += brought.computed_s

    def close(self, now_s: float, seats: Mapping[int, Seat], workers: Mapping[int, Worker]) -> None:
        """The run is over. Who is out has computed in vain: for as long as its steps took the last time, at most."""
        for number, seat in seats.items():
            self.present(number, seat, now_s)
            out = workers[number].out
            if out is not None and seat.computing_s is not None:
                self.books.ledgers[number].computed_s += min(now_s - out.time_s, seat.computing_s * out.steps)

    def restore(self, parts: Mapping[str, Any]) -> None:
        self.books.from_parts(parts)
        self._widen()
