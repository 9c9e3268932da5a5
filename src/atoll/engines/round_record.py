"""What one process did in a round, and the events that the records of all processes become.

Each process records its computing and its exchanges by its own clock, and sends the record as JSON. `EventAggregator` turns the
records of all ranks into the events of the round and the figures of the run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.core.events import Compared, Event, Exchanged, UpdateSkipped
from atoll.core.protocols import Sink
from atoll.engines.accounting import ComputeSpan, RunAccounting, exact_sum

_UPDATES = ("mean", "reduce_scatter")


class WallClock:
    """Seconds since the run began. A resumed run continues from the saved time."""

    def __init__(self) -> None:
        self._zero = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._zero

    def set(self, now_s: float) -> None:
        self._zero = time.monotonic() - now_s


@dataclass(frozen=True)
class ExchangeRecord:
    """An exchange with other ranks."""

    what: str
    arrived_s: float
    end_s: float
    sent_bytes: int
    control_bytes: int
    weight: float
    background: bool
    nonfinite: Sequence[int] = field(default_factory=list)  # ranks whose tree was not finite
    unusable: bool = False  # no update can be made of it: a rank's tree was not finite, or the weights add up to 0
    start_s: float | None = None  # when this rank's exchanges before it were over; None: when it arrived

    @property
    def lacks_weight(self) -> bool:
        """Whether it is a mean to which no rank contributed."""
        return self.what == "mean" and self.unusable and not self.nonfinite

    @property
    def makes_update(self) -> bool:
        """Whether this kind of exchange sums what an update is made of."""
        return self.what in _UPDATES


def last_update(exchanges: Sequence[ExchangeRecord]) -> ExchangeRecord | None:
    """The exchange that the update of a round was made of."""
    return next((exchange for exchange in reversed(exchanges) if exchange.makes_update), None)


@dataclass(frozen=True)
class DeltaSimilarity:
    """Inner products of what a mean was made of, over this rank's slice: row by row, in rank order."""

    products: Sequence[Sequence[float]]
    weights: Sequence[float]


@dataclass
class RoundRecord:
    """One round of one process."""

    computed: list[ComputeSpan] = field(default_factory=list)
    exchanges: list[ExchangeRecord] = field(default_factory=list)  # with other islands
    island_exchanges: list[ExchangeRecord] = field(default_factory=list)  # with the other devices of its island
    tokens: int = 0  # in updates of this round
    dropped_tokens: int = 0  # in gradients that went into no update, since the island loaded other weights
    island_updates: int = 0  # rounds of the algorithm inside the island
    island_skipped: list[Sequence[int]] = field(default_factory=list)
    """For each of these that was skipped, the devices whose gradients were not finite."""
    similarities: list[DeltaSimilarity] = field(default_factory=list)
    """Of the trees that islands brought to means, where an algorithm compares them."""

    def clear(self) -> None:
        """Begins the next round. The lists stay the same objects."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                value.clear()
            else:
                setattr(self, name, 0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RoundRecord:
        record: dict[str, Any] = json.loads(text)
        record["computed"] = [ComputeSpan(*span) for span in record["computed"]]
        for name in ("exchanges", "island_exchanges"):
            record[name] = [ExchangeRecord(**exchange) for exchange in record[name]]
        record["similarities"] = [DeltaSimilarity(**similarity) for similarity in record["similarities"]]
        return RoundRecord(**record)


class EventAggregator:
    """Turns the records of all ranks into events and figures. `inside`: the devices of an island have an algorithm of their own."""

    def __init__(self, accounting: RunAccounting, devices: int, *, inside: bool, sink: Sink) -> None:
        self._accounting, self._devices, self._inside, self._sink = accounting, devices, inside, sink
        self._round_start_s = 0.0
        self._islands: list[int] = []
        """The islands of the round that is added, in rank order."""

    def start(self, now_s: float) -> None:
        """The run starts, or resumes, at this time."""
        self._round_start_s = now_s

    def add_round(self, records: Sequence[RoundRecord], steps: int, now_s: float, islands: Sequence[int] | None = None) -> None:
        """Adds a round: the records of all ranks, in rank order, and the steps of the run after it. `islands` are those that took
        part, if not all did."""
        self._islands = list(islands) if islands is not None else list(range(len(records) // self._devices))
        for event in sorted(self._events(records), key=_end_s):
            self._sink.emit(event)
        totals = self._accounting.totals
        for island in self._islands:
            self._accounting.ledgers[island].present_s += now_s - self._round_start_s
        self._round_start_s = now_s
        if _is_closing(records):
            return
        update = last_update(records[0].exchanges)
        totals.version += 1
        totals.outer_steps += update is None or not update.unusable
        totals.tokens += sum(record.tokens for record in records)
        totals.dropped_tokens += sum(record.dropped_tokens for record in records)
        if self._inside:
            totals.local_updates += sum(record.island_updates for record in records)
        elif any(record.computed for record in records) and not any(span.steps for record in records for span in record.computed):
            totals.local_updates += len(self._islands)  # all gradients of the round are one update of each island
        self._sink.emit(self._accounting.round_finished(steps, len(self._islands), now_s))

    def _events(self, records: Sequence[RoundRecord]) -> Iterator[Event]:
        for rank, record in enumerate(records):
            island, device = divmod(rank, self._devices)
            for one in record.computed:
                span = one._replace(moved=False)  # its rank has ended the run already, if a loss that moved weights was not finite
                yield self._accounting.computed(self._islands[island], span, device=device if self._inside else None)
        for exchanges in zip(*(record.exchanges for record in records), strict=True):
            yield self._exchanged([exchanges[at : at + self._devices] for at in range(0, len(exchanges), self._devices)])
        update = last_update(records[0].exchanges)
        if update is not None and update.unusable and not _is_closing(records):
            yield self._update_skipped([self._islands[rank] for rank in update.nonfinite], update.end_s)
        yield from (self._compared(similarities) for similarities in zip(*(r.similarities for r in records), strict=True))
        for island in range(len(records) // self._devices if self._inside else 0):
            yield from self._exchanges_inside(island, records[island * self._devices : (island + 1) * self._devices])

    def _exchanges_inside(self, island: int, records: Sequence[RoundRecord]) -> Iterator[Event]:
        for exchanges in zip(*(record.island_exchanges for record in records), strict=True):
            yield self._exchanged([[exchange] for exchange in exchanges], island)
        for devices in records[0].island_skipped:
            yield self._update_skipped(devices, records[0].island_exchanges[-1].end_s, island)

    def _exchanged(self, members: Sequence[Sequence[ExchangeRecord]], inside: int | None = None) -> Exchanged:
        """One exchange between islands, each of whose devices exchanges with its counterparts; or between devices of an island."""
        first = members[0][0]
        return self._accounting.exchanged(
            first.what,
            islands=self._islands if inside is None else range(len(members)),
            arrived_s=[max(exchange.arrived_s for exchange in devices) for devices in members],
            start_s=max(e.arrived_s if e.start_s is None else e.start_s for devices in members for e in devices),
            end_s=max(exchange.end_s for devices in members for exchange in devices),
            sent_bytes=[sum(exchange.sent_bytes for exchange in devices) for devices in members],
            control_bytes=[sum(exchange.control_bytes for exchange in devices) for devices in members],
            weight=first.weight,
            background=first.background,
            inside=inside,
        )

    def _update_skipped(self, nonfinite: Sequence[int], time_s: float, inside: int | None = None) -> UpdateSkipped:
        number = self._accounting.totals.round
        return UpdateSkipped(round=number, islands=list(nonfinite), virtual_time_s=None, wall_time_s=time_s, inside=inside)

    def _compared(self, similarities: Sequence[DeltaSimilarity]) -> Compared:
        """Each rank has the inner products over its own slice: those of whole trees are their sums."""
        size, weights = len(similarities[0].weights), similarities[0].weights
        products = [[exact_sum(one.products[i][j] for one in similarities) for j in range(size)] for i in range(size)]
        return self._accounting.compared(products, weights)


def _is_closing(records: Sequence[RoundRecord]) -> bool:
    """Whether no island computed, and all learned by the exchange that none has work left: an own loop ends so. This is no round,
    and no update was skipped."""
    update = last_update(records[0].exchanges)
    return update is not None and update.unusable and not update.nonfinite and not any(record.computed for record in records)


def _end_s(event: Event) -> float:
    """When the event was over; one without a time comes last."""
    end_s: float = getattr(event, "end_s", None) or getattr(event, "wall_time_s", None) or math.inf
    return end_s
