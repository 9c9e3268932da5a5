"""Update faults hit the delta or one message of their island in their round, once."""

import asyncio

import pytest
import torch

from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Mean
from atoll.engines.elastic.quorum import Quorum
from atoll.testing.chaos.faults import UpdateFault
from atoll.testing.chaos.update_faults import UpdateCorrupter


class Round:
    number = 0

    def __call__(self):
        return self.number


def corrupter_of(*kinds, at=0, island="a"):
    now = Round()
    now.number = at
    return UpdateCorrupter([UpdateFault(island="a", round=3, kind=kind) for kind in kinds], island, now, lambda text: None)


class RecordingGroup:
    """Records what is sent."""

    def __init__(self):
        self.sent = []

    def rank(self):
        return 0

    def size(self):
        return 2

    def send(self, tensors, rank, tag):
        self.sent.append(tensors[0].clone())


class FakeMembership:
    def __init__(self, group):
        self.group = group

    def connect(self, found, limit_s):
        return self.group

    def abort(self):
        self.group = None


class RecordingPeers:
    """Peers that record the trees they average."""

    rank, size = 0, 1

    def __init__(self):
        self.averaged = []

    async def mean(self, tree, weight=1.0, *, compare=False):
        self.averaged.append(tree)
        return Mean(tree, weight, True)


class AveragesOnes:
    """An algorithm that averages ones."""

    steps_per_round = 1

    async def round(self, state, replica, peers):
        return (await peers.mean(Tree.of({"w": torch.ones(4)}))).value


def averaged(corrupter):
    peers = RecordingPeers()
    algorithm = corrupter.algorithm(AveragesOnes())
    for _ in range(2):
        asyncio.run(algorithm.round(None, None, peers))
    return [tree.flat for tree in peers.averaged]


def test_a_nan_delta_is_sent_once():
    first, second = averaged(corrupter_of("nan", at=3))
    assert first.isnan().sum() == 1
    assert torch.equal(second, torch.ones(4))


def test_a_huge_delta_is_multiplied_by_a_million():
    first, second = averaged(corrupter_of("huge", at=3))
    assert torch.equal(first, 1e6 * second)


@pytest.mark.parametrize(("at", "island"), [(2, "a"), (4, "a"), (3, "b")])
def test_other_rounds_and_islands_are_untouched(at, island):
    assert all(torch.equal(flat, torch.ones(4)) for flat in averaged(corrupter_of("nan", "huge", at=at, island=island)))


def test_the_wrapper_has_the_settings_of_its_algorithm():
    algorithm = corrupter_of().algorithm(DiLoCo(inner_steps=5))
    assert (algorithm.steps_per_round, getattr(algorithm, "accumulation", 1), algorithm.missed) == (5, 1, "global")


@pytest.mark.parametrize(("kind", "number"), [("corrupt_delta", 0), ("corrupt_mean", 1)])
def test_one_bit_of_the_payload_is_flipped_and_none_of_control_messages(kind, number):
    corrupter, group = corrupter_of(kind, at=3), RecordingGroup()
    corrupter.corrupt(Tree.of({"w": torch.ones(4)}))
    corrupted = corrupter.membership(FakeMembership(group)).connect(Quorum((), 0, ""), 1.0)
    control, delta, mean = torch.ones(1, dtype=torch.float64), torch.ones(2), torch.full((2,), 2.0)
    for tensor in (control, delta, mean, delta, mean):
        corrupted.send([tensor], 1, 0)
    differ = [not torch.equal(one, two) for one, two in zip(group.sent, (control, delta, mean, delta, mean), strict=True)]
    assert differ == [False, number == 0, number == 1, False, False]
    assert torch.equal(delta, torch.ones(2))  # the island's own copy is sound


def test_one_peer_gets_a_wrong_weight_once():
    corrupter, group = corrupter_of("corrupt_weight", at=3), RecordingGroup()
    corrupted = corrupter.membership(FakeMembership(group)).connect(Quorum((), 0, ""), 1.0)
    state, weight, delta = torch.ones(7).double(), torch.tensor([64.0, 1.0, 2.0]).double(), torch.ones(2)
    for tensor in (state, weight, delta, weight):
        for rank in (1, 2):
            corrupted.send([tensor], rank, 0)
    assert [float(sent[0]) for sent in group.sent] == [1.0, 1.0, 96.0, 64.0, 1.0, 1.0, 64.0, 64.0]


@pytest.mark.parametrize("second", [torch.tensor([300.0]).double(), torch.tensor([0.0, 1.0]).double()])
def test_without_a_delta_no_control_message_is_corrupted(second):
    corrupter, group = corrupter_of("corrupt_weight", at=3), RecordingGroup()
    corrupted = corrupter.membership(FakeMembership(group)).connect(Quorum((), 0, ""), 1.0)
    for tensor in (torch.ones(7).double(), second):
        corrupted.send([tensor], 1, 0)
    assert torch.equal(group.sent[1], second)
