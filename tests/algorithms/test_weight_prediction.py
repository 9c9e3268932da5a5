"""WP: gradients are computed at the weights that a second step with the same gradient leads to; the state of that step is
discarded. test_sharded_optimizer_late_updates.py tests what it shares with DPU."""

import pytest
import torch

from atoll.algorithms.weight_prediction import WP
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate


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
def test_gradients_are_taken_one_more_step_ahead_whose_state_is_discarded(rule, islands):
    workload = Regression(RegressionBatches(num_shards=islands), hidden=3)
    done = simulate(WP(optimizer=rule), workload=workload, steps=8, cluster=Cluster(islands=islands))
    theta, ahead = predicted(workload, rule, islands, 8)
    assert float((done.params.flat - theta.flat).abs().max()) < 2e-5
    states = [island.state for island in done.engine.islands.values()]
    assert {state.optimizer.step for state in states} == {8}
    assert float((Tree.join([state.ahead for state in states]).flat - ahead.flat).abs().max()) < 2e-5
    assert all(island.replica.weights.equals(Tree.join([s.ahead for s in states])) for island in done.engine.islands.values())


def test_a_constant_gradient_is_followed_by_two_steps_of_which_one_counts():
    algorithm, peers = WP(optimizer=SGD(lr=0.5)), ScriptedPeers()
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=Tree.of({"w": torch.zeros(3)}))
    assert state.params["w"].tolist() == [-0.5] * 3
    assert state.ahead["w"].tolist() == [-1.0] * 3
