"""What goes to the processes of a run on Ray."""

import fcntl
import os
import threading

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.events import Saved
from atoll.engines.ray import process_parts
from atoll.engines.ray.messages import LostRounds
from atoll.engines.ray.process_parts import FolderStorage, Made, lost_after
from atoll.engines.ray.spec import Ray
from atoll.runs.run import candidates
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.simulated_runs import arrived


def test_what_was_taken_after_a_checkpoint_is_counted_from_there_and_a_line_that_was_cut_short_does_not_count(tmp_path):
    log = tmp_path / "events.jsonl"
    assert lost_after(log, 0) == LostRounds(0, 0)
    with JsonlSink(log) as sink:
        sink.emit(arrived(round=0, version=1, steps=4))
        after = sink.position()
        sink.emit(Saved(round=1, name="00000001"))
        sink.emit(arrived(round=1, version=2, steps=2))
        sink.emit(arrived(round=2, version=3, steps=3))
    whole = log.read_bytes()
    log.write_bytes(whole[:-10])
    assert lost_after(log, after) == LostRounds(1, 2)
    log.write_bytes(b"not even JSON" + whole[13:])
    assert lost_after(log, after) == LostRounds(2, 5), "what is before is not read at all"


def test_a_hub_waits_until_the_one_before_it_is_gone(tmp_path):
    storage = FolderStorage(tmp_path, 1, {})
    before = os.open(tmp_path / "hub.lock", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(before, fcntl.LOCK_EX)
    coming = threading.Thread(target=storage.lock)
    coming.start()
    coming.join(0.05)
    assert coming.is_alive()
    os.close(before)
    coming.join(20)
    assert not coming.is_alive()
    assert "another hub of this run is still there" in (tmp_path / "logs" / "hub.log").read_text()


def test_a_line_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "logs").write_text("where the folder should be")
    FolderStorage(tmp_path, 1, {}).log("not written")


@pytest.fixture
def reads(monkeypatch):
    """Each time that data are loaded."""
    counted, load = [], process_parts.load_data
    monkeypatch.setattr(process_parts, "load_data", lambda *arguments: counted.append(arguments) or load(*arguments))
    return counted


def test_a_worker_reads_its_data_once(reads):
    run = Ray(processes=2).fitted(override(recipes.toy_async(), ["data.examples=512", "data.eval_examples=128"], candidates))
    made = Made(run.resolved, (), None, 2)
    assert len(made.fingerprint) > 0
    assert len(reads) == 1
    on_two, on_one = (len(found.replica(0).tensors()["parameters"]) for found in (made, Made(run.resolved, (), None, 1)))
    assert on_two == 2 * on_one, "it has a copy for each of its devices"
