"""What several islands compute from the same objects: once where that was asked for, and never twice otherwise than alone."""

import torch

from atoll.algorithms.ddp import DDP
from atoll.engines.sim.memory import is_counted
from atoll.engines.sim.world import Cluster
from atoll.once import once, sharing
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.testing.simulate import simulate
from atoll.tree import Tree


class Counting:
    """A function that knows how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return list(arguments)


def a_tree(value=1.0):
    return Tree.of({"w": torch.full((3,), value)})


def test_the_same_objects_are_computed_with_once():
    double, tree = Counting(), a_tree()
    with sharing():
        first = once(double, tree, 2.0)
        assert once(double, *first) is first
        assert double.calls == 1
        once(double, a_tree(), 2.0)
        assert double.calls == 2, "another Tree with the same values"
    once(double, tree, 2.0)
    assert double.calls == 3, "what was kept is forgotten"


def test_without_sharing_everybody_computes():
    double, tree = Counting(), a_tree()
    assert once(double, tree) == [tree]
    assert once(double, tree) == [tree]
    assert double.calls == 2


def test_what_was_given_is_taken_by_one():
    double = Counting()
    with sharing():
        given = a_tree().give()
        once(double, given)
        once(double, given)
    assert double.calls == 2


def test_an_argument_lives_as_long_as_what_was_made_of_it():
    """Else another object might get its place in memory, and the answer to it."""
    double = Counting()
    with sharing():
        for value in range(50):
            once(double, (value, a_tree()))  # nobody else holds this tuple
    assert double.calls == 50


class CountedSGD(SGD):
    calls = 0

    def update(self, params, gradient, state):
        CountedSGD.calls += 1
        return super().update(params, gradient, state)


def test_islands_of_the_simulator_take_the_common_step_once_a_round_where_memory_is_not_counted():
    CountedSGD.calls = 0
    simulate(DDP(optimizer=CountedSGD(lr=0.05)), steps=8, cluster=Cluster(islands=3))
    counted = sum(is_counted(number) for number in range(8))
    assert CountedSGD.calls == 3 * counted + (8 - counted)


def test_it_changes_no_bit(monkeypatch):
    def run():
        return simulate(DDP(optimizer=AdamW(lr=0.05), clip_norm=0.1), steps=9, cluster=Cluster(islands=3)).finished.digest

    shared = run()
    monkeypatch.setattr("atoll.engines.sim.engine.is_counted", lambda round: True)
    assert run() == shared
