import math

import pytest
import torch
from torch import nn

from atoll.algorithms.ddp import DDP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Exchanged, Recut, RoundFailed
from atoll.core.flat_tree import Tree
from atoll.engines.shared_and_sharded_state import reshard
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Away, Cluster, Link, Lost
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, simulate

RULES = [AdamW(lr=0.1), AdamW(lr=Cosine(lr=0.1, steps=8, warmup=2), weight_decay=0.5), SGD(lr=0.05)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("islands", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_it_is_data_parallel_training(rule, islands, clip_norm):
    """Also where the number of islands does not divide the number of weights, of which there are 25."""
    options = {"steps": 8, "cluster": Cluster(islands=islands), "workload": Regression(hidden=3)}
    one = simulate(ZeRO1(optimizer=rule, clip_norm=clip_norm, accumulation=2), **options)
    two = simulate(DDP(optimizer=rule, clip_norm=clip_norm, accumulation=2), **options)
    assert torch.allclose(one.params.flat, two.params.flat, rtol=1e-5, atol=1e-6)
    assert one.finished.tokens == two.finished.tokens


def test_islands_hold_a_slice_of_the_optimizer_each_and_together_all_of_it():
    done = simulate(ZeRO1(optimizer=AdamW(lr=0.1)), steps=4, cluster=Cluster(islands=3), workload=Regression(hidden=3))
    states = [island.state for island in done.engine.islands.values()]
    assert [state.optimizer.mean.numel for state in states] == [state.params.numel for state in states]
    assert sum(state.params.numel for state in states) == done.params.numel
    assert Tree.join([state.params for state in states]).equal(done.params)


def test_its_bytes_are_those_of_an_all_reduce():
    options = {"steps": 3, "cluster": Cluster(islands=4), "workload": Regression(hidden=3)}
    one, two = simulate(ZeRO1(optimizer=SGD(lr=0.05)), **options), simulate(DDP(optimizer=SGD(lr=0.05)), **options)
    assert one.finished.sent_bytes_per_island == two.finished.sent_bytes_per_island
    assert [event.what for event in one.of(Exchanged)][:2] == ["reduce_scatter", "all_gather"]
    assert one.finished.virtual_time_s == pytest.approx(two.finished.virtual_time_s)


def test_every_batch_weighs_the_same_on_every_island():
    """This island has 3 batches of gradient 1, the other 1 of gradient 5: the mean is 2."""
    params = Tree.of({"w": torch.zeros(4)})
    peers = ScriptedPeers(params + 5.0, weights=[1.0])
    state = one_round(ZeRO1(optimizer=SGD(lr=1.0), accumulation=3), FakeReplica(moves_by=-1.0), peers, params=params)
    assert state.params["w"].tolist() == [-2.0, -2.0]


def test_the_clipping_norm_is_that_of_the_whole_and_is_sent_in_control_bytes():
    done = simulate(ZeRO1(optimizer=SGD(lr=0.05), clip_norm=0.1), steps=2, cluster=Cluster(islands=4, link=Link(latency_s=0.5)))
    totals = [event for event in done.of(Exchanged) if event.what == "total"]
    assert len(totals) == 2
    assert all(event.sent_bytes == [0] * 4 and min(event.control_bytes) > 0 for event in totals)
    assert totals[0].end_s - totals[0].start_s >= 0.5


# ----------------------------------------------------------------------------------------------------- islands that are lost


def test_a_round_that_an_island_misses_is_void_and_the_weights_before_it_stand():
    options = {"workload": Regression(hidden=3), "evaluate_every": 10**6}
    clear = simulate(ZeRO1(optimizer=AdamW(lr=0.1)), steps=2, cluster=Cluster(islands=3), **options)
    lossy = Cluster(islands=3, lost=(Lost(island=1, round=2),))
    done = simulate(ZeRO1(optimizer=AdamW(lr=0.1)), steps=3, cluster=lossy, **options)
    assert [(event.round, event.what, event.islands) for event in done.of(RoundFailed)] == [(2, "reduce_scatter", [1])]
    assert done.params.equal(clear.params)
    assert done.finished.tokens == clear.finished.tokens
    assert done.finished.outer_steps == 2
    assert done.finished.virtual_time_s > clear.finished.virtual_time_s


def test_after_a_void_round_training_continues():
    lossy = Cluster(islands=3, drop_probability=0.3)
    done = simulate(ZeRO1(optimizer=SGD(lr=0.05)), steps=40, cluster=lossy, evaluate_every=100)
    assert 5 < len(done.of(RoundFailed)) < 35
    assert done.finished.outer_steps == 40 - len(done.of(RoundFailed))
    assert done.finished.val_loss < 1.0


# ----------------------------------------------------------------------------------------------- islands that join and leave


def test_islands_reshard_when_islands_join_and_leave():
    """The optimizer's moments go on: with gradients that do not depend on who computes them, nothing is seen of it."""
    workload = Regression(hidden=3)
    cluster = Cluster(islands=4, away=(Away(island=1, start=2, stop=5), Away(island=3, start=0, stop=3)))
    done = simulate(ZeRO1(optimizer=AdamW(lr=0.1)), steps=8, cluster=cluster, workload=workload)
    twin = simulate(DDP(optimizer=AdamW(lr=0.1)), steps=8, cluster=cluster, workload=workload)
    assert torch.allclose(done.params.flat, twin.params.flat, rtol=1e-5, atol=1e-6)
    assert [(event.round, event.islands) for event in done.of(Recut)] == [(2, [0, 2]), (3, [0, 2, 3]), (5, [0, 1, 2, 3])]
    states = [island.state for island in done.engine.islands.values()]
    assert Tree.join([state.params for state in states]).equal(done.params)


def test_resharding_sends_what_others_lack_and_takes_as_long():
    """6 weights in slices of 2 on three islands. The third goes, so that two hold 3 each: 0 lacks one of 1's, and 1 gets its others
    from what 2 left. There are three such trees: the weights' slice and AdamW's two moments."""
    workload = Regression(hidden=0, dtype=torch.float32)
    link = Link(latency_s=1.0, bandwidth_mbit_per_s=8e-6)  # a byte a second
    cluster = Cluster(islands=3, link=link, away=(Away(island=2, start=1, stop=9),))
    done = simulate(ZeRO1(optimizer=AdamW(lr=0.1)), steps=2, cluster=cluster, workload=workload)
    [event] = done.of(Recut)
    assert done.params.numel == 6
    lacking = 1 * 3 * 4  # bytes: one weight of each of three trees, from 1 to 0
    assert event.sent_bytes == [0, lacking]
    assert event.end_s - event.start_s == pytest.approx(1.0 + lacking)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 5), (5, 3), (2, 2)])
def test_resharding_and_joining_the_slices_changes_nothing(before, after):
    whole = Tree.of({"w": torch.arange(12.0).view(3, 4), "b": torch.arange(5.0)})
    rule = AdamW(lr=0.1)
    slices = []
    for rank in range(before):
        mine = whole.shard(rank, before)
        slices.append({"slice": mine, "optimizer": rule.update(mine, mine, rule.init(mine))[1]})
    cut = reshard(slices, after)
    assert len(cut) == after
    assert Tree.join([one["slice"] for one in cut]).equal(whole)
    means = [Tree.join([one["optimizer"].mean for one in some]) for some in (slices, cut)]
    assert means[0].equal(means[1])
    assert [one["optimizer"].step for one in cut] == [1] * after


# --------------------------------------------------------------------------------------------------- what models may look like


class Tied(nn.Module):
    """Tied weights, a frozen layer, and a bias that does not decay."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.first.weight
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (number + 2))

    def forward(self, x):
        return self.again(torch.tanh(self.frozen(self.first(x)))).sum(dim=-1)


class TiedRegression(Regression):
    def module(self):
        return Tied()

    def loss(self, module, batch):
        inputs, targets = batch
        return ((module(inputs) - targets) ** 2).mean()

    def evaluate(self, module):
        return {"loss": self.loss(module, self.batches.all_examples()).item()}


def test_tied_and_frozen_weights_train_as_they_do_with_ddp():
    rule = AdamW(lr=0.05, weight_decay=0.3)
    one, two = (
        simulate(algorithm(optimizer=rule), steps=6, cluster=Cluster(islands=3), workload=TiedRegression())
        for algorithm in (ZeRO1, DDP)
    )
    assert torch.allclose(one.params.flat, two.params.flat, rtol=1e-5, atol=1e-6)
    assert list(one.params) == ["first.weight", "first.bias"]
    assert math.isfinite(one.finished.val_loss)


def test_a_step_without_a_batch_is_refused():
    with pytest.raises(ConfigError, match=r"accumulation=0.*at least 1 batch"):
        ZeRO1(accumulation=0)


def test_going_on_from_other_weights_takes_a_slice_of_them_and_keeps_the_moments():
    params = Tree.of({"w": torch.arange(6.0)})
    algorithm, peers = ZeRO1(optimizer=AdamW(lr=0.1)), ScriptedPeers(params)
    state = one_round(algorithm, FakeReplica(), peers, params=params)
    given = (params * 5).shard(0, 2)
    rebased = algorithm.rebase(state, given, peers)
    assert rebased.params.equal(given)
    assert rebased.params.flat.data_ptr() != given.flat.data_ptr()
    assert rebased.optimizer is state.optimizer


@pytest.mark.parametrize("latency_s", [0.01, 0.5])
def test_an_update_takes_computing_and_an_exchange_one_after_the_other(latency_s):
    link = Link(latency_s=latency_s, bandwidth_mbit_per_s=math.inf)
    cluster = Cluster(islands=3, step_time_s=(0.5, 2.0, 1.0), link=link)
    done = simulate(ZeRO1(optimizer=SGD(lr=0.05)), steps=4, cluster=cluster)
    assert done.finished.virtual_time_s == pytest.approx(4 * (2.0 + 4 * latency_s))
    assert not any(event.background for event in done.of(Exchanged))
