import torch

from atoll.optim.adam import Adam, AdamW
from atoll.optim.sgd import Nesterov
from atoll.optim.taking import Taking, TakingExactly, advance
from atoll.tree import Tree

torch.set_num_threads(1)


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


def test_only_a_rule_whose_twin_has_the_same_bits_is_stepped_in_place():
    for rule in (Adam(lr=0.1), AdamW()):
        assert isinstance(rule, Taking)
        assert not isinstance(rule, TakingExactly)
    params = Tree.of({"w": torch.ones(3)})
    memory, gradient = params.flat.data_ptr(), params.copy()
    result, _ = advance(Nesterov(), params, gradient, Nesterov().init(params), taking=True)
    assert result.flat.data_ptr() == memory
