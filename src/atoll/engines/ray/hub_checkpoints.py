"""A hub's checkpoints: gathered at the desk, in one moment, and written beside it. The next desk begins with one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from threading import Condition, Lock
from typing import Any, NamedTuple

from atoll.core.errors import CheckpointError
from atoll.core.events import Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.ray.hub_load import Load
from atoll.engines.ray.hub_state import Desk
from atoll.engines.ray.storage import Keeper, Log
from atoll.engines.ray.worker_slots import Seat
from atoll.engines.wall_clock import WallClock


class _Snapshot(NamedTuple):
    """All that a checkpoint holds. `held` are weights that are in it as they lie, and whose buffers must not be reused."""

    round: int
    parts: dict[str, Any]
    metadata: dict[str, Any]
    held: Sequence[Tree]


class Saver:
    """Writes checkpoints.

    Args:
        keeper: of checkpoints.
        session: names the process that drives the run.
        desk: of the hub.
        clock: of the run.
        log: of the run.
        sink: takes events, into that log too.
        load: counts the time in which the desk is held up.
        changed: who holds it is alone at the desk.
    """

    def __init__(
        self,
        *,
        keeper: Keeper,
        session: str,
        desk: Desk,
        clock: WallClock,
        log: Log,
        sink: Sink,
        load: Load,
        changed: Condition,
    ) -> None:
        self._keeper, self._session, self._desk, self._clock, self._log, self._sink = keeper, session, desk, clock, log, sink
        self._load, self._changed = load, changed
        self._saving = Lock()
        self._saved = self._affairs()
        self._stopped = False

    def stop(self) -> None:
        """Nothing is saved any more."""
        self._stopped = True

    def save(self) -> bool:
        """Write a checkpoint beside the desk, unless nothing has happened since the last one. Whether all that has happened is
        saved."""
        with self._saving:
            with self._changed:
                if self._stopped or self._affairs() == self._saved:
                    return not self._stopped
                snapshot = self._snapshot()
            failed = self._write(snapshot)
            with self._changed:
                self._done_with(snapshot, failed)
                self._changed.notify_all()
            return failed is None

    def save_at_the_desk(self) -> None:
        """The same for whoever is alone there; the desk waits until it is written."""
        snapshot = self._snapshot()
        self._done_with(snapshot, self._write(snapshot))

    def _affairs(self) -> tuple[int, ...]:
        """Changes with whatever happens."""
        scheduler = self._desk.hub.scheduler
        return (scheduler.rounds, scheduler.local_updates, scheduler.windows)

    def _snapshot(self) -> _Snapshot:
        """What there is to save now, and how long the log is that it goes with. Weights are immutable, and held; the rest, in which
        the outer rule computes, is copied."""
        with self._load.occupied():
            now_s, round = self._clock.now_s(), self._desk.accounting.totals.round
            self._saved = self._affairs()
            metadata = {
                "events_bytes": self._log.position(),
                "session": self._session,
                "zero_s": time.monotonic() - now_s,
            }
            held = self._desk.hub.hold()
            return _Snapshot(round, copy.deepcopy(parts_of(self._desk, now_s), {id(tree): tree for tree in held}), metadata, held)

    def _write(self, snapshot: _Snapshot) -> CheckpointError | None:
        """Write it, and say why if that fails."""
        try:
            self._keeper.save(snapshot.round, snapshot.parts, snapshot.metadata)
        except CheckpointError as error:
            self._keeper.say(f"round {snapshot.round} was not saved: {error}")
            return error
        self._keeper.say(f"saved round {snapshot.round}")
        return None

    def _done_with(self, snapshot: _Snapshot, failed: CheckpointError | None) -> None:
        """It is written, or not: then the last checkpoint stands, the run goes on, and the next may succeed."""
        self._desk.hub.let_go(snapshot.held)
        if failed is None:
            self._sink.emit(Saved(round=snapshot.round, name=self._keeper.name(snapshot.round)))
        else:
            self._saved = ()
            self._sink.emit(SaveFailed(round=snapshot.round, reason=str(failed)))


def parts_of(desk: Desk, now_s: float) -> dict[str, Any]:
    """Everything a checkpoint must hold, by part: all of it in one write, so that no round is in it by half."""
    hub = desk.hub.to_parts()
    return {
        "engine": {
            **desk.accounting.to_parts(),
            "hub": hub["plain"],
            "now_s": now_s,
            "seats": [[number, seat.plain()] for number, seat in desk.seats.items()],
            "rounds": desk.rounds.plain(),
            "versions": list(hub["versions"]),
        },
        "hub": {"state": hub["state"]},
        "buffers": {"buffers": desk.buffers},
        **{f"version-{name}": {"params": tree} for name, tree in hub["versions"].items()},
    }


def restored(desk: Desk, load: Callable[[str, Any], Any]) -> float:
    """Has a desk go on from a checkpoint; gives the time at which it was saved."""
    engine = load("engine", None)
    desk.accounts.restore(engine)
    versions = {name: load(f"version-{name}", {"params": desk.params})["params"] for name in engine["versions"]}
    state = load("hub", {"state": desk.hub.state})["state"]
    desk.hub.from_parts(state, versions, engine["hub"])
    desk.buffers = load("buffers", None)["buffers"]
    desk.seats = {number: Seat.of(seat) for number, seat in engine["seats"]}
    desk.rounds.restore(engine["rounds"])
    return float(engine["now_s"])
