"""Messages arrive in order and whole, by either carrier, and a rank that does not answer is missed within the limit."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from atoll.engines.processes.transport import BatchCarrier, GlooCarrier, Missed, carrier_of

CARRIERS = [GlooCarrier, BatchCarrier]


def _rows(rank, size):
    """What a rank sends to each: of another length for everybody, so that a mix-up shows."""
    return {to: torch.arange(5 + to, dtype=torch.float32) + 100 * rank + 1000 * to for to in range(size)}


def all_to_all(group, kind, turns):
    """Several posts, all of them begun before the first is waited for."""
    carrier, rank, size = kind(group), dist.get_rank(group), dist.get_world_size(group)
    others, waits, turned = [other for other in range(size) if other != rank], [], []
    for turn in range(turns):
        received = {other: torch.empty(5 + rank) for other in others}
        sent = {to: row + turn for to, row in _rows(rank, size).items() if to != rank}
        waits.append(carrier.post(sent, received))
        turned.append(received)
    for wait in waits:
        wait(30.0)
    return turned


def one_way(group, kind):
    """Some send only and some receive only; who has nothing to do waits for nothing."""
    carrier, rank, number = kind(group), dist.get_rank(group), torch.zeros(1)
    sends = {2: torch.tensor([7.0])} if rank == 0 else {}
    receives = {0: number} if rank == 2 else {}
    carrier.post(sends, receives)(30.0)
    return float(number)


def unanswered(group, kind, limit_s):
    """Rank 0 waits for rank 1, which says nothing until rank 0 has given up."""
    carrier, rank, told = kind(group), dist.get_rank(group), None
    signal = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    if rank == 0:
        began = time.monotonic()
        try:
            carrier.post({}, {1: torch.empty(3)})(limit_s)
        except Missed as missed:
            told = missed.rank, missed.doing, time.monotonic() - began
    dist.barrier(signal)
    return told


def kind_for(group):
    return type(carrier_of(group)).__name__


@pytest.mark.parametrize("kind", CARRIERS)
def test_messages_of_many_posts_arrive_whole_and_in_order(four, kind):
    for rank, turned in enumerate(four.run(all_to_all, kind, 3)):
        for turn, received in enumerate(turned):
            for other, row in received.items():
                assert torch.equal(row, _rows(other, 4)[rank] + turn)


@pytest.mark.parametrize("kind", CARRIERS)
def test_who_only_sends_or_only_receives_or_neither_is_carried_too(four, kind):
    assert four.run(one_way, kind, size=3) == [0.0, 0.0, 7.0]


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_rank_that_does_not_answer_is_missed_when_the_limit_is_over(four, kind):
    (rank, doing, waited_s), _ = four.run(unanswered, kind, 0.3, size=2)
    assert rank == 1
    assert doing in ("hear from", "exchange with")
    assert 0.3 <= waited_s < 20


def test_groups_of_gloo_are_carried_by_single_messages(four):
    assert four.run(kind_for, size=2) == ["GlooCarrier"] * 2
