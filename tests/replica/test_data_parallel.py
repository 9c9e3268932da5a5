"""A replica with several devices takes the steps that it would take with one."""

import pytest
import torch
from torch import nn

from atoll.core.errors import ConfigError
from atoll.core.protocols import Work
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.replica.local_replica import LocalReplica
from atoll.testing.simulated_runs import Regression, RegressionBatches

WORK = Work(shard=0, start=0, schedule=0, examples=1)


def held_bytes(replica):
    tensors = [tensor for kind in replica.tensors().values() for tensor in kind]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def trained(workload, devices, *, steps=12, **settings):
    settings.setdefault("optimizer", AdamW(lr=0.01))
    replica = LocalReplica(workload, devices=["cpu"] * devices, clip_norm=0.5, **settings)
    return replica, replica.train(steps, WORK)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_steps_with_several_devices_are_those_of_one_that_cuts_its_batches_as_small(devices):
    workload = Regression(hidden=6)
    many, losses = trained(workload, devices)
    one, expected = trained(workload, 1, micro_batches=devices)
    assert many.params().equal(one.params())
    assert losses == expected


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_is_that_of_the_whole_batch(micro_batches):
    workload = Regression(hidden=6)
    many, one = (trained(workload, count, steps=1, micro_batches=micro_batches)[0] for count in (2, 1))
    (found, result), (expected, wanted) = many.gradient(WORK), one.gradient(WORK)
    assert float((found.sum.flat - expected.sum.flat).abs().max()) < 1e-6
    assert (found.weight, found.tokens, result.tokens) == (expected.weight, expected.tokens, wanted.tokens)


def test_modules_in_half_precision_have_one_master():
    workload = Regression(hidden=6, dtype=torch.bfloat16)
    many, _ = trained(workload, 2)
    one, _ = trained(workload, 1, micro_batches=2)
    assert many.params().flat.dtype == torch.float32
    assert float((many.params().flat - one.params().flat).abs().max()) < 1e-2


def test_random_draws_of_modules_depend_on_the_seed():
    workload = Regression(hidden=32, dropout=0.5)
    found = [trained(workload, 3, seed=seed)[0].params() for seed in (1, 1, 2)]
    assert found[0].equal(found[1])
    assert not found[0].equal(found[2])


def test_a_batch_that_has_not_an_example_for_each_device_is_refused():
    workload = Regression(batches=RegressionBatches(batch_size=4))
    with pytest.raises(ConfigError, match=r"holds 4 examples and is to be cut into 6.*engine.devices"):
        trained(workload, 3, micro_batches=2)


class Padded(Regression):
    """Whose last examples count for nothing."""

    class Batches(RegressionBatches):
        def tokens(self, batch):
            return int((batch[1] < 100).sum())

        def batch(self, shard, position):
            inputs, targets = super().batch(shard, position)
            return inputs, torch.where(torch.arange(len(targets)) < 3, targets, torch.full_like(targets, 1e6))

    def loss(self, module: nn.Module, batch):
        inputs, targets = batch
        sound = targets < 100
        return ((module(inputs).squeeze(1) - targets).square() * sound).sum() / sound.sum()


def test_a_device_whose_share_has_no_tokens_adds_no_gradient():
    workload = Padded(batches=Padded.Batches(batch_size=6))
    many, result = trained(workload, 2, optimizer=SGD(lr=0.05))
    one, expected = trained(workload, 1, optimizer=SGD(lr=0.05))
    assert many.params().is_finite()
    assert float((many.params().flat - one.params().flat).abs().max()) < 1e-6
    assert result.tokens == expected.tokens == 3 * 12


class Drifting(Regression):
    """Whose module computes with a buffer that each pass changes, and half of whose parameters are in double precision."""

    def module(self):
        module = super().module()
        module[-1].to(torch.float64)
        module.register_buffer("drift", torch.zeros(()))
        return module

    def loss(self, module: nn.Module, batch):
        inputs, targets = batch
        with torch.no_grad():
            module.drift += 0.1
        found = module[-1](module[:-1](inputs).double()).squeeze(1) + module.drift
        return (found - targets).square().mean().float()


def test_all_devices_compute_with_the_first_ones_buffers_and_mixed_precisions_add_up():
    many, losses = trained(Drifting(hidden=6), 2)
    assert [float(copy.module.drift) for copy in many._data_parallel.copies] == [float(many.weights.module.drift)]
    assert float(many.weights.module.drift) == pytest.approx(1.2)
    one, expected = trained(Drifting(hidden=6), 1)
    assert losses.losses == pytest.approx(expected.losses, abs=1e-5)
    assert float((many.params().flat - one.params().flat).abs().max()) < 1e-5


def test_a_state_saved_on_one_device_resumes_on_several_which_hold_copies():
    workload = Regression(hidden=6)
    one, _ = trained(workload, 1)
    many = LocalReplica(workload, optimizer=AdamW(lr=0.01), clip_norm=0.5, devices=["cpu", "cpu"])
    many.load(one.params())
    many.restore(one.state())
    for replica in (one, many):
        replica.train(5, Work(shard=0, start=12, schedule=12, examples=1))
    assert float((many.params().flat - one.params().flat).abs().max()) < 1e-5
    weights = one.params().nbytes
    assert held_bytes(many) == held_bytes(one) + 2 * weights
