"""What a hub's workers did, in the books and in the log: who was there, what each computed, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.algorithms.async_hub import Applied, Refusal
from atoll.algorithms.async_scheduler import Worker
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.accounting import ComputeSpan, Ledger, RunAccounting, refused
from atoll.engines.ray.messages import Brought
from atoll.engines.ray.worker_slots import Seat
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
        self.accounting = RunAccounting(islands, real=True)
        self._places, self._emit = places, sink.emit
        self._widen()

    def _widen(self) -> None:
        """Every place has a ledger."""
        self.accounting.ledgers += [Ledger() for _ in range(self._places - len(self.accounting.ledgers))]

    def sent(self, number: int, delta: Tree | None) -> None:
        """A worker has sent something, and this is what it was."""
        self.accounting.sent([number], [0 if delta is None else delta.nbytes], [CONTROL_BYTES])

    def present(self, number: int, seat: Seat, now_s: float) -> None:
        """A worker has been there up to now."""
        self.accounting.ledgers[number].present_s += now_s - seat.since_s
        seat.since_s = now_s

    def applied(self, applied: Applied, brought: Brought, seats: Mapping[int, Seat], sent_bytes: int) -> None:
        """The hub took a step."""
        for number, seat in seats.items():
            self.present(number, seat, applied.time_s)
        spans = [
            ComputeSpan(
                one.start_s,
                min(one.end_s, applied.time_s),
                one.steps,
                one.batches,
                ComputeResult([one.loss], one.tokens, one.moved),
            )
            for one in brought.stretches
        ]
        pushed_s = min(brought.pushed_s, applied.time_s)
        for event in self.accounting.update_applied(applied, spans, pushed_s=pushed_s, sent_bytes=sent_bytes, workers=len(seats)):
            self._emit(event)

    def refused(self, refusal: Refusal, brought: Brought) -> None:
        """A worker has computed in vain."""
        self._emit(refused(refusal, real=True))
        self.accounting.ledgers[refusal.worker].computed_s += brought.computed_s

    def close(self, now_s: float, seats: Mapping[int, Seat], workers: Mapping[int, Worker]) -> None:
        """The run is over. Who is out has computed in vain: for as long as its steps took the last time, at most."""
        for number, seat in seats.items():
            self.present(number, seat, now_s)
            out = workers[number].out
            if out is not None and seat.computing_s is not None:
                self.accounting.ledgers[number].computed_s += min(now_s - out.time_s, seat.computing_s * out.steps)

    def restore(self, parts: Mapping[str, Any]) -> None:
        self.accounting.from_parts(parts)
        self._widen()
