"""Weights in the object store, once each."""

import torch

from atoll.core.flat_tree import Tree
from atoll.engines.ray.weight_publisher import Publisher


def test_the_same_weights_are_put_into_the_store_once():
    store = []
    publisher = Publisher(lambda bits: store.append(bits.copy()) or len(store))
    trees = [Tree.of({"w": torch.full((2,), float(value))}) for value in range(6)]
    assert [publisher.publish(tree) for tree in (trees[0], trees[0], trees[1], trees[0])] == [1, 1, 2, 1]
    for tree in trees:
        publisher.publish(tree)
    assert len(store) == 6
    assert publisher.publish(trees[0]) == 7, "what is long past is not kept for ever"


def test_weights_whose_buffer_was_handed_on_are_forgotten():
    store = []
    publisher = Publisher(lambda bits: store.append(bits.copy()) or len(store))
    old, new = Tree.of({"w": torch.ones(2)}), Tree.of({"w": torch.zeros(2)})
    publisher.publish(old)
    old.release()
    assert publisher.publish(new) == 2
    assert store[0].view("float32").tolist() == [1.0, 1.0]


def test_what_is_lost_in_the_store_is_put_there_again():
    store = []
    publisher = Publisher(lambda bits: store.append(bits.copy()) or len(store))
    tree = Tree.of({"w": torch.ones(2)})
    publisher.forget(publisher.publish(tree))
    assert publisher.publish(tree) == publisher.publish(tree) == 2
