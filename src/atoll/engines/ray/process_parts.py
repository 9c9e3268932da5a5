"""What goes to the processes of a run on Ray: what workers train, and what keeps the hub's log and checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import ExchangeFailed
from atoll.core.events import Arrived
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Workload
from atoll.core.serialization import load_tree
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.ray import bootstrap
from atoll.engines.ray.messages import LostRounds, SavedCheckpoint, dtype_name, tree_view
from atoll.engines.ray.spec import further_devices
from atoll.engines.training_setup import loss_of, replica_of
from atoll.engines.warm_start import Cache, load_data
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run, device_of, dtype_of
from atoll.runs.workloads import Loaded, fingerprint, island_workload, plain_workload
from atoll.telemetry.event_log import JsonlSink, read_events

HUB_LOG = "hub.log"
HUB_LOCK = "hub.lock"
"""Held by the hub that writes the run's log and checkpoints, as long as its process lives."""
BEGIN = "begin.safetensors"
"""The weights that a hub begins with: also one that takes the place of another before anything was saved."""

_APART_S = 0.2  # between two looks at the lock


class Made:
    """What a worker trains: made in its process, from its machine's data.

    Args:
        run: the run, resolved.
        weights: a reference to the bits of the warm start, where the data are dealt out by it.
        given: a workload to train instead of the Run's model and data.
        devices: of the worker.
    """

    def __init__(self, run: Run, weights: tuple[Any, ...], given: Workload | None, devices: int) -> None:
        self._run, self._devices = run, devices
        self._workload = given or self._dealt(load_data(run, Cache()), weights)
        self._loss = loss_of(run, self._workload)

    def _dealt(self, data: Loaded, weights: tuple[Any, ...]) -> Workload:
        """The data in their shards."""
        run = self._run
        if not weights:  # then nobody looks at any
            return island_workload(run, data, Tree.of({}))
        like = initial_weights(plain_workload(run, data), device_of(run), dtype_of(run))
        return island_workload(run, data, tree_view(bootstrap.library().get(weights[0]), like.layout, dtype_name(like)).copy())

    @property
    def fingerprint(self) -> str:
        return str(fingerprint(self._workload))

    def replica(self, number: int) -> LocalReplica:
        beside = further_devices(device_of(self._run), self._devices)
        return replica_of(self._run, self._workload, self._loss, number, more_devices=beside)


@dataclass(frozen=True)
class FolderStorage:
    """Event log and checkpoints of a hub in the run's folder. A messages.RunStorage.

    Args:
        folder: the run's.
        checkpoints: how many are kept.
        origin: what a checkpoint says of where it comes from.
    """

    folder: Path
    checkpoints: int
    origin: Mapping[str, str | None]

    @property
    def _kept(self) -> Checkpoints:
        return Checkpoints(RunFolder(self.folder).checkpoints, keep=self.checkpoints)

    def lock(self) -> None:
        lock = os.open(self.folder / HUB_LOCK, os.O_WRONLY | os.O_CREAT, 0o644)  # open until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the hub of a command that was killed ends a second or two after it
            self.log("another hub of this run is still there, and is waited for")
            fcntl.flock(lock, fcntl.LOCK_EX)

    def initial_weights(self) -> Tree:
        return load_tree(self.folder / BEGIN)

    def newest_checkpoint(self) -> SavedCheckpoint | None:
        kept, newest = self._kept, self._kept.newest()
        if newest is None:
            return None
        return SavedCheckpoint(newest.path.name, newest.metadata, lambda part, like: kept.load(newest, part, like))

    def save_checkpoint(self, round: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self._kept.save(round, parts, {**metadata, **self.origin})

    def checkpoint_name(self, round: int) -> str:
        return Checkpoints.name(round)

    def lost_rounds(self, after: int) -> LostRounds:
        return lost_after(RunFolder(self.folder).events, after)

    def open_event_log(self, after: int) -> JsonlSink:
        return JsonlSink(RunFolder(self.folder).events, append_at=after)

    def log(self, text: str) -> None:
        path = self.folder / "logs" / HUB_LOG
        with suppress(OSError):  # a full disk is no reason to stop
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def outlast_hub(folder: Path, *, limit_s: float, say: Callable[[str], object]) -> None:
    """Wait until no hub of an earlier command is left: until then it may write the log, and a newer checkpoint.

    Args:
        folder: of the run.
        limit_s: how long to wait.
        say: takes a line, if there is one.

    Raises:
        ExchangeFailed: it is still there after the limit.
    """
    began_s, said = time.monotonic(), False
    with open(folder / HUB_LOCK, "a", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() - began_s >= limit_s:
                    raise ExchangeFailed(
                        f"the hub of an earlier command still keeps {folder}, after {limit_s:g} s (engine.hub_timeout_s). "
                        f"Its process is in logs/{HUB_LOG}: end it, and resume."
                    ) from error
            if not said:
                say("the hub of an earlier command is still there, and is waited for")
                said = True
            time.sleep(_APART_S)


def lost_after(log: Path, after: int) -> LostRounds:
    """What stands in a log after so many bytes."""
    arrived = [event for event in read_events(log, [Arrived], after=after) if isinstance(event, Arrived)] if log.exists() else []
    return LostRounds(len(arrived), sum(event.steps for event in arrived))
