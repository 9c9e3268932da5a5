"""The accounting of a run whose islands join and leave: its ledgers, its members, and the events of every commit.

Every island keeps the same accounting, since every event follows from a commit. So any island can replace the leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core.events import Attended, Event, IslandJoined, IslandLeft, Leased, Refused
from atoll.engines.accounting import Ledger, RunAccounting
from atoll.engines.elastic.aggregation import IslandReport
from atoll.engines.elastic.commit import Commit
from atoll.engines.elastic.data_leases import Settlement
from atoll.engines.elastic.membership import LastQuorum
from atoll.engines.round_record import EventAggregator


class ElasticAccounting(RunAccounting):
    """One island's copy. A protocols.Sink that keeps its events until they are drained."""

    def __init__(self) -> None:
        super().__init__(0, real=True)
        self.known: list[str] = []
        """All islands that ever took part, in the order in which they joined: an island's number in events is its place here."""
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
                self.emit(IslandLeft(island=self.known.index(name), round=number, **_time(commit)))
        for name in commit.names:
            if name not in self.known:
                self.known.append(name)
                self.ledgers.append(Ledger())
        for name, report in reports.items():
            if name not in self.present or report.donor is not None:
                self._record_joiner(name, report, commit, number)
        self.present, self.quorum = commit.names, commit.quorum

    def _record_joiner(self, name: str, report: IslandReport, commit: Commit, number: int) -> None:
        # Islands that begin together begin with the same weights: fetching those is not counted.
        donor = self.known.index(report.donor) if number and report.donor in self.known else None
        sent_bytes = report.received_bytes if donor is not None else 0
        if donor is not None:
            self.sent(donor, sent_bytes, 0)
        self.emit(IslandJoined(island=self.known.index(name), round=number, donor=donor, sent_bytes=sent_bytes, **_time(commit)))

    def record_round(self, commit: Commit, settled: Settlement, steps: int, *, number: int, alive: int, digest: str) -> None:
        """Record a committed round, which brings the run to this many steps and to a state of this digest."""
        agreement, numbers = commit.result, [self.known.index(name) for name in commit.names]
        records = [report.record for report in agreement.reports]
        # No update contains a rejected delta.
        self.totals.local_updates -= sum(one.steps for rank in agreement.rejected for one in records[rank].computed)
        self._aggregator.add_round(records, steps, agreement.now_s, numbers)
        for rank, reason in agreement.rejected.items():
            self.emit(Refused(island=numbers[rank], round=number, reason=reason, **_time(commit)))
        became: dict[str, Any] = {
            what: [[self.known.index(name), *unit] for name, unit in units.items()] for what, units in settled._asdict().items()
        }
        self.emit(Leased(round=number, **became, **_time(commit)))
        self.emit(
            Attended(
                round=number,
                known=len(self.known),
                alive=max(alive, len(commit.names)),
                participating=len(settled.delivered),
                attempts=commit.attempts,
                epoch=commit.epoch,
                digest=digest,
                **_time(commit),
            )
        )

    def to_parts(self) -> dict[str, Any]:
        quorum = [list(self.quorum.processes), self.quorum.leader]
        return {"accounting": super().to_parts(), "known": list(self.known), "present": list(self.present), "quorum": quorum}

    def from_parts(self, parts: Mapping[str, Any]) -> None:
        super().from_parts(parts["accounting"])
        self.known, self.present = list(parts["known"]), tuple(parts["present"])
        processes, leader = parts.get("quorum", ((), None))
        self.quorum = LastQuorum(tuple(processes), leader)
        self._events.clear()


def _time(commit: Commit) -> dict[str, Any]:
    """The time fields of a commit's events."""
    return {"virtual_time_s": None, "wall_time_s": commit.result.now_s}
