"""The first rank's clerk: draws up a round's events from what everybody wrote down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from atoll.core.events import Compared, Event, Exchanged, UpdateSkipped
from atoll.core.protocols import Sink
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.processes.round_record import DeltaSimilarity, ExchangeRecord, RoundRecord
from atoll.replica.local_replica import ComputeResult


class EventAggregator:
    """Keeps the books of a run on real processes.

    Args:
        books: where everything is entered.
        devices: per island.
        inside: whether the devices of an island have an algorithm of their own.
        sink: takes events.
    """

    def __init__(self, books: RunAccounting, devices: int, *, inside: bool, sink: Sink) -> None:
        self._books, self._devices, self._inside, self._sink = books, devices, inside, sink
        self._entered_s = 0.0
        self._numbers: list[int] = []
        """Of the islands in a round that is entered, in rank order."""

    def begin(self, now_s: float) -> None:
        """The run begins, or goes on, now."""
        self._entered_s = now_s

    def enter(self, diaries: Sequence[RoundRecord], steps: int, now_s: float, islands: Sequence[int] | None = None) -> None:
        """A round is over: what all ranks did in it, in rank order, and how many steps of the run are over with it. `islands` are
        the numbers of those who were there, if not all were."""
        self._numbers = list(islands) if islands is not None else list(range(len(diaries) // self._devices))
        for event in sorted(self._happened(diaries), key=_end_s):
            self._sink.emit(event)
        totals = self._books.totals
        for number in self._numbers:
            self._books.ledgers[number].present_s += now_s - self._entered_s
        self._entered_s = now_s
        skipped = next((m.useless for m in reversed(diaries[0].meetings) if m.what in ("mean", "reduce_scatter")), False)
        totals.version += 1
        totals.outer_steps += not skipped
        totals.tokens += sum(diary.tokens for diary in diaries)
        totals.dropped_tokens += sum(diary.dropped for diary in diaries)
        trained = sum(stretch.steps for diary in diaries for stretch in diary.stretches)
        if self._inside:
            totals.local_updates += sum(diary.updates for diary in diaries)
        elif not trained:  # all gradients of the round are one update of each island
            totals.local_updates += len(self._numbers)
        self._sink.emit(self._books.round_finished(steps, len(self._numbers), now_s))

    def _happened(self, diaries: Sequence[RoundRecord]) -> Iterator[Event]:
        for rank, diary in enumerate(diaries):
            island, device = divmod(rank, self._devices)
            for one in diary.stretches:
                span = ComputeSpan(
                    one.start_s, one.end_s, one.steps, one.batches, ComputeResult([one.loss], one.tokens, moved=False)
                )
                at = device if self._inside else None
                yield self._books.computed(self._numbers[island], span, device=at)
        yield from self._exchanged(diaries)
        yield from self._skipped(diaries)
        yield from (self._compared(likenesses) for likenesses in zip(*(diary.likenesses for diary in diaries), strict=True))
        if self._inside:
            for island in range(len(diaries) // self._devices):
                yield from self._met_inside(island, diaries[island * self._devices : (island + 1) * self._devices])

    def _exchanged(self, diaries: Sequence[RoundRecord]) -> Iterator[Event]:
        """Each device has met its counterparts, all at about the same time: one exchange between islands."""
        for meetings in zip(*(diary.meetings for diary in diaries), strict=True):
            by_island = [meetings[at : at + self._devices] for at in range(0, len(meetings), self._devices)]
            sent = [sum(meeting.sent_bytes for meeting in devices) for devices in by_island]
            control = [sum(meeting.control_bytes for meeting in devices) for devices in by_island]
            arrived = [max(meeting.arrived_s for meeting in devices) for devices in by_island]
            yield self._exchange(meetings, arrived, sent, control)

    def _met_inside(self, island: int, diaries: Sequence[RoundRecord]) -> Iterator[Event]:
        for meetings in zip(*(diary.inside for diary in diaries), strict=True):
            sent, control = [m.sent_bytes for m in meetings], [m.control_bytes for m in meetings]
            yield self._exchange(meetings, [m.arrived_s for m in meetings], sent, control, island)
        for devices in diaries[0].skipped:
            yield self._update_skipped(devices, diaries[0].inside[-1].end_s, island)

    def _exchange(
        self,
        meetings: Sequence[ExchangeRecord],
        arrived_s: list[float],
        sent_bytes: list[int],
        control_bytes: list[int],
        inside: int | None = None,
    ) -> Exchanged:
        return self._books.exchanged(
            meetings[0].what,
            islands=self._numbers if inside is None else range(len(arrived_s)),
            arrived_s=arrived_s,
            end_s=max(meeting.end_s for meeting in meetings),
            sent_bytes=sent_bytes,
            control_bytes=control_bytes,
            weight=meetings[0].weight,
            background=meetings[0].background,
            inside=inside,
        )

    def _skipped(self, diaries: Sequence[RoundRecord]) -> Iterator[Event]:
        """The last exchange of a round is what its update is made of."""
        updates = [meeting for meeting in diaries[0].meetings if meeting.what in ("mean", "reduce_scatter")]
        if updates and updates[-1].useless:
            yield self._update_skipped([self._numbers[rank] for rank in updates[-1].unsound], updates[-1].end_s)

    def _update_skipped(self, who: Sequence[int], time_s: float, inside: int | None = None) -> UpdateSkipped:
        number = self._books.totals.round
        return UpdateSkipped(round=number, islands=list(who), virtual_time_s=None, wall_time_s=time_s, inside=inside)

    def _compared(self, likenesses: Sequence[DeltaSimilarity]) -> Compared:
        """Each rank knows the inner products over its own slice: the whole is their sum."""
        size, weights = len(likenesses[0].weights), likenesses[0].weights
        products = [[_added(one.products[i][j] for one in likenesses) for j in range(size)] for i in range(size)]
        counted = [i for i in range(size) if weights[i]]  # what weighs nothing need not be a number
        squared = _added(weights[i] * weights[j] * products[i][j] for i in counted for j in counted)
        mean_norm = math.sqrt(squared if math.isnan(squared) else max(0.0, squared)) / sum(weights)
        return self._books.compared(products, mean_norm)


def _added(values: Iterable[float]) -> float:
    """The exact sum; of what is not finite, whatever that adds up to."""
    terms = list(values)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def _end_s(event: Event) -> float:
    """When it was over; what has no time of its own comes last."""
    end_s: float = getattr(event, "end_s", None) or getattr(event, "wall_time_s", None) or math.inf
    return end_s
