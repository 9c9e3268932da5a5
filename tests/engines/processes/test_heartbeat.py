"""Signs of life: a process that counts is there, one that does not is not."""

import pytest
from torch.distributed import HashStore

from atoll.core.errors import ExchangeFailed
from atoll.engines.processes import heartbeat, process_group
from atoll.engines.processes.failure_attribution import Blame
from atoll.engines.processes.heartbeat import Pulse, Watch
from atoll.engines.processes.process_group import World


class Wire:
    limit_s = 60.0


def world_with(store, rank=0):
    return World(rank, 2, 0, 1, store, Wire(), Wire(), None, Pulse(store, rank))


def test_a_count_that_goes_on_is_a_sign_of_life(monkeypatch):
    store, now = HashStore(), [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    watch = Watch(store, 1)
    store.set("pulse/1", "1")
    assert watch.silent_s() == 0
    now[0] += 5
    assert watch.silent_s() == 5
    store.set("pulse/1", "2")
    now[0] += 5
    assert watch.silent_s() == 0


def test_a_word_of_a_rank_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(process_group, "SILENT_S", 0.0)
    here = world_with(HashStore())
    with pytest.raises(
        ExchangeFailed, match=r"rank 0 waited \d+ s for a word of rank 1 \(diary/3/1\): it has given no sign of life"
    ):
        here.word("diary/3/1", of=1)
    here.pulse.close()


def test_a_word_of_a_rank_that_has_said_why_it_ends_is_not_waited_for():
    store = HashStore()
    here = world_with(store)
    Blame(store, 1, [0, 1]).leave_last_words("the disk is full")
    with pytest.raises(ExchangeFailed, match=r"a word of rank 1 \(warm\): it has ended \(the disk is full\)"):
        here.word("warm", of=1)
    here.pulse.close()


def test_a_word_that_is_there_is_read_at_once():
    store = HashStore()
    here, there = world_with(store), world_with(store, 1)
    there.leave_word("a", "b")
    assert here.word("a", of=1) == "b"
    here.pulse.close()
    there.pulse.close()
