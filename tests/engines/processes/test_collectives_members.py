"""Members of a wire come and go, are told of each other, and are missed within the limit."""

import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.engines.processes.collectives import CONTROL_BYTES, GroupCollectives
from atoll.engines.simulator.collectives import ordered_sum

NUMEL = 13


def buffer_of(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def told(group, numbers):
    wire = GroupCollectives(group, timeout_s=60.0)
    return wire.all_gather_numbers(*numbers[wire.rank]), wire.sent_bytes, wire.control_bytes


def without(group, leaver):
    """A sum of everybody, then one of those who stay."""
    wire = GroupCollectives(group, timeout_s=60.0, piece_bytes=12)
    me = wire.rank
    wire.reduce_scatter(buffer_of(me), [1.0] * wire.size)
    if me == leaver:
        return None
    wire.remove([leaver])
    whole = buffer_of(me)
    wire.reduce_scatter(whole, [1.0] * wire.size)
    wire.all_gather(whole)
    return wire.rank, wire.size, whole, wire.all_gather_numbers(float(me))


def handed_out(group, numel, piece_bytes):
    wire = GroupCollectives(group, timeout_s=60.0, piece_bytes=piece_bytes)
    whole = buffer_of(0)[:numel].clone() if wire.rank == 0 else torch.full((numel,), float("nan"))
    wire.broadcast(whole)
    return whole, wire.sent_bytes


def kept_waiting(group, limit_s):
    """Everybody exchanges but the last rank, which comes when the others have given up."""
    wire, began = GroupCollectives(group, timeout_s=limit_s, names=["Ada", "Bob", "Eve"]), time.monotonic()
    signal, error = dist.new_group(timeout=timedelta(seconds=60)), None
    if wire.rank != wire.size - 1:
        try:
            wire.reduce_scatter(buffer_of(wire.rank), [1.0] * wire.size)
        except ExchangeFailed as failed:
            error = str(failed), time.monotonic() - began
    dist.barrier(signal)
    return error


def multiplied(group, piece_bytes):
    """The inner products of all buffers over this rank's slice."""
    wire, products = GroupCollectives(group, timeout_s=60.0, piece_bytes=piece_bytes), torch.zeros(3, 3, dtype=torch.float64)
    wire.reduce_scatter(buffer_of(wire.rank), [1.0, 0.0, 2.0], inner_products=products)
    return products


def test_everybody_hears_everybodys_numbers_in_rank_order(four):
    numbers = [(1.0, 0.1), (2.0, -3e300), (3.0, float("inf"))]
    for heard, sent_bytes, control_bytes in four.run(told, numbers, size=3):
        assert heard == [list(pair) for pair in numbers]
        assert (sent_bytes, control_bytes) == (0, CONTROL_BYTES * 2 * 2)


def test_a_wire_of_one_speaks_to_nobody(four):
    assert four.run(told, [(4.0, 5.0)], size=1) == [([[4.0, 5.0]], 0, 0)]


def test_when_one_has_left_the_others_close_up_and_go_on_with_the_sums_of_those_who_stay(four):
    for leaver in (0, 2):
        stay = [rank for rank in range(4) if rank != leaver]
        results = four.run(without, leaver)
        expected = ordered_sum([Tree.of({"w": buffer_of(rank)}) for rank in stay], [1.0] * 3).flat
        for place, rank in enumerate(stay):
            new_rank, size, whole, heard = results[rank]
            assert (new_rank, size) == (place, 3)
            assert torch.equal(whole, expected)
            assert heard == [[float(other)] for other in stay]


def test_what_the_first_rank_hands_out_all_have_at_any_size_of_pieces(four):
    for numel, piece_bytes in ((NUMEL, 1 << 20), (NUMEL, 20), (1, 4), (NUMEL, 3)):
        for whole, sent_bytes in four.run(handed_out, numel, piece_bytes, size=3):
            assert torch.equal(whole, buffer_of(0)[:numel])
            assert sent_bytes == 0, "it is no algorithm's"


def test_a_member_that_does_not_come_is_named_when_the_limit_is_over_and_what_stands_is_said(four):
    *errors, late = four.run(kept_waiting, 0.3, size=3)
    assert late is None
    for (text, waited_s), name in zip(errors, ("Ada", "Bob"), strict=True):
        assert re.match(rf"{name} could not (send to|hear from) (Ada|Bob|Eve) within 0.3 s", text)
        assert "saved before this round is valid" in text
        assert 0.3 <= waited_s < 20
    assert any("Eve" in text for text, _ in errors)


def test_inner_products_are_those_of_the_buffers_at_any_size_of_pieces(four):
    buffers = torch.stack([buffer_of(rank) for rank in range(3)]).double()
    for piece_bytes in (1 << 20, 8):
        for rank, products in enumerate(four.run(multiplied, piece_bytes, size=3)):
            mine = buffers[:, slice(*shard_range(NUMEL, rank, 3))]
            torch.testing.assert_close(products, mine @ mine.T, rtol=1e-5, atol=1e-5)
