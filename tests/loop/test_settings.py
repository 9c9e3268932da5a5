"""What cannot be is refused, with what to do instead."""

import pytest
import torch

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.optim.adam import AdamW


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, which calls itself one, as accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step()


def linear():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "said"),
    [
        (ACCO(optimizer=AdamW()), True, r"was given a SGD besides. Give none, islands\(model, None, ACCO\("),
        (ACCO(), False, r"ACCO has no optimizer to step with: ACCO\(optimizer=atoll.AdamW\(lr="),
        (DiLoCo(inner_steps=3), False, r"NoneType for an optimizer, and counts the steps of a torch optimizer of yours"),
        (AsyncLocalSGD(inner_steps=3), True, "has a hub and no rounds in step"),
        (DiLoCo(inner_steps=3, weighting="examples"), True, r"give islands\(..., examples=len\(dataset\)\)"),
    ],
)
def test_an_algorithm_says_whether_it_needs_an_optimizer(algorithm, optimizer, said):
    model, sgd = linear()
    with pytest.raises(ConfigError, match=said):
        atoll.islands(model, sgd if optimizer else None, algorithm)


SGD = torch.optim.SGD
DILOCO = DiLoCo(inner_steps=3)


@pytest.mark.parametrize(
    ("model", "optimizer", "algorithm", "said"),
    [
        (None, None, DiLoCo, r"algorithm is the class DiLoCo, not an Algorithm. Give one: DiLoCo\(...\)\."),
        (None, None, AsyncLocalSGD, r"algorithm is the class AsyncLocalSGD, not an Algorithm. Give one, such as atoll.DiLoCo\("),
        (None, None, "diloco", r"algorithm='diloco' is not an Algorithm. Give one, such as atoll.DiLoCo\(inner_steps=50\)"),
        (None, None, AdamW(), r"algorithm is an AdamW, not an Algorithm: it has no steps_per_round, round"),
        ({}, None, DILOCO, r"model=\{\} is not a Module. Give one, such as torch.nn.Linear"),
        (torch.nn.Linear, None, DILOCO, r"model is the class Linear, not a Module. Give one: Linear\("),
        (None, SGD, DILOCO, r"DiLoCo was given the class SGD for an optimizer, and counts the steps of a torch optimizer of yours"),
        (None, 0.1, DILOCO, r"DiLoCo was given float for an optimizer"),
    ],
)
def test_what_is_no_model_no_optimizer_or_no_algorithm_is_refused(model, optimizer, algorithm, said):
    fine, sgd = linear()
    with pytest.raises(ConfigError, match=said):
        atoll.islands(fine if model is None else model, optimizer or sgd, algorithm)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"limit_s": 0.0}, "limit_s=0.0: it is more than 0 seconds"),
        ({"examples": 0}, "examples=0: an island has at least 1"),
        ({"finish": "never"}, "finish='never' is none of 'together', 'alone'"),
    ],
)
def test_numbers_and_words_that_mean_nothing_are_refused(settings, said):
    model, sgd = linear()
    with pytest.raises(ConfigError, match=said):
        atoll.islands(model, sgd, DiLoCo(inner_steps=3), **settings)


def test_where_states_lie_in_slices_nobody_leaves_alone():
    with pytest.raises(ConfigError, match=r'would take its slice along\. Use finish="together"'):
        atoll.islands(linear()[0], None, ACCO(optimizer=AdamW()), finish="alone")


def test_what_belongs_inside_of_the_block_is_refused_outside_of_it():
    model, sgd = linear()
    islands = atoll.islands(model, None, ACCO(optimizer=AdamW()))
    with pytest.raises(ConfigError, match=r"islands.step\(\) was called outside of its block"):
        islands.step()
    with pytest.raises(ConfigError, match=r"not entered yet: .* atoll.join\(\) has rank and size"):
        assert islands.rank == 0
    with atoll.islands(model, sgd, DiLoCo(inner_steps=3)) as other, pytest.raises(ConfigError, match=r"call optimizer.step\(\)"):
        other.step()
    with islands, pytest.raises(ConfigError, match=r"no gradients to take: call loss.backward\(\)"):
        islands.step()


def test_sliced_weights_are_not_handed_out_as_if_they_were_whole():
    with atoll.islands(linear()[0], None, ACCO(optimizer=AdamW())) as islands, pytest.raises(ConfigError, match="lie in slices"):
        islands.weights()


def test_steps_of_an_optimizer_that_is_wrapped_in_another_count():
    model, sgd = linear()
    with atoll.islands(model, optimizer := Wrapped(sgd), DiLoCo(inner_steps=2)) as islands:
        assert islands.optimizer is optimizer
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert (islands.steps, islands.rounds) == (4, 2)
    with pytest.raises(ConfigError, match="Wrapped for an optimizer, and counts the steps of a torch optimizer"):
        atoll.islands(model, Wrapped(None), DiLoCo(inner_steps=2))


def test_a_second_block_is_refused_while_one_is_open_and_is_fine_afterwards():
    model, sgd = linear()
    other, other_sgd = linear()
    with (
        pytest.raises(ConfigError, match=r"another block of atoll.islands is open in this process.* one nn.ModuleDict"),
        atoll.islands(model, sgd, DiLoCo(inner_steps=3)),
        atoll.islands(other, other_sgd, DiLoCo(inner_steps=3)),
    ):
        pass
    with atoll.islands(other, other_sgd, DiLoCo(inner_steps=3)) as islands:
        assert islands.size == 1
