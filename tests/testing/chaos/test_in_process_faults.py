"""What an island brings is spoilt in its round, once, and what it has told of it is not."""

import asyncio

import pytest
import torch

from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Mean
from atoll.engines.elastic.membership import Found
from atoll.testing.chaos import Spoil, Spoiler


class Round:
    number = 0

    def __call__(self):
        return self.number


def spoiler(*hows, at=0, island="a"):
    now = Round()
    now.number = at
    return Spoiler([Spoil(island="a", round=3, how=how) for how in hows], island, now, lambda text: None)


class Group:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def rank(self):
        return 0

    def size(self):
        return 2

    def send(self, tensors, rank, tag):
        self.sent.append(tensors[0].clone())


class Finder:
    def __init__(self, group):
        self.group = group

    def connect(self, found, limit_s):
        return self.group

    def abort(self):
        self.group = None


class Listens:
    """Peers that keep what they are brought."""

    rank, size = 0, 1

    def __init__(self):
        self.brought = []

    async def mean(self, tree, weight=1.0, *, compare=False):
        self.brought.append(tree)
        return Mean(tree, weight, True)


class Brings:
    """An algorithm that brings ones."""

    steps_per_round = 1

    async def round(self, state, replica, peers):
        return (await peers.mean(Tree.of({"w": torch.ones(4)}))).value


def brought(spoils):
    peers = Listens()
    algorithm = spoils.algorithm(Brings())
    for _ in range(2):
        asyncio.run(algorithm.round(None, None, peers))
    return [tree.flat for tree in peers.brought]


def test_a_delta_with_a_number_that_is_none_comes_once():
    first, second = brought(spoiler("nan", at=3))
    assert first.isnan().sum() == 1
    assert torch.equal(second, torch.ones(4))


def test_a_huge_delta_is_a_million_times_as_long():
    first, second = brought(spoiler("huge", at=3))
    assert torch.equal(first, 1e6 * second)


@pytest.mark.parametrize(("at", "island"), [(2, "a"), (4, "a"), (3, "b")])
def test_other_rounds_and_other_islands_are_left_alone(at, island):
    assert all(torch.equal(flat, torch.ones(4)) for flat in brought(spoiler("nan", "huge", at=at, island=island)))


def test_settings_that_an_engine_asks_for_are_those_of_the_algorithm():
    algorithm = spoiler().algorithm(DiLoCo(inner_steps=5))
    assert (algorithm.steps_per_round, algorithm.accumulation, algorithm.missed) == (5, 1, "global")


@pytest.mark.parametrize(("how", "number"), [("damage", 0), ("damage late", 1)])
def test_one_bit_of_the_payload_is_flipped_and_none_of_what_is_told(how, number):
    spoils, group = spoiler(how, at=3), Group()
    spoils.spoilt(Tree.of({"w": torch.ones(4)}))
    spoilt = spoils.membership(Finder(group)).connect(Found((), 0, ""), 1.0)
    told, delta, mean = torch.ones(1, dtype=torch.float64), torch.ones(2), torch.full((2,), 2.0)
    for tensor in (told, delta, mean, delta, mean):
        spoilt.send([tensor], 1, 0)
    differ = [not torch.equal(one, two) for one, two in zip(group.sent, (told, delta, mean, delta, mean), strict=True)]
    assert differ == [False, number == 0, number == 1, False, False]
    assert torch.equal(delta, torch.ones(2))  # the island's own copy is sound


def test_what_one_other_is_told_of_the_deltas_weight_differs_once():
    spoils, group = spoiler("damage told", at=3), Group()
    spoilt = spoils.membership(Finder(group)).connect(Found((), 0, ""), 1.0)
    state, weight, delta = torch.ones(7).double(), torch.tensor([64.0, 1.0, 2.0]).double(), torch.ones(2)
    for tensor in (state, weight, delta, weight):
        for rank in (1, 2):
            spoilt.send([tensor], rank, 0)
    assert [float(sent[0]) for sent in group.sent] == [1.0, 1.0, 96.0, 64.0, 1.0, 1.0, 64.0, 64.0]


@pytest.mark.parametrize("second", [torch.tensor([300.0]).double(), torch.tensor([0.0, 1.0]).double()])
def test_where_no_delta_is_weighed_nothing_that_is_told_differs(second):
    spoils, group = spoiler("damage told", at=3), Group()
    spoilt = spoils.membership(Finder(group)).connect(Found((), 0, ""), 1.0)
    for tensor in (torch.ones(7).double(), second):
        spoilt.send([tensor], 1, 0)
    assert torch.equal(group.sent[1], second)
