"""A step in the buffers of what it steps from."""

import pytest
import torch

from atoll.optim.sgd import Nesterov
from atoll.optim.taking import advance
from atoll.tree import Tree


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
