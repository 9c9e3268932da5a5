"""Trees of a State move between devices."""

import torch

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient
from atoll.engines.shared_and_sharded_state import trees_to_device


def test_trees_of_a_saved_state_move_to_the_replicas_device():
    """A fresh State has no waiting gradient whose device could be taken: the file's would stay where files are read."""
    waiting = Gradient(Tree.of({"w": torch.ones(2)}), weight=1.0, tokens=8)
    placed = trees_to_device({"first": waiting, "dropped": 1.5, "params": (Tree.of({"w": torch.ones(2)}), 3)}, "meta")
    assert placed["first"].sum.flat.device.type == placed["params"][0].flat.device.type == "meta"
    assert (placed["first"].tokens, placed["dropped"], placed["params"][1]) == (8, 1.5, 3)
