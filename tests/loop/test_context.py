"""An open block logs its timeout, and leaves a message for its peers when it fails."""

import io
import re
from contextlib import redirect_stderr
from functools import partial
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import atoll
from atoll.algorithms.diloco import DiLoCo
from atoll.loop import context
from atoll.loop.uneven_inputs import UnevenCollectives


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
    monkeypatch.setattr(context, "atexit", register)
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
