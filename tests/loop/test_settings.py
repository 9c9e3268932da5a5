"""Wrong arguments are refused with an error that says what to do."""

import logging

import pytest
import torch
from torch import nn

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.optim import sgd as rules
from atoll.optim.adam import AdamW


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer and is one itself, like accelerate's."""

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
    ("algorithm", "optimizer", "message"),
    [
        (ACCO(optimizer=AdamW()), True, r"was also given SGD. Give none, islands\(model, None, ACCO\("),
        (ACCO(), False, r"ACCO has no rule to step with: give ACCO\(optimizer=atoll.AdamW\(lr="),
        (DiLoCo(inner_steps=3), False, r"NoneType as the optimizer, and counts the steps of a torch optimizer"),
        (AsyncLocalSGD(inner_steps=3), True, "is asynchronous: it has a hub and no rounds"),
        (DiLoCo(inner_steps=3, moments="averaged"), True, r"cannot read the moments of your optimizer. Use moments=own"),
        (DiLoCo(inner_steps=3, weighting="examples"), True, r"give islands\(..., examples=len\(dataset\)\)"),
    ],
)
def test_an_algorithm_needs_an_optimizer_or_refuses_one(algorithm, optimizer, message):
    model, sgd = linear()
    with pytest.raises(ConfigError, match=message):
        atoll.islands(model, sgd if optimizer else None, algorithm)


SGD = torch.optim.SGD
DILOCO = DiLoCo(inner_steps=3)


@pytest.mark.parametrize(
    ("model", "optimizer", "algorithm", "message"),
    [
        (None, None, DiLoCo, r"algorithm is the class DiLoCo, not an Algorithm. Give one: DiLoCo\(...\)\."),
        (None, None, AsyncLocalSGD, r"algorithm is the class AsyncLocalSGD, not an Algorithm. Give one, such as atoll.DiLoCo\("),
        (None, None, "diloco", r"algorithm='diloco' is not an Algorithm. Give one, such as atoll.DiLoCo\(inner_steps=50\)"),
        (None, None, AdamW(), r"algorithm is an AdamW, not an Algorithm: it has no steps_per_round, round"),
        ({}, None, DILOCO, r"model=\{\} is not a Module. Give one, such as torch.nn.Linear"),
        (torch.nn.Linear, None, DILOCO, r"model is the class Linear, not a Module. Give one: Linear\("),
        (None, SGD, DILOCO, r"DiLoCo was given the class SGD as the optimizer, and counts the steps of a torch optimizer"),
        (None, 0.1, DILOCO, r"DiLoCo was given float as the optimizer"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(model, optimizer, algorithm, message):
    fine, sgd = linear()
    with pytest.raises(ConfigError, match=message):
        atoll.islands(fine if model is None else model, optimizer or sgd, algorithm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_s": 0.0}, "limit_s=0.0: give more than 0 seconds"),
        ({"examples": 0}, "examples=0: give 1 or more"),
        ({"finish": "never"}, "finish='never' is none of 'together', 'alone'"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    model, sgd = linear()
    with pytest.raises(ConfigError, match=message):
        atoll.islands(model, sgd, DiLoCo(inner_steps=3), **settings)


def test_finish_alone_is_refused_with_a_sharded_state():
    with pytest.raises(ConfigError, match=r'would be lost when it leaves\. Use finish="together"'):
        atoll.islands(linear()[0], None, ACCO(optimizer=AdamW()), finish="alone")


def test_step_and_rank_are_refused_outside_of_the_block():
    model, sgd = linear()
    islands = atoll.islands(model, None, ACCO(optimizer=AdamW()))
    with pytest.raises(ConfigError, match=r"islands.step\(\) was called outside of its block"):
        islands.step()
    with pytest.raises(ConfigError, match=r"not entered: .* atoll.join\(\) has rank and size"):
        assert islands.rank == 0
    with atoll.islands(model, sgd, DiLoCo(inner_steps=3)) as other, pytest.raises(ConfigError, match=r"call optimizer.step\(\)"):
        other.step()
    with islands, pytest.raises(ConfigError, match=r"no gradients to take: call loss.backward\(\)"):
        islands.step()


def logs_tokens(tokens):
    """Takes the two steps of a round, and logs so many tokens for each."""
    model, sgd = linear()
    with atoll.islands(model, sgd, DiLoCo(inner_steps=2, weighting="tokens")) as islands:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            islands.log(0.0, tokens)
            sgd.step()


@pytest.mark.parametrize("tokens", [0, -8])
def test_weights_by_tokens_need_the_tokens_that_a_round_has_read(tokens):
    logs_tokens(1)
    with pytest.raises(ConfigError, match=rf"logged {2 * tokens} tokens for the 2 steps.*before each optimizer.step\(\)"):
        logs_tokens(tokens)


def test_weights_are_refused_with_a_sharded_state():
    with (
        atoll.islands(linear()[0], None, ACCO(optimizer=AdamW())) as islands,
        pytest.raises(ConfigError, match="holds a slice of the agreed weights"),
    ):
        islands.weights()


def test_steps_of_a_wrapped_optimizer_count():
    model, sgd = linear()
    with atoll.islands(model, optimizer := Wrapper(sgd), DiLoCo(inner_steps=2)) as islands:
        assert islands.optimizer is optimizer
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert (islands.steps, islands.rounds) == (4, 2)
    with pytest.raises(ConfigError, match="Wrapper as the optimizer, and counts the steps of a torch optimizer"):
        atoll.islands(model, Wrapper(None), DiLoCo(inner_steps=2))


def test_a_second_block_is_refused_while_one_is_open():
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


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with (
        pytest.raises(ConfigError, match="none of the model's 2 trainable parameters: it was made for another model"),
        atoll.islands(nn.Linear(2, 1), optimizer, DILOCO),
    ):
        pass


def test_parameters_that_are_not_in_the_optimizer_cause_a_warning(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with caplog.at_level(logging.WARNING, "atoll"), atoll.islands(model, torch.optim.SGD(model[0].parameters(), lr=0.1), DILOCO):
        pass
    (message,) = caplog.messages
    assert "2 of the model's 4 trainable parameters are not in the optimizer, for example 1.weight" in message


def test_parameters_that_were_unfrozen_after_the_call_are_refused():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    islands = atoll.islands(model, None, DDP(optimizer=rules.SGD(lr=0.1)))
    model.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"bias was unfrozen after atoll\.islands was called"), islands:
        pass
