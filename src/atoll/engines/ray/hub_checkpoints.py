"""A hub's files: its lock, its text log, and its checkpoints, written from a snapshot without the hub's lock; and recovery from the
newest checkpoint."""

from __future__ import annotations

import copy
import fcntl
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Lock
from typing import Any, NamedTuple

from atoll.core import events as ev
from atoll.core.errors import CheckpointError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.serialization import load_tree
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.liveness import append_log_line
from atoll.engines.ray.hub_state import HubState
from atoll.engines.ray.messages import HubProcessSpec, LostRounds
from atoll.engines.round_record import WallClock
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import JsonlSink, read_events

_HUB_LOG = "hub.log"
_HUB_LOCK = "hub.lock"
"""Held by the hub that writes the run's log and checkpoints, for the lifetime of its process."""
INITIAL_WEIGHTS = "begin.safetensors"
"""The weights of a hub that finds no checkpoint."""
_POLL_S = 0.2


def log_line(folder: Path, text: str) -> None:
    """Appends a line to the hub's text log in the run's folder."""
    append_log_line(folder / "logs" / _HUB_LOG, text)


def lock_folder(folder: Path, log: Callable[[str], object], timeout_s: float = math.inf) -> int:
    """Waits until another hub of this run has ended: until then it may write the log and a newer checkpoint. Returns a file
    that holds the lock while it is open. Raises ExchangeFailed after `timeout_s` seconds."""
    began_s, lock, logged = time.monotonic(), os.open(folder / _HUB_LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() - began_s >= timeout_s:
                os.close(lock)
                raise ExchangeFailed(
                    f"the hub of an earlier command still holds {folder}, after {timeout_s:g} s (engine.hub_timeout_s). Its "
                    f"process is in logs/{_HUB_LOG}: end it, and resume."
                ) from error
        if not logged:
            log("waiting for the hub of an earlier command to end")
            logged = True
        time.sleep(_POLL_S)


def rounds_after(folder: RunFolder, after: int) -> LostRounds:
    """The rounds in a run's event log after this many bytes."""
    events = read_events(folder.events, [ev.Arrived], after=after) if folder.events.exists() else ()
    steps = [event.steps for event in events if isinstance(event, ev.Arrived)]
    return LostRounds(len(steps), sum(steps))


class EventOutbox:
    """Writes events to the run's log, and keeps them until the driving process has seen them. A protocols.Sink."""

    def __init__(self, log: JsonlSink) -> None:
        self.log = log
        self._events: list[ev.Event] = []
        self._removed = 0
        """Number of events that the driving process has seen; they are not kept."""

    def emit(self, event: ev.Event) -> None:
        self.log.emit(event)
        self._events.append(event)

    def after(self, seen: int) -> tuple[list[ev.Event], int]:
        """The events after the first `seen`, and the number of all. A caller that lost the reply repeats the call."""
        del self._events[: max(0, seen - self._removed)]
        self._removed = max(seen, self._removed)
        return list(self._events), self.count

    @property
    def count(self) -> int:
        return self._removed + len(self._events)


def checkpoints_of(spec: HubProcessSpec) -> Checkpoints:
    return Checkpoints(RunFolder(spec.folder).checkpoints, keep=spec.run.keep.checkpoints)


class RecoveredHub(NamedTuple):
    """What a hub process starts with. `started`: the run's clock has started."""

    state: HubState
    outbox: EventOutbox
    clock: WallClock
    started: bool


def recover(spec: HubProcessSpec, epoch: int) -> RecoveredHub:
    """Resumes from the newest checkpoint and truncates the event log to it. Without one it starts with the initial weights."""
    folder, checkpoints = RunFolder(spec.folder), checkpoints_of(spec)
    saved = checkpoints.newest()
    after = spec.begin_bytes if saved is None else int(saved.metadata["events_bytes"])
    same_session = saved is not None and saved.metadata["session"] == spec.session
    lost = rounds_after(folder, after)
    if not same_session:  # the log was truncated at the start of this session, and the spec says what was lost then
        lost = LostRounds(lost.rounds + spec.lost.rounds, lost.local_updates + spec.lost.local_updates)
    log = (
        JsonlSink(folder.events, append_at=after, dated=True, digested=True)
        if saved is None
        else JsonlSink.at_record(folder.events, saved.metadata, dated=True)
    )
    outbox, clock = EventOutbox(log), WallClock()
    state = HubState(spec.run, spec.engine, load_tree(spec.folder / INITIAL_WEIGHTS), spec.examples, epoch=epoch, sink=outbox)
    name = None if saved is None else Checkpoints.name(saved.round)
    if saved is not None:
        now_s = state.from_parts(lambda part, like: checkpoints.load(saved, part, like))
        # The log ends where the snapshot was taken, before its Saved event. The driving process has seen that event.
        outbox.log.emit(ev.Saved(round=state.accounting.totals.round, name=str(name)))
        # Within a session the run's clock includes the time without a hub; between sessions it rests.
        clock.set(max(now_s, time.monotonic() - float(saved.metadata["zero_s"])) if same_session else now_s)
    if lost.rounds or same_session:
        outbox.emit(
            ev.HubRestarted(
                checkpoint=name,
                round=state.accounting.totals.round,
                lost_rounds=lost.rounds,
                lost_local_updates=lost.local_updates,
                virtual_time_s=None,
                wall_time_s=clock.now_s(),
            )
        )
        source = "the run's initial weights, since there is no checkpoint" if saved is None else f"checkpoint {name}"
        log_line(spec.folder, f"the hub restarted from {source}; {lost.rounds} rounds accepted after that are lost")
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
        self._spec, self._hub, self._changed, self._checkpoints = spec, hub, changed, checkpoints_of(spec)
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
        position, zero_s = self._hub.outbox.log.position_record(), time.monotonic() - now_s
        metadata = {**position, "session": self._spec.session, "zero_s": zero_s, **self._spec.origin}
        held = state.hub.pin_weights()
        parts = copy.deepcopy(state.to_parts(now_s), {id(tree): tree for tree in held})
        self._snapshot_s += time.monotonic() - began_s
        return _HubSnapshot(state.accounting.totals.round, parts, metadata, held)

    def _write(self, snapshot: _HubSnapshot) -> CheckpointError | None:
        try:
            self._checkpoints.save(snapshot.round, snapshot.parts, snapshot.metadata)
        except CheckpointError as error:
            log_line(self._spec.folder, f"round {snapshot.round} was not saved: {error}")
            return error
        log_line(self._spec.folder, f"saved round {snapshot.round}")
        return None

    def _finish(self, snapshot: _HubSnapshot, error: CheckpointError | None) -> None:
        """After a failure the last checkpoint is still valid, the run continues, and the next save tries again."""
        self._hub.state.hub.unpin_weights(snapshot.held)
        if error is None:
            self._hub.outbox.emit(ev.Saved(round=snapshot.round, name=Checkpoints.name(snapshot.round)))
        else:
            self._saved_progress = ()
            self._hub.outbox.emit(ev.SaveFailed(round=snapshot.round, reason=str(error)))
