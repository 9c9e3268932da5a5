import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.optim.prune import prune


def rows(*values, dtype=torch.float32):
    return Tree.of({"w": torch.tensor(values, dtype=dtype)})


@pytest.mark.parametrize("by", ["sign", "magnitude"])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_every_neuron_loses_its_share(by, fraction):
    delta = Tree.of({"w": torch.randn(10, 8, generator=torch.Generator().manual_seed(0)), "b": torch.randn(4)})
    pruned = prune(delta, fraction, by)
    assert ((pruned["w"] == 0).sum(dim=1) == int(8 * fraction)).all()
    assert int((pruned["b"] == 0).sum()) == int(4 * fraction)


def test_what_is_kept_is_unchanged_and_the_delta_is_donated():
    delta = rows([3.0, -1.0, 2.0, 0.5])
    before = delta["w"].clone()
    pruned = prune(delta, 0.5)
    kept = pruned["w"] != 0
    assert torch.equal(pruned["w"][kept], before[kept])
    assert delta.deleted


def test_by_magnitude_the_smallest_go():
    assert prune(rows([3.0, -1.0, 2.0, -4.0]), 0.5, "magnitude")["w"].tolist() == [[3.0, 0.0, 0.0, -4.0]]


def test_by_sign_the_minority_goes_first_then_the_smallest():
    assert prune(rows([3.0, -4.0, 2.0, 1.0]), 0.25, "sign")["w"].tolist() == [[3.0, 0.0, 2.0, 1.0]]
    assert prune(rows([3.0, -4.0, 2.0, 1.0]), 0.5, "sign")["w"].tolist() == [[3.0, 0.0, 2.0, 0.0]]
    assert prune(rows([-3.0, 4.0, -2.0, -1.0]), 0.5, "sign")["w"].tolist() == [[-3.0, 0.0, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("values", "dtype"), [([1.0, 3e-8, 1e-8, 2e-8], torch.float32), ([1.0, 0.004, 0.001, 0.002], torch.bfloat16)]
)
def test_values_far_below_the_largest_are_still_distinguished(values, dtype):
    kept = prune(rows(values, dtype=dtype), 0.5, "sign")["w"] != 0
    assert kept.flatten().tolist() == [True, True, False, False]


def test_zeros_go_first():
    assert prune(rows([0.0, 0.0, 1.0, -0.1]), 0.5, "sign")["w"].tolist() == [[0.0, 0.0, 1.0, pytest.approx(-0.1)]]


def test_nothing_to_prune_is_the_delta_itself():
    delta = rows([1.0, 2.0])
    assert prune(delta, 0.0) is delta
