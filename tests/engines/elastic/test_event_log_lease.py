"""Whoever takes a log over goes on behind what counts, and whoever had it before writes into the void."""

from contextlib import contextmanager

import pytest

from atoll.core.errors import CheckpointError
from atoll.core.events import Attended, IslandLeft, RunStarted, Saved
from atoll.engines.elastic import event_log_lease
from atoll.engines.elastic.event_log_lease import TakenLog, agreed_part, stamp
from atoll.engines.elastic.state_version import Generation
from atoll.telemetry import read_events

START = RunStarted(recipe="r", algorithm="DiLoCo", islands=1, params=1, steps=1, seed=0)


def attended(number, epoch):
    who = {"known": 1, "alive": 1, "participating": 1, "attempts": 1, "digest": "0"}
    return Attended(round=number, epoch=epoch, virtual_time_s=None, wall_time_s=1.0, **who)


def written(path, *events, tail=""):
    path.write_text("".join(event.to_json() + "\n" for event in events) + tail)
    return path


def saved(number):
    return Saved(round=number, name=f"{number:08}")


def test_an_island_that_was_frozen_while_it_wrote_writes_into_the_void(tmp_path):
    path = tmp_path / "events.jsonl"
    frozen = TakenLog(path, 0)
    frozen.emit(saved(1))
    assert frozen.is_ours
    other = TakenLog(path, path.stat().st_size)
    other.emit(saved(2))
    frozen.emit(saved(99))
    other.emit(saved(3))
    assert not frozen.is_ours
    assert other.is_ours
    assert [event.round for event in read_events(path)] == [1, 2, 3]
    frozen.close()
    other.close()


def test_an_island_that_was_frozen_while_it_took_the_log_over_has_it_no_more(tmp_path, monkeypatch):
    path, others = written(tmp_path / "events.jsonl", saved(1)), []
    replacing = event_log_lease.replacing

    @contextmanager
    def frozen_after_the_rename(path, error):
        with replacing(path, error) as file:
            yield file
        monkeypatch.undo()
        others.append(TakenLog(path, path.stat().st_size))
        others[0].emit(saved(2))

    monkeypatch.setattr(event_log_lease, "replacing", frozen_after_the_rename)
    frozen = TakenLog(path, path.stat().st_size)
    frozen.emit(saved(99))
    others[0].emit(saved(3))
    assert (frozen.is_ours, others[0].is_ours) == (False, True)
    assert [event.round for event in read_events(path)] == [1, 2, 3]
    frozen.close()
    others[0].close()


@pytest.mark.parametrize("replaced", [True, False])
def test_what_was_written_since_the_log_was_read_is_not_cut_off(tmp_path, replaced):
    path = tmp_path / "events.jsonl"
    writes = TakenLog(path, 0)
    writes.emit(saved(1))
    seen, keep_bytes = stamp(path), path.stat().st_size
    if replaced:
        writes.close()
        writes = TakenLog(path, keep_bytes)
    writes.emit(saved(2))
    with pytest.raises(CheckpointError, match="another island"):
        TakenLog(path, keep_bytes, seen)
    assert writes.is_ours
    assert [event.round for event in read_events(path)] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]
    writes.close()


LEFT = IslandLeft(island=0, round=2, virtual_time_s=None, wall_time_s=1.0)
LOG = [START, attended(1, 2), saved(1), attended(2, 3), saved(2), LEFT, attended(3, 4)]


@pytest.mark.parametrize(
    ("epochs", "keeps", "last"),
    [
        ({2: 3}, 5, Generation(2, 3)),  # of a checkpoint: what came after it happens again
        ({2: 3, 3: 4, 4: 5}, 7, Generation(3, 4)),
        ({2: 9, 3: 10}, 3, Generation(1, 2)),  # others did the second round again
        ({5: 9}, 7, Generation(3, 4)),
        ({}, 0, Generation(-1, 0)),
    ],
)
def test_what_counts_is_told_by_rounds_and_epochs_and_not_by_bytes(tmp_path, epochs, keeps, last):
    path = written(tmp_path / "log", *LOG, tail='{"event": "Att')
    assert agreed_part(path, epochs) == (len("".join(event.to_json() + "\n" for event in LOG[:keeps])), last)


def test_a_log_that_is_not_there_has_nothing(tmp_path):
    assert agreed_part(tmp_path / "log", {4: 5}) == (0, Generation(-1, 0))


def test_a_log_that_cannot_be_taken_over_stays_as_it_is(tmp_path):
    with pytest.raises(CheckpointError, match="untouched"):
        TakenLog(tmp_path / "nowhere" / "log", 5)
