"""Work on a module is seen by what it leaves on the parameters."""

import pytest
import torch
from torch import nn

from atoll.loop.change_detection import footprints


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def step(model):
    with torch.no_grad():
        model.weight.add_(1.0)


@pytest.mark.parametrize(
    ("work", "seen"),
    [
        (lambda model: None, False),
        (lambda model: model(torch.ones(1, 2)), False),
        (lambda model: model.state_dict(), False),
        (backward, True),
        (step, True),
        (nn.Module.zero_grad, False),
    ],
)
@pytest.mark.parametrize("freeze", [False, True], ids=["whole", "half frozen"])
def test_gradients_and_steps_are_seen_and_looking_is_not(work, seen, freeze):
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(not freeze)
    before = footprints(model)
    work(model)
    assert (footprints(model) != before) is seen


def test_gradients_that_are_added_to_those_before_are_seen():
    model = nn.Linear(2, 1)
    backward(model)
    before = footprints(model)
    backward(model)
    assert footprints(model) != before
