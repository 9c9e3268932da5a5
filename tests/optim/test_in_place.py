"""A step in the buffers of what it steps from."""

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.optim.adam import Adam, AdamW
from atoll.optim.in_place import Taking, TakingExactly, advance
from atoll.optim.sgd import Nesterov


@pytest.mark.parametrize("taking", [False, True])
def test_a_step_has_the_same_bits_whether_it_may_take_the_buffers_or_not(taking):
    rule, gradient = Nesterov(lr=0.7, momentum=0.9), Tree.of({"w": torch.linspace(-1, 1, 7)})
    params, state = Tree.of({"w": torch.linspace(0, 3, 7)}), rule.init(gradient)
    expected, _ = rule.update(params.copy(), gradient, state)
    memory = params.flat.data_ptr()
    stepped, _ = advance(rule, params, gradient, state, taking=taking)
    assert stepped.same_bits(expected)
    assert (stepped.flat.data_ptr() == memory) == taking
    assert params.given == taking


def test_a_step_that_may_take_has_the_bits_of_one_that_may_not():
    generator = torch.Generator().manual_seed(0)
    for rule in (AdamW(lr=0.05), Adam(lr=0.05), Nesterov()):
        params = Tree.of({"w": torch.randn(40, 50, generator=generator)})
        taken, state, taken_state = params.copy(), rule.init(params), rule.init(params)
        for _ in range(4):
            gradient = Tree.of({"w": torch.randn(40, 50, generator=generator)})
            params, state = advance(rule, params, gradient, state, taking=False)
            taken, taken_state = advance(rule, taken, gradient, taken_state, taking=True)
        assert taken.same_bits(params), rule


def test_adams_twin_rounds_otherwise_and_says_so():
    for rule in (Adam(lr=0.1), AdamW()):
        assert isinstance(rule, Taking)
        assert not isinstance(rule, TakingExactly)
