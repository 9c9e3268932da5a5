"""The accounting of a run whose islands join and leave: its ledgers, its members, and the events of every commit.

Every island keeps the same accounting, since every event follows from a commit. So any island can replace the leader.

Every start of a joiner is an island of a new name. Once more than `ABSENT_KEPT` islands are away, a new island gets the number of
the one that has been away longest, whose ledger is added to the sums of departed islands. If that one returns, it counts as new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from atoll.core.events import Attended, Event, IslandJoined, IslandLeft, Leased, Refused
from atoll.engines.accounting import DepartedIslands, Ledger, RunAccounting
from atoll.engines.elastic.aggregation import IslandReport
from atoll.engines.elastic.commit import Commit
from atoll.engines.elastic.data_leases import ABSENT_KEPT, Settlement
from atoll.engines.elastic.quorum import LastQuorum
from atoll.engines.round_record import EventAggregator


class ElasticAccounting(RunAccounting):
    """One island's copy. A protocols.Sink that keeps its events until they are drained."""

    def __init__(self) -> None:
        super().__init__(0, real=True)
        self.known: dict[str, int] = {}
        """The numbers of islands in events and among the ledgers. Islands that are away have the order in which they left."""
        self.present: tuple[str, ...] = ()
        """The participants of the last commit."""
        self.quorum = LastQuorum()
        """Their processes, and which of them led."""
        self._events: list[Event] = []
        self._aggregator = EventAggregator(self, 1, inside=False, sink=self)

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def drain(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def begin(self, now_s: float) -> None:
        """The run begins, or goes on, now."""
        self._aggregator.start(now_s)

    def record_members(self, commit: Commit, number: int) -> None:
        """Record the islands that joined and left with this commit."""
        reports = commit.reports
        for name in self.present:
            # An island that fetched the state has been away, though it may not have missed a commit.
            if name not in reports or reports[name].donor is not None:
                self.emit(IslandLeft(island=self.known[name], round=number, **_time(commit)))
        absent = [name for name in self.known if name not in self.present and name not in commit.names]
        spare = iter(absent[:-ABSENT_KEPT])
        for name in commit.names:
            if name not in self.known:
                self.known[name] = self._free_number(next(spare, None))
        for name in self.present:
            if name not in reports:
                self.known[name] = self.known.pop(name)
        for name, report in reports.items():
            if name not in self.present or report.donor is not None:
                self._record_joiner(name, report, commit, number)
        self.present, self.quorum = commit.names, commit.quorum

    def _free_number(self, absent: str | None) -> int:
        """The number of this absent island, which the accounting forgets; of none, a new number."""
        if absent is None:
            self.ledgers.append(Ledger())
            return len(self.ledgers) - 1
        number = self.known.pop(absent)
        self.departed.add(self.ledgers[number])
        self.ledgers[number] = Ledger()
        return number

    def _record_joiner(self, name: str, report: IslandReport, commit: Commit, number: int) -> None:
        # Islands that begin together begin with the same weights: fetching those is not counted.
        donor = self.known.get(report.donor) if number and report.donor is not None else None
        sent_bytes = report.received_bytes if donor is not None else 0
        if donor is not None:
            self.sent(donor, sent_bytes, 0)
        self.emit(IslandJoined(island=self.known[name], round=number, donor=donor, sent_bytes=sent_bytes, **_time(commit)))

    def record_round(self, commit: Commit, settled: Settlement, steps: int, *, number: int, alive: int, digest: str) -> None:
        """Record a committed round, which brings the run to this many steps and to a state of this digest."""
        agreement, numbers = commit.result, [self.known[name] for name in commit.names]
        records = [report.record for report in agreement.reports]
        # No update contains a rejected delta.
        self.totals.local_updates -= sum(one.steps for rank in agreement.rejected for one in records[rank].computed)
        self._aggregator.add_round(records, steps, agreement.now_s, numbers)
        for rank, reason in agreement.rejected.items():
            self.emit(Refused(island=numbers[rank], round=number, reason=reason, **_time(commit)))
        became: dict[str, Any] = {
            what: [[self.known[name], *unit] for name, unit in units.items()] for what, units in settled._asdict().items()
        }
        self.emit(Leased(round=number, **became, **_time(commit)))
        self.emit(
            Attended(
                round=number,
                known=len(self.known) + self.departed.islands,
                alive=max(alive, len(commit.names)),
                participating=len(commit.delivered),
                attempts=commit.attempts,
                epoch=commit.epoch,
                digest=digest,
                **_time(commit),
            )
        )

    def to_parts(self) -> dict[str, Any]:
        quorum = [list(self.quorum.processes), self.quorum.leader]
        accounting = {**super().to_parts(), "departed": asdict(self.departed)}
        return {"accounting": accounting, "known": dict(self.known), "present": list(self.present), "quorum": quorum}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        super().from_parts(parts["accounting"])
        self.departed = DepartedIslands(**parts["accounting"].get("departed", {}))
        known = parts["known"]  # older versions saved the names in the order of their numbers
        self.known = dict(known) if isinstance(known, Mapping) else {name: number for number, name in enumerate(known)}
        self.present = tuple(parts["present"])
        processes, leader = parts.get("quorum", ((), None))
        self.quorum = LastQuorum(tuple(processes), leader)
        self._events = []


def _time(commit: Commit) -> dict[str, Any]:
    """The time fields of a commit's events."""
    return {"virtual_time_s": None, "wall_time_s": commit.result.now_s}
