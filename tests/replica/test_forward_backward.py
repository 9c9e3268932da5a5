"""A probe finds out what a module needs, and undoes its trial pass."""

import pytest
import torch
from torch import nn

from atoll.replica.forward_backward import ModuleTraits, probe_module

INPUT = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(3, 3), ModuleTraits(draws_randomness=False, changes_buffers=False)),
        (nn.Dropout(0.5), ModuleTraits(draws_randomness=True, changes_buffers=False)),
        (nn.BatchNorm1d(3), ModuleTraits(draws_randomness=False, changes_buffers=True)),
        (nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)), ModuleTraits(draws_randomness=True, changes_buffers=True)),
        (nn.BatchNorm1d(3, track_running_stats=False), ModuleTraits(draws_randomness=False, changes_buffers=False)),
    ],
    ids=["neither", "dropout", "running statistics", "both", "statistics of a batch alone"],
)
def test_a_probe_finds_traits_and_undoes_its_pass(layer, expected):
    before, buffers = torch.get_rng_state(), [buffer.clone() for buffer in layer.buffers()]
    assert probe_module(layer, "cpu", lambda: layer(INPUT)) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, two) for one, two in zip(buffers, layer.buffers(), strict=True))
