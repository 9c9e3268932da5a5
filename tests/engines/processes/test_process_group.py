"""Who talks with whom, and what processes can leave for each other."""

import torch

from atoll.core.errors import AtollError, ConfigError, ExchangeFailed
from atoll.engines.processes.process_group import is_started, join, meet, size_given
from atoll.testing.process_runs import world_of


def introduced(group, devices):
    """Everybody's place, and whom it hears on each of its wires."""
    world = world_of(group, devices, inside=devices > 1)
    heard = [None if wire is None else [row[0] for row in wire.tell(world.rank)] for wire in (world.islands, world.inside)]
    return world.island, world.device, world.first, *heard


def asked(group, words):
    """Whether all agree."""
    world = world_of(group)
    try:
        world.agreed("data", words[world.rank], "data")
    except AtollError as error:
        return error
    return None


def waited(group):
    """The first rank waits for a word that nobody leaves, and the other for one that is left later."""
    world = world_of(group)
    error, limit_s = None, world.everybody.limit_s
    if world.first:
        world.everybody.limit_s = 0.2
        try:
            world.word("never", of=1)
        except ExchangeFailed as failed:
            error = failed
        world.everybody.limit_s = limit_s
        world.leave_word("now", "here I am")
    world.meet()
    return error, world.word("now", of=0)


def test_ranks_are_dealt_out_to_islands_in_order_and_talk_with_their_counterparts(four):
    assert four.run(introduced, 2) == [
        (0, 0, True, [0.0, 2.0], [0.0, 1.0]),
        (0, 1, False, [1.0, 3.0], [0.0, 1.0]),
        (1, 0, False, [0.0, 2.0], [2.0, 3.0]),
        (1, 1, False, [1.0, 3.0], [2.0, 3.0]),
    ]
    assert four.run(introduced, 1, size=3) == [(rank, 0, rank == 0, [0.0, 1.0, 2.0], None) for rank in range(3)]


def test_who_has_something_else_than_the_first_rank_is_named_everywhere(four):
    assert four.run(asked, ["same"] * 3, size=3) == [None] * 3
    for error in four.run(asked, ["one", "other", "one", "third"]):
        assert isinstance(error, ConfigError)
        assert "ranks [1, 3] have data that differ from rank 0's" in str(error)


def test_a_word_that_nobody_leaves_is_waited_for_no_longer_than_allowed(four):
    (error, word), (nothing, too) = four.run(waited, size=2)
    assert "rank 0 waited" in str(error)
    assert "a word of rank 1 (never): it takes longer than that" in str(error)
    assert (nothing, word, too) == (None, "here I am", "here I am")


def refused(group):
    try:
        join(world_of(group).store, 0, 3, devices=2)
    except ConfigError as error:
        return str(error)
    return None


def test_processes_that_make_up_no_islands_are_refused(four):
    assert all("3 processes cannot be islands of 2 devices" in text for text in four.run(refused, size=3))


def test_a_process_knows_whether_torchrun_started_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_started()
    monkeypatch.setenv("RANK", "1")
    assert not is_started()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert is_started()
    assert size_given() == 3


def test_one_process_alone_meets_itself(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    store, rank, size = meet(30.0)
    world = join(store, rank, size)
    assert (world.rank, world.size, world.first) == (0, 1, True)
    world.meet()
    whole = torch.arange(3.0)
    world.islands.gather(whole)
    assert world.islands.sent_bytes == 0
    world.close()
