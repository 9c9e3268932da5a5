"""The event log and the checkpoints of a hub, in the run's folder, and the lock that one hub at a time holds."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import ExchangeFailed
from atoll.core.events import Arrived
from atoll.core.flat_tree import Tree
from atoll.core.serialization import load_tree
from atoll.engines.checkpoints import Checkpoints
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import JsonlSink, read_events

HUB_LOG = "hub.log"
HUB_LOCK = "hub.lock"
"""Held by the hub that writes the run's log and checkpoints, for the lifetime of its process."""
INITIAL_WEIGHTS = "begin.safetensors"
"""The weights of a hub that finds no checkpoint."""
_POLL_S = 0.2


class SavedCheckpoint(NamedTuple):
    """A checkpoint of a run. `load` reads a part of it, with the types of a given value."""

    name: str
    metadata: Mapping[str, Any]
    load: Callable[[str, Any], Any]


class LostRounds(NamedTuple):
    """Accepted rounds, and their local updates, that the log has after the last checkpoint."""

    rounds: int
    local_updates: int


@dataclass(frozen=True)
class HubStorage:
    """Event log and checkpoints of a run. It travels to the hub's process, and to the process of each hub after it."""

    folder: Path  # of the run
    keep: int  # number of checkpoints
    origin: Mapping[str, str | None]  # digests of the Run and of the data, for a checkpoint's metadata

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(RunFolder(self.folder).checkpoints, keep=self.keep)

    def lock(self) -> None:
        """Waits until no other process holds the run's storage, and holds it for the lifetime of this process."""
        lock = os.open(self.folder / HUB_LOCK, os.O_WRONLY | os.O_CREAT, 0o644)  # open until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the hub of a killed command ends one or two seconds after it
            self.log("this hub waits for another hub of the run, which still holds the lock")
            fcntl.flock(lock, fcntl.LOCK_EX)

    def initial_weights(self) -> Tree:
        return load_tree(self.folder / INITIAL_WEIGHTS)

    def newest_checkpoint(self) -> SavedCheckpoint | None:
        checkpoints, newest = self._checkpoints, self._checkpoints.newest()
        if newest is None:
            return None
        return SavedCheckpoint(newest.path.name, newest.metadata, lambda part, like: checkpoints.load(newest, part, like))

    def save_checkpoint(self, round: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Writes a checkpoint atomically."""
        self._checkpoints.save(round, parts, {**metadata, **self.origin})

    def lost_rounds(self, after: int) -> LostRounds:
        """Rounds that the event log has after this many bytes."""
        return rounds_after(RunFolder(self.folder).events, after)

    def open_event_log(self, after: int) -> JsonlSink:
        """Truncates the event log to this many bytes, and opens it for appending."""
        return JsonlSink(RunFolder(self.folder).events, append_at=after)

    def log(self, text: str) -> None:
        """Appends a line to the hub's text log."""
        path = self.folder / "logs" / HUB_LOG
        with suppress(OSError):  # a full disk does not end the run
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def wait_for_former_hub(folder: Path, *, timeout_s: float, log: Callable[[str], object]) -> None:
    """Wait until the hub of an earlier command has ended: until then it may write the log and a newer checkpoint. Raises
    ExchangeFailed if it holds the lock after `timeout_s` seconds."""
    began_s, logged = time.monotonic(), False
    with open(folder / HUB_LOCK, "a", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() - began_s >= timeout_s:
                    raise ExchangeFailed(
                        f"the hub of an earlier command still holds {folder}, after {timeout_s:g} s (engine.hub_timeout_s). "
                        f"Its process is in logs/{HUB_LOG}: end it, and resume."
                    ) from error
            if not logged:
                log("waiting for the hub of an earlier command to end")
                logged = True
            time.sleep(_POLL_S)


def rounds_after(log: Path, after: int) -> LostRounds:
    """The rounds in an event log after this many bytes."""
    events = read_events(log, [Arrived], after=after) if log.exists() else ()
    steps = [event.steps for event in events if isinstance(event, Arrived)]
    return LostRounds(len(steps), sum(steps))
