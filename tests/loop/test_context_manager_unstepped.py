"""A block that takes no step logs a warning."""

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
STEP_OPTIMIZER = "DiLoCo counts the steps of the SGD that atoll.islands was given: call its step() after loss.backward()."
STEP_ISLANDS = "ACCO steps by itself: call islands.step() after each loss.backward(), and no optimizer of your own."


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


def test_gradients_without_an_optimizer_step_cause_a_warning(warned):
    model, _, islands = made()
    with islands:
        backward(model)
    (message,) = warned()
    assert "island 0 took no step in this block, though its weights or gradients changed" in message
    assert STEP_OPTIMIZER in message


def add_to_weights(model):
    with torch.no_grad():
        model.weight.add_(1.0)


@pytest.mark.parametrize(
    ("work", "changes"),
    [
        (lambda model: model(torch.ones(1, 2)), False),
        (lambda model: model.state_dict(), False),
        (nn.Module.zero_grad, False),
        (add_to_weights, True),
        (backward, True),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_only_changes_of_weights_or_gradients_cause_a_warning(work, changes, gradients, warned):
    model, _, islands = made()
    model.bias.requires_grad_(False)
    if gradients and work is not nn.Module.zero_grad:
        backward(model)
    with islands:
        work(model)
    assert bool(warned()) is changes


def test_steps_of_an_own_optimizer_cause_a_warning_if_the_algorithm_steps(warned):
    model, optimizer, islands = made(ACCO(optimizer=AdamW()))
    with islands:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    (message,) = warned()
    assert "island 0 took no step" in message
    assert STEP_ISLANDS in message


@pytest.mark.parametrize(("algorithm", "advice"), [(DILOCO, STEP_OPTIMIZER), (ACCO(optimizer=AdamW()), STEP_ISLANDS)])
def test_reading_rank_and_size_without_a_step_causes_a_warning(algorithm, advice, warned):
    model, optimizer, islands = made(algorithm)
    with islands:
        for _ in range(islands.rank, 4, islands.size):
            backward(model)
            optimizer.zero_grad()
    (message,) = warned()
    assert f"no island took a step in this block: nothing was trained. {advice}" in message


def test_a_block_that_steps_or_raises_or_is_only_entered_logs_nothing(warned):
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


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def one_forgets(group, forgets):
    """Log messages of two islands, of which the second has no batches, or forgets to step."""
    model, optimizer, islands = made()
    log, logged = logging.getLogger("atoll"), Messages()
    log.addHandler(logged)
    with islands:
        for _ in range(4 if islands.rank == 0 or forgets else 0):
            backward(model)
            if dist.get_rank() == 0:
                optimizer.step()
    log.removeHandler(logged)
    return logged.messages


def test_an_island_that_forgets_to_step_logs_a_warning_and_one_without_batches_does_not(two):
    assert two.run(one_forgets, False) == [[], []]
    one, (message,) = two.run(one_forgets, True)
    assert one == []
    assert "island 1 took no step" in message


def test_an_optimizer_that_steps_before_its_block_is_entered_warns_once(warned):
    model, optimizer, islands = made()
    del islands  # a user who forgets the `with` keeps no reference
    for _ in range(2):
        backward(model)
        optimizer.step()
    (message,) = warned()
    assert "has not been entered: this process trains apart from the other islands" in message
    assert not optimizer._optimizer_step_post_hooks
