"""The event log, the text log and the lock of a hub."""

import fcntl
import os
import threading

from atoll.core.events import Saved
from atoll.engines.ray.hub_storage import HubStorage, LostRounds, rounds_after
from atoll.telemetry.event_log import JsonlSink
from tests.samples import arrived


def test_rounds_after_a_checkpoint_are_counted_without_a_truncated_last_line(tmp_path):
    log = tmp_path / "events.jsonl"
    assert rounds_after(log, 0) == LostRounds(0, 0)
    with JsonlSink(log) as sink:
        sink.emit(arrived(round=0, version=1, steps=4))
        after = sink.position()
        sink.emit(Saved(round=1, name="00000001"))
        sink.emit(arrived(round=1, version=2, steps=2))
        sink.emit(arrived(round=2, version=3, steps=3))
    whole = log.read_bytes()
    log.write_bytes(whole[:-10])
    assert rounds_after(log, after) == LostRounds(1, 2)
    log.write_bytes(b"not even JSON" + whole[13:])
    assert rounds_after(log, after) == LostRounds(2, 5), "the log before the position is not read"


def test_a_hub_waits_until_the_former_hub_has_ended(tmp_path):
    storage = HubStorage(tmp_path, 1, {})
    before = os.open(tmp_path / "hub.lock", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(before, fcntl.LOCK_EX)
    waiting = threading.Thread(target=storage.lock)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    os.close(before)
    waiting.join(20)
    assert not waiting.is_alive()
    assert "waits for another hub" in (tmp_path / "logs" / "hub.log").read_text()


def test_a_hub_continues_if_its_log_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("where the folder should be")
    HubStorage(tmp_path, 1, {}).log("not written")
