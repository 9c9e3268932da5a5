"""Slices of a model whose parameters differ in precision."""

import pytest
import torch

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.replica.master_weights import check_exchange_dtype
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Regression, simulate
from tests.process_pool import run_on_processes

RULE = AdamW(lr=0.05)


class Mixed(Regression):
    """Its first layer is in bfloat16."""

    def module(self):
        module = super().module()
        module[0].to(torch.bfloat16)
        return module

    def loss(self, module, batch):
        inputs, targets = batch
        hidden = module[0](inputs.to(torch.bfloat16)).float()
        for layer in module[1:]:
            hidden = layer(hidden)
        return (hidden.squeeze(1) - targets).square().mean()

    def evaluate(self, module):
        return {"loss": float(self.loss(module, self.batches.batch(0, 0)))}


def test_slices_that_would_travel_in_several_precisions_are_refused_before_anything_is_sent():
    workload = Mixed(hidden=7)
    for algorithm in (ZeRO1(), ACCO()):
        with pytest.raises(ConfigError, match=r"bfloat16.*float32.*differs from slice to slice.*wire=\"fp32\""):
            simulate(algorithm, steps=1, workload=workload)
    layout = Tree.of(workload.module()).layout
    for algorithm in (ZeRO1(wire="fp32"), DDP(), DiLoCo(inner_steps=2)):
        check_exchange_dtype(algorithm, layout)


def test_mixed_slices_on_an_fp32_wire_have_the_simulators_bits_on_processes(four):
    workload, algorithm = Mixed(hidden=7), ZeRO1(optimizer=RULE, wire="fp32")
    expected = simulate(algorithm, steps=4, cluster=Cluster(islands=2), workload=workload)
    first, _ = four.run(run_on_processes, algorithm, workload, 4, size=2)
    assert first.params.equal(expected.params)
    assert first.finished.val_loss == expected.finished.val_loss


def test_processes_refuse_slices_of_several_precisions(four):
    with pytest.raises(ConfigError, match="differs from slice to slice"):
        four.run(run_on_processes, ZeRO1(optimizer=RULE), Mixed(hidden=7), 2, size=2)
