"""Collectives of real processes: the simulator's bits and the formula's bytes, members that leave, and members that are lost."""

import math
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.core.protocols import Encoding
from atoll.engines.chunk_reduction import encoded_mean, encoded_slices
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.simulator.collectives import ordered_sum
from atoll.optim.codecs import CODECS, WINDOW
from atoll.runs.cluster import CONTROL_BYTES, Link, all_reduce_cost
from tests.process_pool import outcomes, sum_until_killed

SIZES = [1, 3, 64, 1001]  # fewer elements than ranks, and sizes that no number of ranks or pieces divides
NUMEL = 13
MANY = 3 * 6 * WINDOW + 1
"""So many values that one of three ranks has a chunk of 2^18 bytes more than the others, and each more than are in flight."""


def buffer_of(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def reduce_and_gather(group, buffers, weights, chunk_bytes):
    """This rank's slice of the weighted sum of the buffers, the whole sum, and the payload that it sent."""
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=chunk_bytes)
    mine = collectives.reduce_scatter(buffers[collectives.rank].clone(), weights)
    whole = torch.full_like(buffers[0], float("nan"))
    start = whole.numel() * collectives.rank // collectives.size
    whole[start : start + mine.numel()] = mine
    collectives.all_gather(whole)
    return mine.clone(), whole, collectives.sent_bytes


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_simulators_bits_and_the_formulas_bytes_at_any_piece_size(four, size):
    generator = torch.Generator().manual_seed(0)
    weights = [1.0, 0.3, 7.0, 0.9][:size]
    for numel in SIZES:
        for dtype, chunk_bytes in ((torch.float32, 100), (torch.float32, 1 << 20), (torch.bfloat16, 30)):
            buffers = [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]
            expected = ordered_sum([Tree.of({"w": buffer}) for buffer in buffers], weights).flat
            cost = all_reduce_cost(numel, buffers[0].element_size(), [Link()] * size)
            results = four.run(reduce_and_gather, buffers, weights, chunk_bytes, size=size)
            for rank, (mine, whole, sent_bytes) in enumerate(results):
                start, stop = numel * rank // size, numel * (rank + 1) // size
                assert torch.equal(mine, expected[start:stop])
                assert torch.equal(whole, expected)
                assert sent_bytes == cost.sent_bytes[rank]


def exchange_encoded(group, buffers, weights, name, chunk_bytes):
    """The mean of encoded buffers, what this rank's encoding left out, the payload that it sent, and its inner products."""
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=chunk_bytes)
    flat, products = buffers[collectives.rank].clone(), torch.zeros(len(weights), len(weights), dtype=torch.float64)
    encoding = Encoding(CODECS[name], 7 + collectives.rank)
    mean = collectives.encoded_mean(flat, weights, encoding, inner_products=products)
    return mean, flat, collectives.sent_bytes, products


@pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
def test_encoded_means_have_the_simulators_bits_and_the_formulas_bytes(four, name):
    generator = torch.Generator().manual_seed(0)
    for size, numel, chunk_bytes in (
        (2, 700, 1 << 20),
        (3, 5, 1 << 20),
        (4, 5000, 1 << 20),
        (2, 300_000, 1 << 18),
        (3, 300_000, 1 << 10),  # gathered chunks that several ranks own in part
        (3, MANY, 1 << 18),
    ):
        weights = [1.0, 0.3, 0.0, 0.9][:size]
        buffers = [torch.randn(numel, generator=generator) for _ in range(size)]
        encodings = [Encoding(CODECS[name], 7 + rank) for rank in range(size)]
        simulated = torch.zeros(size, size, dtype=torch.float64)
        trees = [Tree.of({"w": buffer}) for buffer in buffers]
        expected, unsent = encoded_mean(trees, weights, encodings, inner_products=simulated)
        cost = all_reduce_cost(numel, 4, [Link()] * size, codec=CODECS[name])
        results = four.run(exchange_encoded, buffers, weights, name, chunk_bytes, size=size)
        codec = CODECS[name]
        read = torch.stack([codec.decode(codec.encode(buffer, 7 + rank), numel) for rank, buffer in enumerate(buffers)]).double()
        torch.testing.assert_close(simulated, read @ read.T, rtol=1e-12, atol=1e-9)
        of_slices = sum(products for *_, products in results)
        torch.testing.assert_close(of_slices, read @ read.T, rtol=1e-4, atol=1e-2)  # sums of chunks are in their own precision
        for rank, (mean, left_out, sent_bytes, _) in enumerate(results):
            assert torch.equal(mean, expected.flat)
            if weights[rank]:
                assert torch.equal(left_out, unsent[rank].flat)
            else:
                assert unsent[rank] is None
            assert sent_bytes == cost.sent_bytes[rank]
        whole = CODECS[name].nbytes(numel)
        times = size * (size - 1) if CODECS[name].gathers else 2 * (size - 1)
        assert sum(sent_bytes for *_, sent_bytes, _ in results) == times * whole, "no block is cut in two"


@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("fp32", "bf16-stochastic")])
def test_the_bits_of_an_encoded_mean_do_not_depend_on_where_slices_are_cut(name):
    """Equal buffers have the mean of one of them at any number of ranks: no block is cut in two."""
    buffer = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    alone, *means = (
        encoded_mean([Tree.of({"w": buffer})] * size, [1.0] * size, [Encoding(CODECS[name], 0)] * size)[0] for size in (1, 2, 4, 8)
    )
    assert all(torch.equal(mean.flat, alone.flat) for mean in means)


class WatchedCodec:
    """A codec that reports where each chunk that it encodes begins: with a seed of 0 that is the chunk's seed."""

    def __init__(self, codec, on_encode):
        self._codec, self._on_encode = codec, on_encode
        self.unit, self.gathers, self.nbytes, self.decode = codec.unit, codec.gathers, codec.nbytes, codec.decode

    def encode(self, values, seed=0):
        self._on_encode(seed)
        return self._codec.encode(values, seed)


def calls_of_an_encoded_mean(group, numel, name):
    """What an encoded mean does, in order, each with the payload that had been posted by then."""
    collectives, calls = GroupCollectives(group, timeout_s=60.0, chunk_bytes=1 << 18), []
    own = encoded_slices(CODECS[name], numel, collectives.size)[collectives.rank]

    def on_encode(start):
        if start < numel:  # else it is a chunk of the mean
            calls.append(("own" if own[0] <= start < own[1] else "others'", start, collectives.sent_bytes))

    collectives.encoded_mean(
        buffer_of(collectives.rank).repeat(numel // NUMEL + 1)[:numel],
        [1.0] * collectives.size,
        Encoding(WatchedCodec(CODECS[name], on_encode), 0),
        on_sent=lambda rank, data: calls.append(("sent", data.numel(), collectives.sent_bytes)),
        on_received=lambda rank, data: calls.append(("received", data.numel(), collectives.sent_bytes)),
    )
    return calls, collectives.sent_bytes


def test_a_rank_encodes_its_own_chunks_and_sends_finished_ones_while_others_travel(four):
    for calls, sent_bytes in four.run(calls_of_an_encoded_mean, MANY, "int8", size=3):
        kinds = [kind for kind, *_ in calls]
        assert kinds.index("own") < kinds.index("received"), "before it waits"
        scattered = sum(count for kind, count, _ in calls if kind == "sent")
        by_then = next(posted for kind, _, posted in reversed(calls) if kind == "received")
        assert scattered < by_then < sent_bytes, "parts of the mean are on their way before the last chunk has arrived"
        starts = [start for kind, start, _ in calls if kind in ("own", "others'")]
        assert len(set(starts)) == len(starts) == 6 * 3 + 1, "each chunk is encoded once"


@pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
def test_a_buffer_with_nan_and_infinity_makes_an_encoded_mean_nonfinite_with_the_simulators_bits(four, name):
    """Else a run would go on with numbers that a codec has made of them."""
    buffers = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    buffers[0][100], buffers[1][4000] = math.nan, -math.inf
    trees, encodings = [Tree.of({"w": buffer}) for buffer in buffers], [Encoding(CODECS[name], 7 + rank) for rank in range(2)]
    expected, _ = encoded_mean(trees, [1.0, 1.0], encodings)
    assert not expected["w"][:2500].isfinite().all()
    assert not expected["w"][2500:].isfinite().all()
    for mean, *_ in four.run(exchange_encoded, buffers, [1.0, 1.0], name, 1 << 20, size=2):
        torch.testing.assert_close(mean, expected.flat, rtol=0, atol=0, equal_nan=True)


def products_of_slices(group, chunk_bytes):
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=chunk_bytes)
    products = torch.zeros(3, 3, dtype=torch.float64)
    collectives.reduce_scatter(buffer_of(collectives.rank), [1.0, 0.0, 2.0], inner_products=products)
    return products


def test_inner_products_are_those_of_the_buffers_at_any_piece_size(four):
    buffers = torch.stack([buffer_of(rank) for rank in range(3)]).double()
    for chunk_bytes in (1 << 20, 8):
        for rank, products in enumerate(four.run(products_of_slices, chunk_bytes, size=3)):
            mine = buffers[:, slice(*shard_range(NUMEL, rank, 3))]
            torch.testing.assert_close(products, mine @ mine.T, rtol=1e-5, atol=1e-5)


def gather_numbers(group, numbers):
    collectives = GroupCollectives(group, timeout_s=60.0)
    return collectives.all_gather_numbers(*numbers[collectives.rank]), collectives.sent_bytes, collectives.control_bytes


def test_every_rank_gathers_the_numbers_of_all_in_rank_order(four):
    numbers = [(1.0, 0.1), (2.0, -3e300), (3.0, float("inf"))]
    for rows, sent_bytes, control_bytes in four.run(gather_numbers, numbers, size=3):
        assert rows == [list(pair) for pair in numbers]
        assert (sent_bytes, control_bytes) == (0, CONTROL_BYTES * 2 * 2)


def test_a_group_of_one_sends_nothing(four):
    assert four.run(gather_numbers, [(4.0, 5.0)], size=1) == [([[4.0, 5.0]], 0, 0)]


def broadcast(group, numel, chunk_bytes):
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=chunk_bytes)
    whole = buffer_of(0)[:numel].clone() if collectives.rank == 0 else torch.full((numel,), float("nan"))
    collectives.broadcast(whole)
    return whole, collectives.sent_bytes


def test_rank_0_broadcasts_at_any_piece_size(four):
    for numel, chunk_bytes in ((NUMEL, 1 << 20), (NUMEL, 20), (1, 4), (NUMEL, 3)):
        for whole, sent_bytes in four.run(broadcast, numel, chunk_bytes, size=3):
            assert torch.equal(whole, buffer_of(0)[:numel])
            assert sent_bytes == 0, "no algorithm sends it"


def gather(group, lengths, chunk_bytes):
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=chunk_bytes)
    mine = buffer_of(collectives.rank)[: lengths[collectives.rank]].clone()
    return collectives.gather(mine, lengths), collectives.sent_bytes


def test_rank_0_gathers_buffers_of_different_lengths_at_any_piece_size(four):
    for lengths, chunk_bytes in (((0, NUMEL, 3), 1 << 20), ((1, 3, NUMEL), 20), ((0, 0, 1), 3)):
        (gathered, _), *others = four.run(gather, lengths, chunk_bytes, size=3)
        assert all(torch.equal(gathered[rank], buffer_of(rank)[: lengths[rank]]) for rank in (1, 2))
        assert others == [({}, 0)] * 2, "no algorithm sends it"


def sum_without(group, leaver):
    """A sum of all ranks, then one of those that stay."""
    collectives = GroupCollectives(group, timeout_s=60.0, chunk_bytes=12)
    me = collectives.rank
    collectives.reduce_scatter(buffer_of(me), [1.0] * collectives.size)
    if me == leaver:
        return None
    collectives.remove([leaver])
    whole = buffer_of(me)
    collectives.reduce_scatter(whole, [1.0] * collectives.size)
    collectives.all_gather(whole)
    return collectives.rank, collectives.size, whole, collectives.all_gather_numbers(float(me))


def test_when_a_member_leaves_the_ranks_of_the_others_close_up(four):
    for leaver in (0, 2):
        stay = [rank for rank in range(4) if rank != leaver]
        results = four.run(sum_without, leaver)
        expected = ordered_sum([Tree.of({"w": buffer_of(rank)}) for rank in stay], [1.0] * 3).flat
        for place, rank in enumerate(stay):
            new_rank, size, whole, rows = results[rank]
            assert (new_rank, size) == (place, 3)
            assert torch.equal(whole, expected)
            assert rows == [[float(other)] for other in stay]


def wait_in_vain(group, timeout_s):
    """All ranks exchange but the last, which joins in when the others have given up."""
    collectives, began_s = GroupCollectives(group, timeout_s=timeout_s, names=["Ada", "Bob", "Eve"]), time.monotonic()
    given_up, error = dist.new_group(timeout=timedelta(seconds=60)), None
    if collectives.rank != collectives.size - 1:
        try:
            collectives.reduce_scatter(buffer_of(collectives.rank), [1.0] * collectives.size)
        except ExchangeFailed as failed:
            error = str(failed), time.monotonic() - began_s
    dist.barrier(given_up)
    return error


def test_a_member_that_does_not_answer_is_named_after_the_timeout(four):
    *errors, late = four.run(wait_in_vain, 0.3, size=3)
    assert late is None
    for (text, waited_s), name in zip(errors, ("Ada", "Bob"), strict=True):
        assert re.match(rf"{name} could not (send to|receive from) (Ada|Bob|Eve) within 0.3 s", text)
        assert "saved before this round is valid" in text
        assert 0.3 <= waited_s < 20
    assert any("Eve" in text for text, _ in errors)


def test_the_others_name_a_member_that_is_killed_in_a_collective():
    began_s = time.perf_counter()
    (first, first_error), (second, nothing), (third, third_error) = outcomes(3, sum_until_killed, 1, 20.0)
    assert second == -signal.SIGKILL
    assert nothing is None
    assert (first, third) == (0, 0)
    for error in (first_error, third_error):
        assert isinstance(error, ExchangeFailed)
        assert re.search(r"could not (send to|receive from) rank \d: it has closed its connection", str(error))
    assert "rank 1" in f"{first_error} {third_error}"
    assert time.perf_counter() - began_s < 60
