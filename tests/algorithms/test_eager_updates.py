"""Eager updates: the guess by hand, one island, identical islands, and exchanges that are hidden by a whole round."""

import math

import pytest
import torch

from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager, EagerState
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Mean
from atoll.optim.sgd import SGD, Nesterov
from atoll.runs.cluster import Away, Cluster, Link, Lost
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import simulate


def tree(value):
    return Tree.of({"w": torch.full((3,), value)})


def test_two_rounds_by_hand():
    """Two islands, outer SGD of rate 1. This one moves by -1 and -2; the other sends 4 in every exchange."""
    algorithm = Eager(inner_steps=1, outer=SGD(lr=1.0))
    first = one_round(algorithm, FakeReplica(moves_by=-1.0), ScriptedPeers(tree(4.0), weights=[0.0]), params=tree(0.0))
    assert first.params["w"][0] == 0, "no delta has travelled yet"
    assert first.begin["w"][0] == -0.5, "half of its own delta of 1"
    peers = ScriptedPeers(tree(4.0))
    second = one_round(algorithm, FakeReplica(moves_by=-2.0), peers, params=tree(0.0), state=first)
    assert peers.sent[0]["w"][0] == 1.0
    assert second.params["w"][0] == -2.5, "minus the mean of 1 and 4"
    # 2.5 of the last round, of which its own part of 1/2 is replaced by 2/2, from -0.5.
    assert second.begin["w"][0] == -0.5 - 3.0
    assert second.delta["w"][0] == 2.0


def second_round(peers, delta, share=0.0, *, moves_by):
    """The State after a round of an island that has this delta to send, with outer SGD of rate 1."""
    algorithm = Eager(inner_steps=1, outer=SGD(lr=1.0))
    begin = None if delta is None else -share * delta
    state = EagerState(tree(0.0), algorithm.outer.init(tree(0.0)), begin, algorithm.outer.init(tree(0.0)), delta, share)
    return one_round(algorithm, FakeReplica(moves_by=moves_by), peers, params=tree(0.0), state=state)


@pytest.mark.parametrize("moves_by", [-2.0, 3.0])
@pytest.mark.parametrize(
    ("peers", "share", "islands"),
    [
        (ScriptedPeers(tree(4.0)), 1 / 2, 2),
        (ScriptedPeers(tree(4.0), tree(9.0), weights=[1.0, 0.0]), 1 / 2, 2),
        (ScriptedPeers(tree(4.0), tree(9.0), weights=[1.0, 0.0]), 1 / 3, 2),
        (ScriptedPeers(tree(4.0), tree(10.0)), 1 / 2, 3),
    ],
    ids=["all", "one missing", "one missing now", "one more"],
)
def test_an_island_begins_with_the_means_so_far_and_its_share_of_its_own_delta(peers, share, islands, moves_by):
    state = second_round(peers, tree(1.0), share, moves_by=moves_by)
    torch.testing.assert_close(state.begin.flat, state.params.flat + moves_by / islands)
    assert state.share == pytest.approx(1 / islands)


def test_an_island_without_a_delta_in_the_mean_adds_its_share_as_one_island_more():
    state = second_round(ScriptedPeers(tree(4.0), tree(10.0), weights=[1.0, 1.0]), None, moves_by=-1.0)
    assert state.params["w"][0] == -7.0
    torch.testing.assert_close(state.begin.flat, state.params.flat - 1 / 3)


def test_islands_begin_with_the_global_weights_after_a_delta_that_was_not_finite():
    class SkippedMean(ScriptedPeers):
        async def mean(self, tree, *arguments, **settings):
            return Mean(tree.zeros(), 0.0, heard=True, finite=False)

    state = second_round(SkippedMean(tree(4.0)), tree(math.nan), 1 / 2, moves_by=-1.0)
    assert state.params.equal(tree(0.0))
    assert (state.begin, state.momentum, state.delta) == (None, None, None)


@pytest.mark.parametrize("outer", [SGD(lr=0.5), Nesterov(lr=0.4, momentum=0.6)], ids=["SGD", "Nesterov"])
@pytest.mark.parametrize(
    "faults",
    [{"lost": (Lost(island=1, round=3),)}, {"away": (Away(island=1, start=3, stop=4),)}, {"drop_probability": 0.3}],
    ids=["one lost", "one away", "many lost"],
)
def test_a_run_with_faults_ends_where_one_without_does(outer, faults):
    """Without a way back to the global weights, many lost messages end at 50 times the loss."""
    algorithm = Eager(inner_steps=4, outer=outer)
    whole = simulate(algorithm, steps=160, cluster=Cluster(islands=3)).finished.val_loss
    assert simulate(algorithm, steps=160, cluster=Cluster(islands=3, **faults)).finished.val_loss < 1.05 * whole


def test_one_island_is_diloco_but_its_global_weights_are_one_round_behind():
    outer = Nesterov(lr=0.7, momentum=0.9)
    alone = Cluster(islands=1)
    eager = simulate(Eager(inner_steps=4, outer=outer), steps=20, cluster=alone)
    diloco = simulate(DiLoCo(inner_steps=4, outer=outer), steps=16, cluster=alone)
    torch.testing.assert_close(eager.params.flat, diloco.params.flat)


def test_a_whole_round_hides_an_exchange():
    link = Link(latency_s=1.0, bandwidth_mbit_per_s=1e9)  # two islands: 2 s an exchange
    cluster = Cluster(islands=2, step_time_s=(1.0,), link=link)
    assert simulate(Eager(inner_steps=2), steps=8, cluster=cluster).finished.time_s == pytest.approx(8.0)
    assert simulate(DiLoCo(inner_steps=2), steps=8, cluster=cluster).finished.time_s == pytest.approx(8.0 + 4 * 2.0)


def test_an_island_that_missed_an_exchange_trains_on_with_its_own_weights():
    algorithm, peers = Eager(inner_steps=1, outer=SGD(lr=1.0)), ScriptedPeers(tree(4.0), heard=False)
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=tree(0.0))
    assert state.begin["w"][0] == -1.0
    assert state.delta is None


def test_a_round_without_steps_is_refused():
    with pytest.raises(ConfigError, match="at least 1 inner step"):
        Eager(inner_steps=0)
