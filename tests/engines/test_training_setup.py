"""Every setting of a Run reaches the object that it configures."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.data.partition import ByDomain
from atoll.engines.training_setup import matrix_products, replica_of
from atoll.optim.adam import AdamW
from atoll.runs.run_settings import candidates, device_of
from atoll.runs.workloads import sharded_workload, single_shard_workload
from tests.samples import SMALL as TINY

SMALL = [*TINY, "train.steps=12", "train.warm_start_steps=20", "algorithm.inner_steps=3"]


def small(*more):
    settings = [
        setting for setting in SMALL if not (setting.startswith("optimizer.lr.") and any(m.startswith("optimizer=") for m in more))
    ]
    return override(recipes.demo_diloco(), [*settings, *more], candidates).resolved


@pytest.fixture(scope="module")
def text():
    return small().data.load()


def trained(run, text, steps=3):
    workload = single_shard_workload(run, text)
    replica = replica_of(run, workload, workload.loss, island=0)
    replica.train(steps, Work(shard=0, start=0, schedule=0, examples=1))
    return replica.params()


def test_gradients_are_clipped_as_the_run_says(text):
    """SGD of rate 1 with a tiny clip moves by that clip, whatever the gradient."""
    run = small("optimizer=SGD(lr=1.0)", "train.clip_norm=0.001")
    start = Tree.of(single_shard_workload(run, text).module())
    assert (start - trained(run, text, steps=1)).norm() == pytest.approx(0.001, rel=1e-3)


def test_batches_are_cut_as_the_run_says(text):
    seen = []
    run = small("train.micro_batches=2")
    workload = single_shard_workload(run, text)

    def loss(module, batch):
        seen.append(len(batch))
        return workload.loss(module, batch)

    replica_of(run, workload, loss, island=0).train(1, Work(shard=0, start=0, schedule=0, examples=1))
    assert seen[-2:] == [2, 2]  # a trial step, which detects random draws, was the first


def test_another_seed_is_another_start_another_order_and_another_cluster(text):
    one, two = (single_shard_workload(replace(small(), seed=seed), text) for seed in (0, 1))
    assert not Tree.of(one.module()).equal(Tree.of(two.module()))
    assert not torch.equal(one.batches.batch(0, 0), two.batches.batch(0, 0))


def test_the_partition_is_the_runs(text):
    run = small("data.partition=ByDomain", "cluster.islands=2")
    loaded = replace(text, settings=run.data)
    sizes = [
        sharded_workload(run, loaded, Tree.of(single_shard_workload(run, text).module())).batches.examples(shard)
        for shard in range(2)
    ]
    expected = ByDomain().shards(_examples(run, text), 2, run.seed)
    assert sizes == [len(shard) for shard in expected]
    assert sizes[0] != sizes[1]


def _examples(run, text):
    from atoll.data.token_batches import TokenExamples

    return TokenExamples(text.train, run.data.seq_len)


def test_k_means_looks_at_the_features_of_the_weights_it_is_given(text):
    run = small("data.partition=KMeans", "cluster.islands=2")
    loaded = replace(text, settings=run.data)
    start = Tree.of(single_shard_workload(run, text).module())
    one, two = (sharded_workload(run, loaded, params).batches.fingerprint() for params in (start, start * np.pi))
    again = sharded_workload(run, loaded, start).batches.fingerprint()
    assert one == again
    assert one != two


def test_gradient_algorithms_take_the_runs_optimizer_and_clipping():
    run = override(recipes.demo_ddp(), ["train.clip_norm=0.7", "optimizer.weight_decay=0.3"], candidates).resolved
    assert isinstance(run.algorithm.optimizer, AdamW)
    assert run.algorithm.optimizer == run.optimizer
    assert run.algorithm.clip_norm == 0.7
    assert run.optimizer.lr.steps == run.train.steps


def test_an_algorithms_own_optimizer_and_clipping_take_precedence():
    run = override(recipes.demo_ddp(), ["algorithm.optimizer=SGD(lr=0.1)", "algorithm.clip_norm=0.2"], candidates).resolved
    assert run.algorithm.clip_norm == 0.2
    assert type(run.algorithm.optimizer).__name__ == "SGD"


def test_bfloat16_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"bf16.*Use fp32"):
        small("train.precision=bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_and_auto_falls_back():
    assert device_of(small("train.device=auto")) == "cpu"
    with pytest.raises(ConfigError, match=r"sees no CUDA device"):
        device_of(small("train.device=cuda"))


def test_an_open_outer_schedule_is_as_long_as_the_arrivals_that_are_to_come():
    """Slow workers take fewer steps and arrive as often: 3,600 updates in rounds of 20, 15, 7 and 3 steps are 331 arrivals."""
    run = override(recipes.demo_async(), ["train.steps=900", "algorithm.outer.lr=Cosine(lr=0.8)"], candidates)
    assert run.resolved.algorithm.outer.lr.steps == 331 // 4
    even = override(run, ["algorithm.pace=even"], candidates)
    assert even.resolved.algorithm.outer.lr.steps == 3600 // 20 // 4
    buffered = override(run, ["algorithm.outer=Buffered(rule=SGD(lr=Cosine(lr=0.8)),size=3)"], candidates)
    assert buffered.resolved.algorithm.outer.rule.lr.steps == 331 // 3


def test_a_schedule_that_does_not_fit_says_whose_it_is_and_how_long_the_run_makes_it():
    run = override(recipes.demo_async(), ["train.steps=900", "data.shards=400"], candidates)
    with pytest.raises(ConfigError, match=r"optimizer: .*train.steps \* islands / shards = 9.*warmup=20"):
        assert run.resolved


def test_speeds_are_one_per_island():
    for speeds in ("[1,2]", "[1,2,3,4,5]"):
        with pytest.raises(ConfigError, match=r"algorithm.speeds has \d figures for cluster.islands=4"):
            override(recipes.demo_async(), [f"algorithm.speeds={speeds}"], candidates)


# ---------------------------------------------------------------------------------------------------------- matrix products


def tf32_flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", True), ("bf16", True), ("fp32-strict", False)])
def test_products_on_cuda_are_tf32_for_the_time_of_a_run_unless_it_is_strict(precision, allowed, monkeypatch):
    before = tf32_flags()
    run = override(recipes.demo_diloco(), ["train.device=auto", f"train.precision={precision}", "train.compile=false"], candidates)
    with matrix_products(run):
        assert tf32_flags() == before, "there is no CUDA device to compute on"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    computing = matrix_products(run)
    computing.__enter__()
    assert tf32_flags() == (allowed, allowed)
    computing.__exit__(KeyError, KeyError(), None)  # also after an error
    assert tf32_flags() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has one API for TF32 here")
def test_a_user_who_set_the_precision_of_single_operators_gets_it_back(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_tf32 = True
        matmul.fp32_precision = "ieee"  # now torch refuses to read allow_tf32
        with matrix_products(override(recipes.demo_diloco(), ["train.device=auto", "train.precision=fp32"], candidates)):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.allow_tf32 = False
