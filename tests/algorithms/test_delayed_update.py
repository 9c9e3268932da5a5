"""DPU: every update is one step late, except during its warm-up. test_sharded_optimizer_late_updates.py tests what it shares with
WP."""

import pytest

from atoll.algorithms.delayed_update import DPU
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate


def slope(workload, params, islands, position):
    """The mean over islands of the gradients of their batches at this position."""
    module = workload.module()
    for name, parameter in module.named_parameters():
        parameter.data.copy_(params[name])
    for island in range(islands):
        (workload.loss(module, workload.batches.batch(island, position)) / islands).backward()
    return Tree.of({name: dict(module.named_parameters())[name].grad for name in params})


def delayed(workload, rule, islands, updates, warmup):
    """theta_t+1 = Opt(theta_t, g(theta_t-1)); while it warms up, g(theta_t)."""
    theta = Tree.of(workload.module())
    state, position, waiting = rule.init(theta), 0, None
    for t in range(updates):
        if waiting is None:
            waiting, position = slope(workload, theta, islands, position), position + 1
        late = None if t < warmup else slope(workload, theta, islands, position)
        position += t >= warmup
        theta, state = rule.update(theta, waiting, state)
        waiting = late
    return theta


RULES = [AdamW(lr=0.05), SGD(lr=Cosine(lr=0.1, steps=8, warmup=2))]


@pytest.mark.parametrize("rule", RULES, ids=["adamw", "sgd-cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("islands", [1, 2, 3, 7])
def test_the_gradient_of_an_update_was_taken_at_the_weights_before_the_last(rule, warmup, islands):
    workload = Regression(RegressionBatches(num_shards=islands), hidden=3)
    done = simulate(DPU(optimizer=rule, warmup=warmup), workload=workload, steps=8, cluster=Cluster(islands=islands))
    expected = delayed(workload, rule, islands, 8, warmup)
    assert float((done.params.flat - expected.flat).abs().max()) < 2e-5
    assert float((done.params.flat - delayed(workload, rule, islands, 8, 8).flat).abs().max()) > 1e-3, "the delay can be seen"
