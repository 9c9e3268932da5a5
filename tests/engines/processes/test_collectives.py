"""Sums over real processes have the simulator's bits and the formula's bytes, however buffers are cut."""

import re
import signal
import time

import pytest
import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.engines.simulator.collectives import ordered_sum
from atoll.runs import network
from atoll.runs.network import Link
from atoll.testing.processes import cut_off, outcomes, summed

SIZES = [1, 3, 64, 1001]  # fewer elements than ranks, and what no number of ranks or pieces divides


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_simulators_bits_and_the_formulas_bytes_at_any_size_of_pieces(four, size):
    generator = torch.Generator().manual_seed(0)
    weights = [1.0, 0.3, 7.0, 0.9][:size]
    for numel in SIZES:
        for dtype, piece_bytes in ((torch.float32, 100), (torch.float32, 1 << 20), (torch.bfloat16, 30)):
            buffers = [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]
            expected = ordered_sum([Tree.of({"w": buffer}) for buffer in buffers], weights).flat
            cost = network.all_reduce(numel, buffers[0].element_size(), [Link()] * size)
            for rank, (mine, whole, sent_bytes) in enumerate(four.run(summed, buffers, weights, piece_bytes, size=size)):
                start, stop = numel * rank // size, numel * (rank + 1) // size
                assert torch.equal(mine, expected[start:stop])
                assert torch.equal(whole, expected)
                assert sent_bytes == cost.sent_bytes[rank]


def test_when_a_peer_is_killed_in_a_collective_the_others_say_whom_they_miss():
    began = time.perf_counter()
    (first, told), (second, nothing), (third, also) = outcomes(3, cut_off, 1, 20.0)
    assert second == -signal.SIGKILL
    assert nothing is None
    assert (first, third) == (0, 0)
    for error in (told, also):
        assert isinstance(error, ExchangeFailed)
        assert re.search(r"could not (send to|hear from) rank \d: it has closed its connection", str(error))
    assert "rank 1" in f"{told} {also}"
    assert time.perf_counter() - began < 60
