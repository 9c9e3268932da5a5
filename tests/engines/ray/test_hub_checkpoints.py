"""A hub's checkpoints, their events, and the outbox of events."""

from dataclasses import replace
from threading import Condition
from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import CheckpointError
from atoll.core.events import Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_checkpoints import CheckpointWriter, EventOutbox, RecoveredHub
from atoll.engines.ray.hub_state import HubState
from atoll.engines.ray.spec import Ray
from atoll.engines.round_record import WallClock
from atoll.optim.sgd import SGD
from atoll.recipes.toy import toy_async
from atoll.runs.cluster import Cluster
from atoll.runs.run import Train
from atoll.telemetry.sinks import MemorySink


class MemoryLog(MemorySink):
    """Positions count events instead of bytes."""

    def position(self):
        return len(self.events)


class MemoryStorage:
    """Keeps checkpoints, and the events that the log had when the last one was written."""

    def __init__(self, log, fails):
        self.event_log, self.fails, self.events_before, self.saved = log, fails, [], []

    def save_checkpoint(self, round, parts, metadata):
        self.events_before = list(self.event_log.events)
        if self.fails:
            raise CheckpointError("the disk is full")
        self.saved.append((round, metadata))

    def log(self, text):
        pass


def writer_of(fails=False):
    log = MemoryLog()
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0))
    run = replace(toy_async(), algorithm=algorithm, train=Train(steps=8, batch_size=1), cluster=Cluster(islands=1))
    outbox, storage = EventOutbox(log), MemoryStorage(log, fails)
    state = HubState(run, Ray(), Tree.of({"w": torch.ones(3)}), (100,), epoch=1, sink=outbox)
    spec = SimpleNamespace(storage=storage, session="a")
    writer = CheckpointWriter(spec, RecoveredHub(state, outbox, WallClock(), started=False), Condition())
    return writer, state, storage, log


@pytest.mark.parametrize(("fails", "kind"), [(False, Saved), (True, SaveFailed)])
def test_the_event_of_a_checkpoint_follows_its_write(fails, kind):
    writer, state, storage, log = writer_of(fails)
    state.join({0: 0}, 0.0)
    before = list(log.events)
    assert writer.save() is not fails
    assert storage.events_before == before
    assert [type(event) for event in log.events[len(before) :]] == [kind]


def test_a_checkpoint_has_the_position_of_the_log_at_its_snapshot():
    writer, state, storage, log = writer_of()
    state.join({0: 0}, 0.0)
    writer.save()
    assert storage.saved[0][1]["events_bytes"] == len(log.events) - 1
    writer.save()
    assert len(storage.saved) == 1, "nothing has changed since"


def test_the_time_of_a_snapshot_is_reported_once():
    writer, *_ = writer_of()
    writer.save_locked()
    assert writer.snapshot_seconds() > 0
    assert writer.snapshot_seconds() == 0


def test_a_stopped_writer_saves_nothing():
    writer, state, storage, _ = writer_of()
    state.join({0: 0}, 0.0)
    writer.stop()
    assert not writer.save()
    assert storage.saved == []


def test_the_outbox_repeats_events_whose_reply_was_lost():
    outbox, events = EventOutbox(MemoryLog()), [Saved(round=round, name=f"{round:08d}") for round in (1, 2, 3)]
    for event in events[:2]:
        outbox.emit(event)
    assert outbox.after(0) == outbox.after(0) == (events[:2], 2)
    outbox.emit(events[2])
    assert outbox.after(2) == ([events[2]], 3)
    assert outbox.count == 3
