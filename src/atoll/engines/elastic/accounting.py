"""What is told of a run whose islands come and go: who is known, who was there, what became of the data, and what it cost.

Every island keeps it, and all keep the same: each event follows from what was committed. So whoever writes the log can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.core.events import Attended, Event, IslandJoined, IslandLeft, Leased, Refused
from atoll.engines.accounting import Ledger, RunAccounting
from atoll.engines.elastic.commit import Met
from atoll.engines.elastic.data_leases import Settled
from atoll.engines.elastic.peers import Agreed, Told
from atoll.engines.round_record import EventAggregator


class Chronicle:
    """The chronicle of one island. A protocols.Sink, which keeps what it is given until it is taken."""

    def __init__(self) -> None:
        self.accounting = RunAccounting(0, real=True)
        self.known: list[str] = []
        """All that ever took part, in the order in which they came."""
        self.here: tuple[str, ...] = ()
        """Who took part in the last commit."""
        self._happened: list[Event] = []
        self._clerk = EventAggregator(self.accounting, 1, inside=False, sink=self)

    def emit(self, event: Event) -> None:
        self._happened.append(event)

    def take(self) -> list[Event]:
        """What has happened since it was last taken."""
        events, self._happened = self._happened, []
        return events

    def begin(self, now_s: float) -> None:
        """The run begins, or goes on, now."""
        self._clerk.start(now_s)

    # -------------------------------------------------------------------------------------------------------------- at commits

    def gather(self, met: Met[Agreed], number: int) -> None:
        """Who came to this round's commit, and who has left."""
        told = dict(zip(met.names, met.result.told, strict=True))
        for name in self.here:
            # Whoever was given the state has been away, though it may not have missed a commit.
            if name not in told or told[name].donor is not None:
                self.emit(IslandLeft(island=self.known.index(name), round=number, **_at(met)))
        for name in met.names:
            if name not in self.known:
                self.known.append(name)
                self.accounting.ledgers.append(Ledger())
        for name, one in told.items():
            if name not in self.here or one.donor is not None:
                self._welcome(name, one, met, number)
        self.here = met.names

    def _welcome(self, name: str, told: Told, met: Met[Agreed], number: int) -> None:
        # Those who begin together begin with the same weights, wherever they have them from: that is counted nowhere.
        donor = self.known.index(told.donor) if number and told.donor in self.known else None
        given_bytes = told.given_bytes if donor is not None else 0
        if donor is not None:
            self.accounting.sent([donor], [given_bytes], [0])
        self.emit(IslandJoined(island=self.known.index(name), round=number, donor=donor, sent_bytes=given_bytes, **_at(met)))

    def enter(self, met: Met[Agreed], settled: Settled, steps: int, number: int) -> None:
        """A round is committed, and so many steps of the run are over with it."""
        agreed, numbers = met.result, [self.known.index(name) for name in met.names]
        diaries = [told.diary for told in agreed.told]
        # What was refused is in no update.
        self.accounting.totals.local_updates -= sum(one.steps for rank in agreed.refused for one in diaries[rank].computed)
        self._clerk.add_round(diaries, steps, agreed.now_s, numbers)
        for rank, reason in agreed.refused.items():
            self.emit(Refused(island=numbers[rank], round=number, reason=reason, **_at(met)))
        self.emit(
            Leased(
                round=number,
                delivered=[[self.known.index(name), *unit] for name, unit in settled.delivered.items()],
                returned=[[self.known.index(name), *unit] for name, unit in settled.returned.items()],
                dropped=[[self.known.index(name), *unit] for name, unit in settled.dropped.items()],
                **_at(met),
            )
        )

    def attend(self, met: Met[Agreed], settled: Settled, number: int, *, alive: int, digest: str) -> None:
        """The last that is told of a commit."""
        self.emit(
            Attended(
                round=number,
                known=len(self.known),
                alive=max(alive, len(met.names)),
                participating=len(settled.delivered),
                attempts=met.attempts,
                epoch=met.epoch,
                digest=digest,
                **_at(met),
            )
        )

    # ------------------------------------------------------------------------------------------------------------------ saving

    def to_parts(self) -> dict[str, Any]:
        return {"books": self.accounting.to_parts(), "known": list(self.known), "here": list(self.here)}

    def from_parts(self, parts: Mapping[str, Any], now_s: float) -> None:
        self.accounting.from_parts(parts["books"])
        self.known, self.here = list(parts["known"]), tuple(parts["here"])
        self._happened.clear()
        self.begin(now_s)


def _at(met: Met[Agreed]) -> dict[str, Any]:
    """When, as events have it."""
    return {"virtual_time_s": None, "wall_time_s": met.result.now_s}
