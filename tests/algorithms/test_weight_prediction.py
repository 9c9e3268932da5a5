"""WP: gradients at the weights that a second step with the same gradient would lead to, of which nothing else is kept."""

import math

import pytest
import torch

from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero1 import ZeRO1
from atoll.engines.sim.network import Link
from atoll.engines.sim.world import Cluster, Lost
from atoll.errors import ConfigError
from atoll.events import Computed, Exchanged, RoundFailed, RoundFinished, UpdateSkipped
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.testing.conformance import digests
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulate import simulate
from atoll.testing.workloads import Regression, RegressionBatches
from atoll.tree import Tree


def slope(workload, params, islands, position):
    """The mean over islands of the gradients of their batches at this position."""
    module = workload.module()
    for name, parameter in module.named_parameters():
        parameter.data.copy_(params[name])
    for island in range(islands):
        (workload.loss(module, workload.batches.batch(island, position)) / islands).backward()
    return Tree.of({name: dict(module.named_parameters())[name].grad for name in params})


def predicted(workload, rule, islands, updates):
    """theta_t+1 = Opt(theta_t, g~_t), theta~_t+1 = Opt(theta_t+1, g~_t), g~_t+1 = g(theta~_t): one update was on its way."""
    theta = ahead = Tree.of(workload.module())
    state, waiting = rule.init(theta), slope(workload, theta, islands, 0)
    for t in range(updates):
        fresh = slope(workload, ahead, islands, t + 1)
        theta, state = rule.update(theta, waiting, state)
        ahead, _ = rule.update(theta, waiting, state)
        waiting = fresh
    return theta, ahead


RULES = [AdamW(lr=0.05), SGD(lr=Cosine(lr=0.1, steps=8, warmup=2))]


@pytest.mark.parametrize("rule", RULES, ids=["adamw", "sgd-cosine"])
@pytest.mark.parametrize("islands", [1, 2, 3, 7])
def test_gradients_are_taken_one_more_step_ahead_whose_state_is_thrown_away(rule, islands):
    workload = Regression(RegressionBatches(num_shards=islands), hidden=3)
    done = simulate(WP(optimizer=rule), workload=workload, steps=8, cluster=Cluster(islands=islands))
    theta, ahead = predicted(workload, rule, islands, 8)
    assert float((done.params.flat - theta.flat).abs().max()) < 2e-5
    states = [island.state for island in done.engine.islands.values()]
    assert {state.optimizer.step for state in states} == {8}
    assert float((Tree.join([state.ahead for state in states]).flat - ahead.flat).abs().max()) < 2e-5
    assert all(island.replica.weights.holds(Tree.join([s.ahead for s in states])) for island in done.engine.islands.values())


def test_a_constant_gradient_is_followed_by_two_steps_of_which_one_counts():
    algorithm, peers = WP(optimizer=SGD(lr=0.5)), ScriptedPeers()
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=Tree.of({"w": torch.zeros(3)}))
    assert state.params["w"].tolist() == [-0.5] * 3
    assert state.ahead["w"].tolist() == [-1.0] * 3


def test_as_long_as_it_warms_up_it_is_zero1_to_the_bit():
    options = {"steps": 6, "workload": Regression(hidden=3), "cluster": Cluster(islands=3)}
    one = simulate(WP(optimizer=AdamW(lr=0.05), accumulation=2, clip_norm=0.3, warmup=6), **options)
    two = simulate(ZeRO1(optimizer=AdamW(lr=0.05), accumulation=2, clip_norm=0.3), **options)
    assert one.params.equal(two.params)
    assert one.finished.virtual_time_s == two.finished.virtual_time_s


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("step_time_s", [(1.0,), (0.25, 1.0, 0.5)])
def test_an_update_takes_the_longer_of_computing_and_one_exchange(ratio, step_time_s):
    m = ratio / 2
    cluster = Cluster(islands=3, step_time_s=step_time_s, link=Link(latency_s=m / 4, bandwidth_mbit_per_s=math.inf))
    done = simulate(WP(optimizer=SGD(lr=0.02)), steps=5, cluster=cluster)
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    assert ends == pytest.approx([1.0 + (round + 1) * max(1.0, m) for round in range(5)])
    assert all(event.background for event in done.of(Exchanged))


def test_each_update_sends_what_zero1_sends():
    options = {"steps": 4, "workload": Regression(hidden=3), "cluster": Cluster(islands=3)}
    one, two = (simulate(algorithm(optimizer=AdamW(lr=0.05)), **options) for algorithm in (WP, ZeRO1))
    assert one.finished.sent_bytes_per_island == two.finished.sent_bytes_per_island


def test_every_batch_is_in_one_update_or_waits():
    done = simulate(WP(optimizer=SGD(lr=0.02), accumulation=2, warmup=2), steps=6, cluster=Cluster(islands=3))
    waiting = sum(island.state.waiting.tokens for island in done.engine.islands.values())
    assert done.finished.tokens + waiting == sum(event.tokens for event in done.of(Computed))
    assert done.finished.tokens == 6 * 3 * 2 * 8


def test_after_a_void_round_replicas_hold_the_prediction_again():
    """Every batch is the same, so the run with a void round has the bits of one that is a round shorter."""
    workload = Regression(RegressionBatches(full_batch=True))
    clusters = [Cluster(islands=3, lost=(Lost(island=1, round=round),)) for round in (10**6, 2)]
    clear, done = (
        simulate(WP(optimizer=AdamW(lr=0.05)), steps=steps, workload=workload, cluster=cluster)
        for steps, cluster in zip((4, 5), clusters, strict=True)
    )
    assert [event.round for event in done.of(RoundFailed)] == [2]
    assert done.params.equal(clear.params)


class Spoilt(RegressionBatches):
    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        return inputs, targets * math.nan if (shard, position) == (1, 2) else targets


def test_a_gradient_that_is_no_number_is_left_out_by_all_and_the_prediction_stands():
    algorithm = WP(optimizer=AdamW(lr=0.05))
    clear = simulate(algorithm, steps=2, workload=Regression(Spoilt()), cluster=Cluster(islands=3))
    done = simulate(algorithm, steps=3, workload=Regression(Spoilt()), cluster=Cluster(islands=3))
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(2, [1])]
    for name in ("params", "optimizer", "ahead"):
        kept = [[digests(getattr(island.state, name)) for island in one.engine.islands.values()] for one in (done, clear)]
        assert kept[0] == kept[1], name
    assert simulate(algorithm, steps=6, workload=Regression(Spoilt())).finished.outer_steps == 5


def test_going_on_from_other_weights_drops_what_waits_and_keeps_moments():
    algorithm, peers, params = WP(optimizer=AdamW(lr=0.1)), ScriptedPeers(), Tree.of({"w": torch.ones(3)})
    state = one_round(algorithm, FakeReplica(), peers, params=params)
    rebased = algorithm.rebase(state, params * 5, peers)
    assert rebased.params.equal(params * 5)
    assert rebased.ahead.equal(params * 5)
    assert rebased.waiting is None
    assert digests(rebased.optimizer) == digests(state.optimizer)


def test_a_negative_warm_up_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"warmup=-1.*0 updates or more.*Use 0"):
        WP(warmup=-1)
