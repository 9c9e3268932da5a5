"""Islands that compute from the same objects share one result if that was requested, and its bits are those of computing alone."""

import pytest
import torch

import atoll.core.memoize as once_module
from atoll.algorithms.ddp import DDP, clip
from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.memoize import forget, once, sharing
from atoll.engines.simulator.memory_counter import is_counted
from atoll.optim.adam import AdamW
from atoll.optim.in_place import rule_update
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import simulate


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


def test_without_sharing_every_call_computes():
    double, tree = Counting(), a_tree()
    assert once(double, tree) == [tree]
    assert once(double, tree) == [tree]
    assert double.calls == 2


@pytest.mark.parametrize("mark", [Tree.donate, Tree.borrow])
def test_what_is_donated_or_borrowed_is_computed_for_each(mark):
    double = Counting()
    with sharing():
        tree = mark(a_tree())
        once(double, tree)
        once(double, tree)
    assert double.calls == 2


def test_a_released_result_is_computed_again():
    def copied(tree):
        return tree.copy()

    tree = a_tree()
    with sharing():
        once(copied, tree).release()
        assert once(copied, tree).equal(tree)


def test_what_is_forgotten_is_made_again():
    double, tree = Counting(), a_tree()
    forget()  # where nothing is kept
    with sharing():
        once(double, tree)
        forget()
        once(double, tree)
    assert double.calls == 2


def test_an_argument_lives_as_long_as_what_was_made_of_it():
    """Else another object might get its place in memory, and the answer to it."""
    double = Counting()
    with sharing():
        for value in range(50):
            once(double, (value, a_tree()))  # nothing else holds this tuple
    assert double.calls == 50


class CountedSGD(SGD):
    calls = 0

    @rule_update
    def update(self, params, gradient, state):
        CountedSGD.calls += 1
        return super().update(params, gradient, state)


def test_islands_of_the_simulator_take_the_common_step_once_a_round_where_memory_is_not_counted():
    CountedSGD.calls = 0
    simulate(DDP(optimizer=CountedSGD(lr=0.05)), steps=8, cluster=Cluster(islands=3))
    counted = sum(is_counted(number) for number in range(8))
    assert CountedSGD.calls == 3 * counted + (8 - counted)


def test_half_precision_is_widened_once():
    """A gradient that each island widened again would be another object for each."""
    half = Tree.of({"w": torch.ones(3, dtype=torch.bfloat16)})
    with sharing():
        assert clip(half, 0.5) is clip(half, 0.5)
        assert clip(half, None) is clip(half, None)


def test_a_round_between_islands_does_not_keep_what_its_devices_made(monkeypatch):
    """A round has many steps of the devices of an island, and each leaves a gradient that nothing reads any more."""
    most = 0

    def watched(function, *arguments):
        nonlocal most
        result = once(function, *arguments)
        most = max(most, len(once_module._MEMO.get() or ()))
        return result

    monkeypatch.setattr("atoll.algorithms.ddp.once", watched)
    cluster = Cluster(islands=2, devices_per_island=2)
    inside = DDP(optimizer=SGD(lr=0.05), clip_norm=0.001)
    simulate(DiLoCo(inner_steps=30), steps=4 * 30, cluster=cluster, inside=inside)
    assert 0 < most <= 8


def test_it_changes_no_bit(monkeypatch):
    def run():
        return simulate(DDP(optimizer=AdamW(lr=0.05), clip_norm=0.1), steps=9, cluster=Cluster(islands=3)).finished.digest

    shared = run()
    monkeypatch.setattr("atoll.engines.simulator.engine.is_counted", lambda round: True)
    assert run() == shared
