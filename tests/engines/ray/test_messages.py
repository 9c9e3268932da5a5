"""Trees as bytes, and back."""

import numpy as np
import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout, Piece
from atoll.engines.ray.messages import arrays_of, dtype_name, tensors_of, tree_bytes, tree_copy, tree_view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tree_keeps_its_bits(dtype):
    tree = Tree.of({"w": torch.randn(5, 3).to(dtype), "b": torch.tensor([float("nan"), -0.0], dtype=dtype)})
    there = tree_view(tree_bytes(tree), tree.layout, dtype_name(tree))
    assert there.same_bits(tree)
    assert there.flat.data_ptr() == tree.flat.data_ptr(), "and nothing is copied"


def test_single_precision_weights_of_a_bfloat16_module_keep_their_bits():
    layout = Layout((Piece("w", (3,), torch.bfloat16, 0, 3),))
    tree = Tree(layout, torch.tensor([1.0, 1.0 + 2**-20, 3.0]))
    assert tree_copy(tree_bytes(tree), layout, dtype_name(tree), "cpu").same_bits(tree)


def test_a_worker_computes_in_a_copy():
    tree = Tree.of({"w": torch.ones(4)})
    bits = tree_bytes(tree).copy()
    mine = tree_copy(bits, tree.layout, "float32", "cpu")
    mine.claim().mul_(2).flat.add_(1)
    assert np.array_equal(bits, tree_bytes(tree))


def test_buffers_are_copied():
    buffer = torch.arange(3)
    arrays = arrays_of({"n": buffer})
    buffer.zero_()
    tensors = tensors_of(arrays)
    arrays["n"][0] = 9
    assert torch.equal(tensors["n"], torch.tensor([0, 1, 2]))
    assert arrays["n"].dtype == np.int64
