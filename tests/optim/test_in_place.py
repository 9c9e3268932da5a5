"""Updates in the buffers of the values that they replace."""

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import trees_in, with_trees
from atoll.optim.adam import Adam, AdamW
from atoll.optim.in_place import InPlaceRule
from atoll.optim.sgd import SGD, Momentum, Nesterov


def donated(value):
    return with_trees(value, (tree.donate() for tree in trees_in(value)))


@pytest.mark.parametrize("rule", [SGD(lr=0.7), Momentum(lr=0.7), Nesterov()])
def test_donated_weights_and_moments_are_updated_in_place(rule):
    gradient, params = Tree.of({"w": torch.linspace(-1, 1, 7)}), Tree.of({"w": torch.linspace(0, 3, 7)})
    expected, _ = rule.update(params.copy(), gradient, rule.init(params))
    memory = params.flat.data_ptr()
    updated, _ = rule.update(params.donate(), gradient, donated(rule.init(gradient)))
    assert updated.same_bits(expected)
    assert updated.flat.data_ptr() == memory
    assert not updated.donated


def test_weights_are_kept_unless_the_moments_are_donated_too():
    rule, params = Nesterov(), Tree.of({"w": torch.ones(7)})
    state, memory = rule.init(params), params.flat.data_ptr()
    updated, _ = rule.update(params.donate(), Tree.of({"w": torch.ones(7)}), state)
    assert updated.flat.data_ptr() != memory
    assert not state.velocity.deleted


def test_an_update_has_the_same_bits_whether_or_not_its_arguments_are_donated():
    generator = torch.Generator().manual_seed(0)
    for rule in (AdamW(lr=0.05), Adam(lr=0.05), Nesterov()):
        params = Tree.of({"w": torch.randn(40, 50, generator=generator)})
        replaced, state, replaced_state = params.copy(), rule.init(params), rule.init(params)
        for _ in range(4):
            gradient = Tree.of({"w": torch.randn(40, 50, generator=generator)})
            params, state = rule.update(params, gradient, state)
            replaced, replaced_state = rule.update(replaced.donate(), gradient, donated(replaced_state))
        assert replaced.same_bits(params), rule


def test_adam_in_place_rounds_otherwise_and_says_so():
    for rule in (Adam(lr=0.1), AdamW()):
        assert isinstance(rule, InPlaceRule)
        assert not getattr(rule, "exact", False)
