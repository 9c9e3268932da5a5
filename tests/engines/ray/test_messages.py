"""Trees as bits, and back."""

import numpy as np
import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout, Piece
from atoll.engines.ray.messages import arrays_of, bits_of, dtype_name, own_tree, tensors_of, tree_over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tree_travels_bit_by_bit(dtype):
    tree = Tree.of({"w": torch.randn(5, 3).to(dtype), "b": torch.tensor([float("nan"), -0.0], dtype=dtype)})
    there = tree_over(bits_of(tree), tree.layout, dtype_name(tree))
    assert there.same_bits(tree)
    assert there.flat.data_ptr() == tree.flat.data_ptr(), "and nothing is copied"


def test_weights_in_single_precision_of_a_module_in_half_keep_their_digits():
    layout = Layout((Piece("w", (3,), torch.bfloat16, 0, 3),))
    tree = Tree(layout, torch.tensor([1.0, 1.0 + 2**-20, 3.0]))
    assert own_tree(bits_of(tree), layout, dtype_name(tree), "cpu").same_bits(tree)


def test_what_a_worker_computes_in_is_its_own():
    tree = Tree.of({"w": torch.ones(4)})
    bits = bits_of(tree).copy()
    mine = own_tree(bits, tree.layout, "float32", "cpu")
    (mine.give() * 2).flat.add_(1)
    assert np.array_equal(bits, bits_of(tree))


def test_buffers_come_with_memory_of_their_own():
    buffer = torch.arange(3)
    arrays = arrays_of({"n": buffer})
    buffer.zero_()
    tensors = tensors_of(arrays)
    arrays["n"][0] = 9
    assert torch.equal(tensors["n"], torch.tensor([0, 1, 2]))
    assert arrays["n"].dtype == np.int64
