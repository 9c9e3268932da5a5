from itertools import pairwise

import torch
from hypothesis import given, settings, strategies as st

from atoll.optim.in_place import Moments, fused_adamw

torch.set_num_threads(1)

NUMEL = 500


def moments(dtype: torch.dtype) -> Moments:
    generator = torch.Generator().manual_seed(0)
    weights, gradient, mean, square = torch.randn(4, NUMEL, generator=generator).to(dtype)
    return Moments(weights, gradient, mean, square.abs())


def step(on: Moments, ranges: list[tuple[int, int]]) -> Moments:
    fused_adamw(on, ranges, step=3, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return on


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(1, NUMEL - 1), max_size=8), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_the_bits_do_not_depend_on_the_ranges(cuts, dtype):
    edges = [0, *sorted(cuts), NUMEL]
    in_parts = step(moments(dtype), list(pairwise(edges)))
    for part, whole in zip(in_parts, step(moments(dtype), [(0, NUMEL)]), strict=True):
        assert torch.equal(part, whole)


def test_what_lies_outside_the_ranges_is_untouched():
    before, after = moments(torch.float32), step(moments(torch.float32), [(100, 171)])
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:100], new[:100])
        assert torch.equal(old[171:], new[171:])
    assert not torch.equal(before.weights[100:171], after.weights[100:171])
    assert torch.equal(before.gradient, after.gradient)


def test_no_ranges_are_no_work():
    for old, new in zip(moments(torch.float32), step(moments(torch.float32), []), strict=True):
        assert torch.equal(old, new)
