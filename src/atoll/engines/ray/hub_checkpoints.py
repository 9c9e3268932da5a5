"""A hub's checkpoints, written from a snapshot without the hub's lock, and recovery from the newest of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from threading import Condition, Lock
from typing import Any, NamedTuple

from atoll.core.errors import CheckpointError
from atoll.core.events import Event, HubRestarted, Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.ray.hub_state import HubState
from atoll.engines.ray.hub_storage import LostRounds
from atoll.engines.ray.messages import HubProcessSpec
from atoll.engines.round_record import WallClock
from atoll.telemetry.event_log import JsonlSink


class EventOutbox:
    """Writes events to the run's log, and keeps them until the driving process has seen them. A protocols.Sink."""

    def __init__(self, log: JsonlSink) -> None:
        self.log = log
        self._events: list[Event] = []
        self._removed = 0
        """Number of events that the driving process has seen; they are not kept."""

    def emit(self, event: Event) -> None:
        self.log.emit(event)
        self._events.append(event)

    def after(self, seen: int) -> tuple[list[Event], int]:
        """The events after the first `seen`, and the number of all. A caller that lost the reply repeats the call."""
        del self._events[: max(0, seen - self._removed)]
        self._removed = max(seen, self._removed)
        return list(self._events), self.count

    @property
    def count(self) -> int:
        return self._removed + len(self._events)


class RecoveredHub(NamedTuple):
    """What a hub process starts with. `started`: the run's clock has started."""

    state: HubState
    outbox: EventOutbox
    clock: WallClock
    started: bool


def recover(spec: HubProcessSpec, epoch: int) -> RecoveredHub:
    """Resumes from the newest checkpoint and truncates the event log to it. Without one it starts with the initial weights."""
    storage, saved = spec.storage, spec.storage.newest_checkpoint()
    after = spec.begin_bytes if saved is None else int(saved.metadata["events_bytes"])
    same_session = saved is not None and saved.metadata["session"] == spec.session
    lost = storage.lost_rounds(after)
    if not same_session:  # the log was truncated at the start of this session, and the spec says what was lost then
        lost = LostRounds(lost.rounds + spec.lost.rounds, lost.local_updates + spec.lost.local_updates)
    outbox, clock = EventOutbox(storage.open_event_log(after)), WallClock()
    state = HubState(spec.run, spec.engine, storage.initial_weights(), spec.examples, epoch=epoch, sink=outbox)
    if saved is not None:
        now_s = state.from_parts(saved.load)
        # The log ends where the snapshot was taken, before its Saved event. The driving process has seen that event.
        outbox.log.emit(Saved(round=state.accounting.totals.round, name=saved.name))
        # Within a session the run's clock includes the time without a hub; between sessions it rests.
        clock.set(max(now_s, time.monotonic() - float(saved.metadata["zero_s"])) if same_session else now_s)
    if lost.rounds or same_session:
        outbox.emit(
            HubRestarted(
                checkpoint=None if saved is None else saved.name,
                round=state.accounting.totals.round,
                lost_rounds=lost.rounds,
                lost_local_updates=lost.local_updates,
                virtual_time_s=None,
                wall_time_s=clock.now_s(),
            )
        )
        source = "the run's initial weights, since there is no checkpoint" if saved is None else f"checkpoint {saved.name}"
        storage.log(f"the hub restarted from {source}; {lost.rounds} rounds accepted after that are lost")
    if not same_session:  # the workers of another session are gone
        for worker in list(state.slots):
            state.leave(worker, clock.now_s())
    if state.done or not state.accounting.totals.metrics:
        state.request_evaluation(0.0 if saved is None else clock.now_s())
    return RecoveredHub(state, outbox, clock, saved is not None)


class _HubSnapshot(NamedTuple):
    """The contents of a checkpoint. It shares the trees in `held`, whose buffers must not be reused before it is written."""

    round: int
    parts: dict[str, Any]
    metadata: dict[str, Any]
    held: Sequence[Tree]


class CheckpointWriter:
    """Writes checkpoints of a hub, whose lock is `changed`."""

    def __init__(self, spec: HubProcessSpec, hub: RecoveredHub, changed: Condition) -> None:
        self._storage, self._session, self._hub, self._changed = spec.storage, spec.session, hub, changed
        self._writing = Lock()
        self._saved_progress = self._progress()
        self._stopped = False
        self._snapshot_s = 0.0

    def stop(self) -> None:
        """No further checkpoint is written."""
        self._stopped = True

    def save(self) -> bool:
        """Writes a checkpoint if the state has changed since the last. Returns whether the present state is saved."""
        with self._writing:
            with self._changed:
                if self._stopped or self._progress() == self._saved_progress:
                    return not self._stopped
                snapshot = self._snapshot()
            error = self._write(snapshot)
            with self._changed:
                self._finish(snapshot, error)
                self._changed.notify_all()
            return error is None

    def save_locked(self) -> None:
        """Writes a checkpoint for a caller that holds the hub's lock."""
        snapshot = self._snapshot()
        self._finish(snapshot, self._write(snapshot))

    def snapshot_seconds(self) -> float:
        """Seconds that snapshots have held the hub's lock since the last call."""
        snapshot_s, self._snapshot_s = self._snapshot_s, 0.0
        return snapshot_s

    def _progress(self) -> tuple[int, ...]:
        scheduler = self._hub.state.hub.scheduler
        return (scheduler.rounds, scheduler.local_updates, scheduler.windows)

    def _snapshot(self) -> _HubSnapshot:
        """Weights are immutable, and shared. All else is copied, since the outer rule updates it in place."""
        began_s, state, now_s = time.monotonic(), self._hub.state, self._hub.clock.now_s()
        self._saved_progress = self._progress()
        position, zero_s = self._hub.outbox.log.position(), time.monotonic() - now_s
        metadata = {"events_bytes": position, "session": self._session, "zero_s": zero_s}
        held = state.hub.pin_weights()
        parts = copy.deepcopy(state.to_parts(now_s), {id(tree): tree for tree in held})
        self._snapshot_s += time.monotonic() - began_s
        return _HubSnapshot(state.accounting.totals.round, parts, metadata, held)

    def _write(self, snapshot: _HubSnapshot) -> CheckpointError | None:
        try:
            self._storage.save_checkpoint(snapshot.round, snapshot.parts, snapshot.metadata)
        except CheckpointError as error:
            self._storage.log(f"round {snapshot.round} was not saved: {error}")
            return error
        self._storage.log(f"saved round {snapshot.round}")
        return None

    def _finish(self, snapshot: _HubSnapshot, error: CheckpointError | None) -> None:
        """After a failure the last checkpoint is still valid, the run continues, and the next save tries again."""
        self._hub.state.hub.unpin_weights(snapshot.held)
        if error is None:
            self._hub.outbox.emit(Saved(round=snapshot.round, name=Checkpoints.name(snapshot.round)))
        else:
            self._saved_progress = ()
            self._hub.outbox.emit(SaveFailed(round=snapshot.round, reason=str(error)))
