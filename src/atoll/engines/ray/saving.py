"""A hub's checkpoints: what one holds is gathered at the desk, in one moment, and written beside it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from atoll.engines.dist.clock import WallClock
from atoll.engines.ray.desk import Desk
from atoll.engines.ray.keeping import Keeper, Log
from atoll.errors import CheckpointError
from atoll.events import Saved, SaveFailed
from atoll.protocols import Sink
from atoll.tree import Tree


class Snapshot(NamedTuple):
    """All that a checkpoint holds. `held` are weights that are in it as they lie, and whose buffers must not be reused."""

    round: int
    parts: dict[str, Any]
    metadata: dict[str, Any]
    held: Sequence[Tree]


class Saver:
    """Writes checkpoints. All but `write` is for whoever is alone at the desk.

    Args:
        keeper: of checkpoints.
        session: names the process that drives the run.
        desk: of the hub.
        clock: of the run.
        log: of the run.
        sink: takes events, into that log too.
    """

    def __init__(self, *, keeper: Keeper, session: str, desk: Desk, clock: WallClock, log: Log, sink: Sink) -> None:
        self._keeper, self._session, self._desk, self._clock, self._log, self._sink = keeper, session, desk, clock, log, sink
        self._saved = self._affairs()

    @property
    def is_due(self) -> bool:
        """Whether anything has happened since the last checkpoint."""
        return self._affairs() != self._saved

    def _affairs(self) -> tuple[int, ...]:
        scheduler = self._desk.hub.scheduler
        return (scheduler.rounds, scheduler.local_updates, scheduler.windows)

    def snapshot(self) -> Snapshot:
        """What there is to save now, and how long the log is that it goes with. Weights are immutable, and held; the rest, in which
        the outer rule computes, is copied."""
        now_s, round = self._clock.now_s(), self._desk.books.totals.round
        self._saved = self._affairs()
        self._sink.emit(Saved(round=round, name=self._keeper.name(round)))
        metadata = {
            "events_bytes": self._log.position(),
            "session": self._session,
            "zero_s": time.monotonic() - now_s,
        }
        held = self._desk.hub.hold()
        return Snapshot(round, copy.deepcopy(self._desk.parts(now_s), {id(tree): tree for tree in held}), metadata, held)

    def write(self, snapshot: Snapshot) -> CheckpointError | None:
        """Write it, and say why if that fails."""
        try:
            self._keeper.save(snapshot.round, snapshot.parts, snapshot.metadata)
        except CheckpointError as error:
            self._keeper.say(f"round {snapshot.round} was not saved: {error}")
            return error
        self._keeper.say(f"saved round {snapshot.round}")
        return None

    def done_with(self, snapshot: Snapshot, failed: CheckpointError | None) -> None:
        """It is written, or not: then the last checkpoint stands, the run goes on, and the next may succeed."""
        self._desk.hub.let_go(snapshot.held)
        if failed is not None:
            self._saved = ()
            self._sink.emit(SaveFailed(round=snapshot.round, reason=str(failed)))
