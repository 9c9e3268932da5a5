"""The groups that a rank belongs to, and what ranks read from the store."""

import pytest
import torch
from torch.distributed import HashStore

from atoll.core.errors import ExchangeFailed
from atoll.engines import liveness
from atoll.engines.liveness import FailureAttribution, store_heartbeat
from atoll.engines.processes.rank import join_ranks
from atoll.engines.processes.rank_context import RankContext, create_context
from tests.process_pool import context_of


def place_and_groups(group, devices):
    """This rank's place, and the ranks of each of its groups."""
    context = context_of(group, devices, inside=devices > 1)
    heard = [
        None if group_ is None else [row[0] for row in group_.all_gather_numbers(context.rank)]
        for group_ in (context.counterparts, context.island_devices)
    ]
    return context.island, context.device, context.is_rank_zero, *heard


def differing(group, texts):
    context = context_of(group)
    return context.differing_ranks("data", texts[context.rank])


def wait_for_values(group):
    """Rank 0 waits for a value that is never set, and rank 1 for one that is set later."""
    context = context_of(group)
    error, limit_s = None, context.all_ranks.timeout_s
    if context.is_rank_zero:
        context.all_ranks.timeout_s = 0.2
        try:
            context.get("never", of=1)
        except ExchangeFailed as failed:
            error = failed
        context.all_ranks.timeout_s = limit_s
        context.store.set("now", "here I am")
    context.barrier()
    return error, context.get("now", of=0)


def test_ranks_belong_to_islands_in_order_and_are_grouped_with_their_counterparts(four):
    assert four.run(place_and_groups, 2) == [
        (0, 0, True, [0.0, 2.0], [0.0, 1.0]),
        (0, 1, False, [1.0, 3.0], [0.0, 1.0]),
        (1, 0, False, [0.0, 2.0], [2.0, 3.0]),
        (1, 1, False, [1.0, 3.0], [2.0, 3.0]),
    ]
    assert four.run(place_and_groups, 1, size=3) == [(rank, 0, rank == 0, [0.0, 1.0, 2.0], None) for rank in range(3)]


def test_all_ranks_learn_which_ranks_have_another_text_than_rank_0(four):
    assert four.run(differing, ["same"] * 3, size=3) == [[]] * 3
    assert four.run(differing, ["one", "other", "one", "third"]) == [[1, 3]] * 4


def test_a_value_that_is_never_set_is_waited_for_up_to_the_timeout(four):
    (error, word), (nothing, too) = four.run(wait_for_values, size=2)
    assert "rank 0 waited" in str(error)
    assert "for rank 1 to set never: it takes longer" in str(error)
    assert (nothing, word, too) == (None, "here I am", "here I am")


def test_one_process_is_a_group_of_its_own(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with join_ranks(30.0) as (store, rank, size):
        context = create_context(store, rank, size)
        assert (context.rank, context.size, context.is_rank_zero) == (0, 1, True)
        context.barrier()
        whole = torch.arange(3.0)
        context.counterparts.all_gather(whole)
        assert context.counterparts.sent_bytes == 0
        context.close()


class Group:
    timeout_s = 60.0


@pytest.fixture
def contexts():
    store = HashStore()
    both = [RankContext(rank, 2, 1, store, Group(), Group(), None, store_heartbeat(store, rank)) for rank in (0, 1)]
    yield both
    for context in both:
        context.heartbeat.close()


def test_a_rank_without_heartbeats_is_not_waited_for(contexts, monkeypatch):
    monkeypatch.setattr(liveness, "SILENCE_LIMIT_S", -1.0)
    with pytest.raises(ExchangeFailed, match=r"rank 0 waited \d+ s for rank 1 to set record/3/1: its last heartbeat was 0 s ago"):
        contexts[0].get("record/3/1", of=1)


def test_a_rank_that_recorded_an_exit_reason_is_not_waited_for(contexts):
    FailureAttribution(contexts[1].store, 1, [0, 1]).record_exit_reason("the disk is full")
    with pytest.raises(ExchangeFailed, match=r"rank 1 to set warm: it has ended \(the disk is full\)"):
        contexts[0].get("warm", of=1)


def test_a_value_in_the_store_is_read_at_once(contexts):
    contexts[1].store.set("a", "b")
    assert contexts[0].get("a", of=1) == "b"
