"""A block in which nothing steps does not end silently."""

import logging
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.optim.adam import AdamW

DILOCO = DiLoCo(inner_steps=2)
CALL_THEIRS = "DiLoCo counts the steps of the SGD that atoll.islands was given: call its step() after loss.backward()."
CALL_OURS = "ACCO steps by itself: call islands.step() after each loss.backward(), and no optimizer of your own."


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, "atoll")
    return lambda: caplog.messages


def made(algorithm=DILOCO):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, atoll.islands(model, optimizer if algorithm is DILOCO else None, algorithm)


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def backward_twice(model):
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    loss.backward()


def test_gradients_without_a_step_of_the_optimizer_are_told(warned):
    model, _, islands = made()
    with islands:
        backward(model)
    (message,) = warned()
    assert "island 0 took no step in this block, though its model's weights or gradients were changed there" in message
    assert CALL_THEIRS in message


def test_steps_of_an_optimizer_beside_an_algorithm_that_steps_by_itself_are_told(warned):
    model, optimizer, islands = made(ACCO(optimizer=AdamW()))
    with islands:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    (message,) = warned()
    assert "island 0 took no step" in message
    assert CALL_OURS in message


@pytest.mark.parametrize(("algorithm", "advice"), [(DILOCO, CALL_THEIRS), (ACCO(optimizer=AdamW()), CALL_OURS)])
def test_gradients_that_were_zeroed_are_missed_and_a_shard_that_was_asked_for_is_not(algorithm, advice, warned):
    model, optimizer, islands = made(algorithm)
    with islands:
        for _ in range(islands.rank, 4, islands.size):
            backward(model)
            optimizer.zero_grad()
    (message,) = warned()
    assert f"no island took a step in this block: nothing was trained. {advice}" in message


def test_a_block_that_steps_that_is_only_entered_or_that_raises_says_nothing(warned):
    model, optimizer, islands = made()
    with islands:
        assert islands.rank == 0
        backward(model)
        optimizer.step()
        state = deepcopy({"model": model.state_dict(), "islands": islands.state_dict()})
    _, _, other = made()
    with other:
        assert other.is_first
    third, _, failing = made()
    with pytest.raises(RuntimeError, match="second time"), failing:
        backward_twice(third)
    assert warned() == []

    resumed, _, later = made()
    with later:
        resumed.load_state_dict(state["model"])
        later.load_state_dict(state["islands"])
    assert later.steps == 1
    assert warned() == []


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def one_forgets(group, forgets):
    """What each of two islands is told of which the second has no batches, or forgets to step."""
    model, optimizer, islands = made()
    log, heard = logging.getLogger("atoll"), Heard()
    log.addHandler(heard)
    with islands:
        for _ in range(4 if islands.rank == 0 or forgets else 0):
            backward(model)
            if dist.get_rank() == 0:
                optimizer.step()
    log.removeHandler(heard)
    return heard.messages


def test_an_island_without_batches_is_told_nothing_and_one_that_forgets_to_step_is(two):
    assert two.run(one_forgets, False) == [[], []]
    one, (message,) = two.run(one_forgets, True)
    assert one == []
    assert "island 1 took no step" in message
