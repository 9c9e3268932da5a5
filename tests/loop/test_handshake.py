"""What is stepped is what the module has."""

import logging

import pytest
import torch
from torch import nn

import atoll
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.optim.sgd import SGD

ALGORITHM = DiLoCo(inner_steps=2)


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with (
        pytest.raises(ConfigError, match="none of the model's 2 trainable parameters, so its steps would move nothing"),
        atoll.islands(nn.Linear(2, 1), optimizer, ALGORITHM),
    ):
        pass


def test_parameters_that_are_in_no_group_are_warned_of(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with caplog.at_level(logging.WARNING, "atoll"), atoll.islands(model, torch.optim.SGD(model[0].parameters(), lr=0.1), ALGORITHM):
        pass
    (message,) = caplog.messages
    assert "2 of the model's 4 trainable parameters are not in the optimizer, 1.weight for one" in message


def test_what_was_unfrozen_after_islands_were_made_is_noticed():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    islands = atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1)))
    model.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"bias is trained now, and was not when atoll\.islands was called"), islands:
        pass
