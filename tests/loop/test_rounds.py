"""On entry islands agree on settings and weights, or refuse. A block logs its timeout; a failing one leaves a message."""

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
from atoll.loop import rounds
from atoll.loop.uneven_inputs import UnevenCollectives
from atoll.optim.sgd import SGD
from atoll.replica.flat_parameters import ModuleWeights


def stderr_of_blocks(group):
    """What a process writes to stderr in a block with a derived timeout, and in one with a given timeout."""
    found = []
    for limit_s in (None, 90.0):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with redirect_stderr(io.StringIO()) as written, atoll.islands(model, optimizer, DiLoCo(inner_steps=1), limit_s=limit_s):
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        found.append(written.getvalue().splitlines())
    return found


def test_the_first_process_logs_the_timeout_on_entry_and_after_a_large_change(two):
    (derived, given), others = two.run(stderr_of_blocks)
    assert others == [[], []]
    first, second = derived
    assert "timeout of an exchange of 2 islands: 600 s (before the first exchange" in first
    assert re.search(r"islands: \d+ s \(ten times the longest interval between two exchanges \([\d.e-]+ s\)", second)
    assert len(given) == 1
    assert "islands: 90 s (as given)" in given[0]


def test_an_ending_process_waits_for_its_leave_message_and_the_block_does_not(monkeypatch):
    at_exit, posted, may_post = [], [], Event()
    register = SimpleNamespace(register=lambda function, *arguments: at_exit.append(partial(function, *arguments)))
    monkeypatch.setattr(rounds, "atexit", register)
    monkeypatch.setattr(UnevenCollectives, "post_leave_message", lambda self: posted.append(may_post.wait(60)))
    model = nn.Linear(2, 1)
    with (
        pytest.raises(KeyboardInterrupt),
        atoll.islands(model, torch.optim.SGD(model.parameters(), lr=0.1), DiLoCo(inner_steps=2)),
    ):
        raise KeyboardInterrupt
    assert posted == []
    may_post.set()
    at_exit[0]()
    assert posted == [True]


def module(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model.register_buffer("projection", torch.randn(3, 2).t())
    model.register_buffer("order", torch.randperm(20))
    model.register_buffer("mask", torch.rand(20) < 0.5)
    return model


def enter(group):
    """Weights and buffers of a module with another seed on each island: after entry, and after a step with BatchNorm."""
    model = module(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=1)) as islands:
        entered = {name: value.clone() for name, value in model.state_dict().items()}
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        size, first = islands.size, islands.is_first
    return entered, model.state_dict(), (size, first)


def test_all_islands_load_the_weights_frozen_weights_and_buffers_of_island_0(two):
    (entered, after, one), (other_entered, other_after, other) = two.run(enter)
    assert (one, other) == ((2, True), (2, False))
    expected = module(0).state_dict()
    for name, value in expected.items():
        assert torch.equal(entered[name], value)
        assert torch.equal(other_entered[name], value)
    assert torch.equal(after["2.weight"], other_after["2.weight"])
    assert not torch.equal(after["2.weight"], expected["2.weight"])
    assert not torch.equal(after["1.running_mean"], other_after["1.running_mean"]), "each island keeps its own running means"


def refused(group):
    """The errors of islands with different settings or models, and of a model that DDP spreads over all islands."""
    messages, rank = [], dist.get_rank()
    for algorithm in (DiLoCo(inner_steps=2 + rank), DiLoCo(inner_steps=2)):
        model = nn.Linear(3, 1 if algorithm.inner_steps != 2 or rank == 0 else 2)
        try:
            atoll.islands(model, torch.optim.SGD(model.parameters()), algorithm).__enter__()
        except ConfigError as error:
            messages.append(str(error))
    wrapped = DistributedDataParallel(plain := nn.Linear(3, 1))
    assert ModuleWeights(wrapped).layout == ModuleWeights(plain).layout
    try:
        atoll.islands(wrapped, None, DDP(optimizer=SGD(lr=0.1)))
    except ConfigError as error:
        messages.append(str(error))
    return messages


def test_islands_with_different_settings_or_models_are_refused(two):
    for algorithm, model, wrapped in two.run(refused):
        assert re.search(r"island 1 entered with another algorithm .* Island \d has DiLoCo\(inner_steps=\d", algorithm)
        assert re.search(
            r"island 1 entered with another model .* has 2 trained tensors with [48] numbers, first weight \([12], 3\)", model
        )
        assert "DistributedDataParallel over 2 processes, which exchange gradients at every step" in wrapped
