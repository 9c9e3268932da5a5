"""DDP: the baseline must be exactly what a plain PyTorch loop does."""

import pytest
import torch

from atoll.algorithms.ddp import DDP, clip
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.fakes import FakeReplica, ScriptedPeers, one_round
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate


def torch_loop(workload, steps, islands, lr, accumulation=1):
    """Plain PyTorch: the mean over islands of the gradients of the same batches, then torch's AdamW."""
    module = workload.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        for island in range(islands):
            for piece in range(accumulation):
                loss = workload.loss(module, workload.batches.batch(island, step * accumulation + piece))
                (loss / (islands * accumulation)).backward()
        optimizer.step()
    return Tree.of(module)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_is_a_plain_torch_loop_over_the_batches_of_all_islands(accumulation):
    workload = Regression(hidden=6)
    rule = AdamW(lr=0.01, weight_decay=0.0)
    done = simulate(DDP(optimizer=rule, accumulation=accumulation), workload=workload, steps=30, cluster=Cluster(islands=3))
    expected = torch_loop(workload, 30, 3, 0.01, accumulation)
    assert float((done.params.flat - expected.flat).abs().max()) < 2e-6


def test_one_island_has_the_bits_of_torch():
    """Alone, no order of summation can differ: the same bits as torch's plain AdamW."""
    workload = Regression(hidden=6)
    done = simulate(DDP(optimizer=AdamW(lr=0.01, weight_decay=0.0)), workload=workload, steps=30, cluster=Cluster(islands=1))
    assert done.params.equal(torch_loop(workload, 30, 1, 0.01))


def test_two_islands_of_half_a_batch_are_one_of_the_whole():
    halves = Regression(RegressionBatches(num_shards=2, shard_examples=16, full_batch=True))
    inputs, targets = halves.batches.all_examples()
    module = halves.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        (module(inputs).squeeze(1) - targets).square().mean().backward()
        optimizer.step()
    done = simulate(DDP(optimizer=SGD(lr=0.05)), workload=halves, steps=20, cluster=Cluster(islands=2))
    assert float((done.params.flat - Tree.of(module).flat).abs().max()) < 1e-6


def test_local_updates_are_updates_times_islands_also_when_accumulating():
    done = simulate(DDP(optimizer=SGD(lr=0.05), accumulation=3), steps=10, cluster=Cluster(islands=2))
    assert done.finished.local_updates == 20
    assert done.finished.tokens == 10 * 2 * 3 * 8
    assert done.finished.virtual_time_s == pytest.approx(10 * (3 * 1.0 + 2 * 0.03), abs=1e-3)


def test_long_mean_gradients_are_shortened_and_short_ones_left_alone():
    gradient = Tree.of({"w": torch.tensor([3.0, 4.0])})
    assert clip(gradient, 10.0) is gradient
    assert clip(gradient, None) is gradient
    assert clip(gradient, 1.0).norm() == pytest.approx(1.0, rel=1e-5)


def test_the_gradient_is_taken_at_the_shared_weights():
    replica = FakeReplica(moves_by=-2.0)
    state = one_round(DDP(optimizer=SGD(lr=0.5)), replica, ScriptedPeers(), params=Tree.of({"w": torch.ones(3)}))
    assert torch.equal(state.params["w"], torch.zeros(3))


def test_accumulation_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"accumulation=0.*Use 1"):
        DDP(accumulation=0)


class Echo(FakeReplica):
    """Its gradients are 2 for each of 3 tokens."""

    async def gradient(self, work, *, at=None, onto=None, weigh="batches", wide=False):
        weight = 3.0 if weigh == "tokens" else 1.0
        return Gradient(self.params().zeros() + 2.0 * weight, weight, 3)


def test_by_tokens_the_mean_over_islands_weighs_tokens_and_by_batches_it_does_not():
    """Here 3 tokens with a gradient of 2, there 1 with one of 6: 3 by tokens, 4 by islands."""
    params = Tree.of({"w": torch.zeros(2)})
    for weigh, mean in (("tokens", 3.0), ("batches", 4.0)):
        peers = ScriptedPeers(params + 6.0, weights=[1.0])
        state = one_round(DDP(optimizer=SGD(lr=1.0), weigh=weigh), Echo(), peers, params=params)
        assert state.params["w"].tolist() == [-mean] * 2


def test_a_model_in_half_precision_trains_with_weights_in_single():
    workload = Regression(RegressionBatches(full_batch=True), dtype=torch.bfloat16)
    done = simulate(DDP(optimizer=SGD(lr=1e-5)), workload=workload, steps=12, cluster=Cluster(islands=2))
    start = Tree.of(workload.module())
    assert done.params.flat.dtype == torch.float32
    assert float((done.params.flat - start.flat.float()).abs().min()) > 0
    one = simulate(DDP(optimizer=SGD(lr=1e-5)), workload=workload, steps=1, cluster=Cluster(islands=2))
    assert torch.equal(one.params.flat.bfloat16(), start.flat), "one step alone is lost in half precision"


def test_going_on_from_other_weights_keeps_the_moments():
    algorithm, peers, params = DDP(optimizer=AdamW(lr=0.1)), ScriptedPeers(), Tree.of({"w": torch.ones(3)})
    state = one_round(algorithm, FakeReplica(), peers, params=params)
    rebased = algorithm.rebase(state, params * 5, peers)
    assert rebased.params.equal(params * 5)
    assert rebased.optimizer is state.optimizer
