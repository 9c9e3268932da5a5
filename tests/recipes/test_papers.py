"""The papers' own settings."""

import pytest

from atoll import recipes
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.optim.delayed_nesterov import DelayedNesterov


@pytest.mark.parametrize(("name", "layers", "width", "heads"), [("20m", 6, 256, 4), ("60m", 3, 896, 16), ("150m", 12, 896, 16)])
def test_asynchronous_recipes_have_the_papers_settings(name, layers, width, heads):
    run = recipes.recipe(f"async-{name}").resolved
    assert (run.model.layers, run.model.width, run.model.heads, run.model.head_size) == (layers, width, heads, 64)
    assert (run.model.vocab_size, run.data.seq_len) == (32_000, 256)
    assert (run.train.warm_start_steps, run.train.steps, run.cluster.islands) == (24_000, 64_000, 4)
    assert isinstance(run.algorithm, AsyncLocalSGD)
    assert run.algorithm.outer == DelayedNesterov(lr=0.7, momentum=0.9, period=4)
    assert (run.algorithm.inner_steps, run.algorithm.pace) == (50, "given")
    assert run.optimizer.lr.floor > 0  # a shard may be trained beyond its share
    assert run.optimizer.lr.steps == 64_000


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "rate", "millions"),
    [("36m", (4, 768, 16), 10_000, 5e-4, 36.0), ("125m", (12, 768, 12), 50_257, 6e-4, 123.6)],
)
def test_acco_recipes_have_the_papers_settings(name, shape, vocabulary, rate, millions):
    run = recipes.recipe(f"acco-{name}").resolved
    assert (run.model.layers, run.model.width, run.model.heads) == shape
    assert run.model.heads * run.model.head_size == run.model.width
    assert run.model.num_params(vocabulary) / 1e6 == pytest.approx(millions, abs=0.05)
    assert (run.algorithm.pieces_per_half, run.algorithm.batch, run.algorithm.warmup) == (1, "free", 0)
    rule = run.algorithm.optimizer
    assert (rule.lr.lr, rule.lr.warmup, rule.betas, rule.weight_decay) == (rate, 0, (0.9, 0.95), 0.1)
    assert (run.algorithm.clip_norm, run.train.precision) == (None, "all-bf16")
    commit_tokens = run.cluster.islands * run.train.batch_size * run.data.seq_len
    assert commit_tokens == 8 * 24 * 1024 * 2
    assert run.train.steps * commit_tokens == pytest.approx(6e9, rel=1e-4)
    assert rule.lr.steps == run.train.steps


@pytest.mark.parametrize("name", recipes.ALL)
def test_every_recipe_is_a_run_with_its_name(name):
    assert recipes.recipe(name).resolved.recipe == name
