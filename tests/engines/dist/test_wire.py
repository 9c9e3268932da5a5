"""Sums over real processes have the simulator's bits and the formula's bytes, however buffers are cut."""

import pytest
import torch

from atoll.engines.sim import network
from atoll.engines.sim.network import Link
from atoll.engines.sim.peers import ordered_sum
from atoll.testing.processes import processes, summed
from atoll.tree import Tree

SIZES = [1, 3, 64, 1001]  # fewer elements than ranks, and what no number of ranks or pieces divides


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_simulators_bits_and_the_formulas_bytes_at_any_size_of_pieces(size):
    generator = torch.Generator().manual_seed(0)
    weights = [1.0, 0.3, 7.0, 0.9][:size]
    with processes(size) as together:
        for numel in SIZES:
            for dtype, piece_bytes in ((torch.float32, 100), (torch.float32, 1 << 20), (torch.bfloat16, 30)):
                buffers = [torch.randn(numel, generator=generator).to(dtype) for _ in range(size)]
                expected = ordered_sum([Tree.of({"w": buffer}) for buffer in buffers], weights).flat
                cost = network.all_reduce(numel, buffers[0].element_size(), [Link()] * size)
                for rank, (mine, whole, sent_bytes) in enumerate(together.run(summed, buffers, weights, piece_bytes)):
                    start, stop = numel * rank // size, numel * (rank + 1) // size
                    assert torch.equal(mine, expected[start:stop])
                    assert torch.equal(whole, expected)
                    assert sent_bytes == cost.sent_bytes[rank]
