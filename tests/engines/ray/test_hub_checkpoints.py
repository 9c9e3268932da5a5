"""A hub's checkpoints, their events, the outbox of events, the text log and the lock."""

import fcntl
import os
import threading
import time
from dataclasses import replace
from functools import partial
from threading import Condition
from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import CheckpointError
from atoll.core.events import Saved, SaveFailed
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_checkpoints import CheckpointWriter, EventOutbox, RecoveredHub, lock_folder, log_line, rounds_after
from atoll.engines.ray.hub_state import HubState
from atoll.engines.ray.messages import LostRounds
from atoll.engines.ray.spec import Ray
from atoll.engines.round_record import WallClock
from atoll.optim.sgd import SGD
from atoll.recipes.toy import toy_async
from atoll.runs.cluster import Cluster
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Train
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.sinks import MemorySink
from tests.samples import arrived


class MemoryLog(MemorySink):
    """Positions count events instead of bytes."""

    def position_record(self):
        return {"events_bytes": len(self.events)}


class MemoryCheckpoints:
    """Keeps the metadata of checkpoints, and the events that the log had when the last one was written."""

    def __init__(self, log, fails):
        self.event_log, self.fails, self.events_before, self.saved = log, fails, [], []

    def save(self, round, parts, metadata):
        self.events_before = list(self.event_log.events)
        if self.fails:
            raise CheckpointError("the disk is full")
        self.saved.append((round, metadata))


@pytest.fixture
def writer_of(tmp_path, monkeypatch):
    return lambda fails=False: make_writer(tmp_path, monkeypatch, fails)


def make_writer(folder, monkeypatch, fails):
    log = MemoryLog()
    algorithm = AsyncLocalSGD(inner_steps=4, outer=SGD(lr=1.0))
    run = replace(toy_async(), algorithm=algorithm, train=Train(steps=8, batch_size=1), cluster=Cluster(islands=1))
    outbox, storage = EventOutbox(log), MemoryCheckpoints(log, fails)
    monkeypatch.setattr("atoll.engines.ray.hub_checkpoints.Checkpoints.save", storage.save)
    state = HubState(run, Ray(), Tree.of({"w": torch.ones(3)}), (100,), epoch=1, sink=outbox)
    spec = SimpleNamespace(run=run, folder=folder, origin={"data": "of the run"}, session="a")
    writer = CheckpointWriter(spec, RecoveredHub(state, outbox, WallClock(), started=False), Condition())
    return writer, state, storage, log


@pytest.mark.parametrize(("fails", "kind"), [(False, Saved), (True, SaveFailed)])
def test_the_event_of_a_checkpoint_follows_its_write(writer_of, fails, kind):
    writer, state, storage, log = writer_of(fails)
    state.join({0: 0}, 0.0)
    before = list(log.events)
    assert writer.save() is not fails
    assert storage.events_before == before
    assert [type(event) for event in log.events[len(before) :]] == [kind]


def test_a_checkpoint_has_the_position_of_the_log_at_its_snapshot(writer_of):
    writer, state, storage, log = writer_of()
    state.join({0: 0}, 0.0)
    writer.save()
    assert storage.saved[0][1]["events_bytes"] == len(log.events) - 1
    assert storage.saved[0][1]["data"] == "of the run"
    writer.save()
    assert len(storage.saved) == 1, "nothing has changed since"


def test_the_time_of_a_snapshot_is_reported_once(writer_of):
    writer, *_ = writer_of()
    writer.save_locked()
    assert writer.snapshot_seconds() > 0
    assert writer.snapshot_seconds() == 0


def test_a_stopped_writer_saves_nothing(writer_of):
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


def test_rounds_after_a_checkpoint_are_counted_without_a_truncated_last_line(tmp_path):
    folder, log = RunFolder(tmp_path), tmp_path / "events.jsonl"
    assert rounds_after(folder, 0) == LostRounds(0, 0)
    with JsonlSink(log) as sink:
        sink.emit(arrived(round=0, version=1, steps=4))
        after = sink.position()
        sink.emit(Saved(round=1, name="00000001"))
        sink.emit(arrived(round=1, version=2, steps=2))
        sink.emit(arrived(round=2, version=3, steps=3))
    whole = log.read_bytes()
    log.write_bytes(whole[:-10])
    assert rounds_after(folder, after) == LostRounds(1, 2)
    log.write_bytes(b"not even JSON" + whole[13:])
    assert rounds_after(folder, after) == LostRounds(2, 5), "the log before the position is not read"


def test_a_hub_waits_until_the_former_hub_has_ended(tmp_path):
    before, log = os.open(tmp_path / "hub.lock", os.O_WRONLY | os.O_CREAT), tmp_path / "logs" / "hub.log"
    fcntl.flock(before, fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: os.close(lock_folder(tmp_path, partial(log_line, tmp_path))))
    waiting.start()
    deadline_s = time.monotonic() + 20.0
    while not log.exists() or "waiting for the hub of an earlier command" not in log.read_text():
        assert waiting.is_alive()
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert waiting.is_alive()
    os.close(before)
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_hub_continues_if_its_log_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("where the folder should be")
    log_line(tmp_path, "not written")
