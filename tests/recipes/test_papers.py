"""The papers' own settings."""

import pytest

from atoll import recipes
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.optim.delayed import DelayedNesterov


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


@pytest.mark.parametrize("name", recipes.ALL)
def test_every_recipe_is_a_run_that_knows_its_name(name):
    assert recipes.recipe(name).resolved.recipe == name
