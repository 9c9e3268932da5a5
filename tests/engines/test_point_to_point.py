"""Messages arrive whole and in order over either transport, and a rank that does not answer is unreachable after the timeout."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from atoll.engines.point_to_point import BatchTransport, GlooTransport, PeerUnreachable, transport_for

TRANSPORTS = [GlooTransport, BatchTransport]


def _rows(rank, size):
    """What a rank sends to each other rank: rows of different lengths, so that a mix-up shows."""
    return {to: torch.arange(5 + to, dtype=torch.float32) + 100 * rank + 1000 * to for to in range(size)}


def all_to_all(group, kind, turns):
    """Several posts, all started before the first is waited for."""
    transport, rank, size = kind(group), dist.get_rank(group), dist.get_world_size(group)
    others, waits, turned = [other for other in range(size) if other != rank], [], []
    for turn in range(turns):
        received = {other: torch.empty(5 + rank) for other in others}
        sent = {to: row + turn for to, row in _rows(rank, size).items() if to != rank}
        waits.append(transport.post(sent, received))
        turned.append(received)
    for wait in waits:
        wait(30.0)
    return turned


def one_way(group, kind):
    """Rank 0 only sends, rank 2 only receives, rank 1 does neither."""
    transport, rank, number = kind(group), dist.get_rank(group), torch.zeros(1)
    sends = {2: torch.tensor([7.0])} if rank == 0 else {}
    receives = {0: number} if rank == 2 else {}
    transport.post(sends, receives)(30.0)
    return float(number)


def unanswered(group, kind, timeout_s):
    """Rank 0 waits for rank 1, which sends nothing until rank 0 has given up."""
    transport, rank, lost_peer = kind(group), dist.get_rank(group), None
    signal = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    if rank == 0:
        began = time.monotonic()
        try:
            transport.post({}, {1: torch.empty(3)})(timeout_s)
        except PeerUnreachable as lost:
            lost_peer = lost.rank, lost.action, time.monotonic() - began
    dist.barrier(signal)
    return lost_peer


def kind_for(group):
    return type(transport_for(group)).__name__


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_messages_of_many_posts_arrive_whole_and_in_order(four, kind):
    for rank, turned in enumerate(four.run(all_to_all, kind, 3)):
        for turn, received in enumerate(turned):
            for other, row in received.items():
                assert torch.equal(row, _rows(other, 4)[rank] + turn)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_may_only_send_or_only_receive_or_do_neither(four, kind):
    assert four.run(one_way, kind, size=3) == [0.0, 0.0, 7.0]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_that_does_not_answer_is_unreachable_after_the_timeout(four, kind):
    (rank, action, waited_s), _ = four.run(unanswered, kind, 0.3, size=2)
    assert rank == 1
    assert action in ("receive from", "exchange with")
    assert 0.3 <= waited_s < 20


def test_gloo_groups_use_single_messages(four):
    assert four.run(kind_for, size=2) == ["GlooTransport"] * 2
