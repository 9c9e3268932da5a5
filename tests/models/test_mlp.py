"""The toy's perceptron: torch's own layers with torch's own initial weights."""

import pytest
import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.models.mlp import MLP


def test_the_authors_perceptron_has_33_6_million_parameters():
    with torch.device("meta"):  # shapes alone: nothing is allocated
        module = MLP().build(inputs=512, outputs=4, seed=0)
    by_hand = 512 * 65_000 + 65_000 + 65_000 * 4 + 4
    assert sum(parameter.numel() for parameter in module.parameters()) == by_hand == MLP().num_params(512, 4)
    assert by_hand == 33_605_004


def test_the_small_one_has_128_hidden_units():
    module = MLP.small().build(512, 4, seed=0)
    assert [tuple(p.shape) for p in module.parameters()] == [(128, 512), (128,), (4, 128), (4,)]
    assert sum(p.numel() for p in module.parameters()) == MLP.small().num_params(512, 4) == 66_180


def test_it_is_flatten_linear_relu_linear_with_torchs_own_initial_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    module = MLP(hidden=5).build(12, 3, seed=7)
    assert [type(layer) for layer in module] == [type(layer) for layer in expected]
    for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    points = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module(points), expected(points.flatten(1)))


def test_weights_depend_on_the_seed_alone_and_global_random_numbers_stay_as_they_are():
    before = torch.get_rng_state()
    one, same, other = (MLP.small().build(8, 2, seed)[1].weight for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("hidden", [0, -5, 1.5])
def test_a_hidden_layer_has_a_whole_number_of_units(hidden):
    with pytest.raises(ConfigError, match=rf"hidden={hidden}"):
        MLP(hidden=hidden)


def test_a_perceptron_needs_inputs_and_outputs():
    with pytest.raises(ConfigError, match=r"inputs=0, outputs=4"):
        MLP.small().build(0, 4, seed=0)
