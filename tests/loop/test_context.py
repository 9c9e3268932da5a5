"""Islands begin alike, or not at all."""

import io
import re
from contextlib import redirect_stderr
from functools import partial
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.loop import context
from atoll.loop.topology import find_place
from atoll.loop.uneven_inputs import Company
from atoll.optim.sgd import SGD
from atoll.replica.flat_parameters import ModuleWeights


def module(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model.register_buffer("projection", torch.randn(3, 2).t())
    model.register_buffer("order", torch.randperm(20))
    model.register_buffer("mask", torch.rand(20) < 0.5)
    return model


def entered(group):
    """Weights and buffers of a module that every island initialised otherwise, after entry, and after a step with BatchNorm."""
    model = module(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=1)) as islands:
        begun = {name: value.clone() for name, value in model.state_dict().items()}
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        size, first = islands.size, islands.is_first
    return begun, model.state_dict(), (size, first)


def test_all_islands_take_over_the_first_ones_weights_and_buffers_also_what_is_not_trained(two):
    (begun, after, one), (other_begun, other_after, other) = two.run(entered)
    assert (one, other) == ((2, True), (2, False))
    expected = module(0).state_dict()
    for name, value in expected.items():
        assert torch.equal(begun[name], value)
        assert torch.equal(other_begun[name], value)
    assert torch.equal(after["2.weight"], other_after["2.weight"])
    assert not torch.equal(after["2.weight"], expected["2.weight"])


def test_running_means_stay_each_islands_own(two):
    (_, after, _), (_, other, _) = two.run(entered)
    assert not torch.equal(after["1.running_mean"], other["1.running_mean"])


def refused(group):
    """What is said to islands that do not fit together, and to a model that talks after every step."""
    said, rank = [], dist.get_rank()
    for algorithm in (DiLoCo(inner_steps=2 + rank), DiLoCo(inner_steps=2)):
        model = nn.Linear(3, 1 if algorithm.inner_steps != 2 or rank == 0 else 2)
        try:
            atoll.islands(model, torch.optim.SGD(model.parameters()), algorithm).__enter__()
        except ConfigError as error:
            said.append(str(error))
    wrapped = DistributedDataParallel(plain := nn.Linear(3, 1))
    assert ModuleWeights(wrapped).layout == ModuleWeights(plain).layout
    try:
        atoll.islands(wrapped, None, DDP(optimizer=SGD(lr=0.1)))
    except ConfigError as error:
        said.append(str(error))
    return said


def test_islands_that_do_not_fit_together_are_refused(two):
    for other_algorithm, other_model, wrapped in two.run(refused):
        assert re.search(
            r"island 1 entered with another algorithm or .* Here, on island \d, it is DiLoCo\(inner_steps=\d", other_algorithm
        )
        assert re.search(
            r"island 1 entered with another model, .* it is one of 2 trained tensors with [48] numbers, first weight \([12], 3\)",
            other_model,
        )
        assert "DistributedDataParallel over 2 processes, which talk after every step" in wrapped


def told(group):
    """What is written to stderr in blocks with a limit that is derived, and with one that is given."""
    found = []
    for limit_s in (None, 90.0):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with redirect_stderr(io.StringIO()) as written, atoll.islands(model, optimizer, DiLoCo(inner_steps=1), limit_s=limit_s):
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        found.append(written.getvalue().splitlines())
    between = find_place(None, 7.0).between
    between.all_gather_numbers(0.0)  # whoever leaves at once would cut off one that is still connecting
    return found, between.timeout_s


def test_the_first_island_says_the_time_limit_and_says_it_again_when_it_has_changed_a_lot(two):
    ((derived, given), limit_s), (others, _) = two.run(told)
    assert others == [[], []]
    first, second = derived
    assert "an exchange of 2 islands may take 600 s (before the first exchange; from then on ten times" in first
    assert re.search(r"may take \d+ s \(ten times the longest interval between two exchanges \([\d.e-]+ s\)", second)
    assert len(given) == 1
    assert "may take 90 s (as given)" in given[0]
    assert limit_s == 7.0


def test_a_process_that_ends_waits_for_its_last_words_to_be_posted_and_the_block_does_not(monkeypatch):
    at_exit, said, may_speak = [], [], Event()
    register = SimpleNamespace(register=lambda function, *arguments: at_exit.append(partial(function, *arguments)))
    monkeypatch.setattr(context, "atexit", register)
    monkeypatch.setattr(Company, "say_goodbye", lambda self: said.append(may_speak.wait(60)))
    model = nn.Linear(2, 1)
    with (
        pytest.raises(KeyboardInterrupt),
        atoll.islands(model, torch.optim.SGD(model.parameters(), lr=0.1), DiLoCo(inner_steps=2)),
    ):
        raise KeyboardInterrupt
    assert said == []
    may_speak.set()
    at_exit[0]()
    assert said == [True]
