"""Fine-tuning with the paper's settings."""

import pytest

import atoll
from atoll import recipes
from atoll.errors import ConfigError
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine


def test_recipe_has_the_papers_settings():
    run = recipes.finetune()
    assert run.resolved.optimizer == AdamW(
        lr=Cosine(lr=2e-5, steps=1_562, warmup=0, floor=0.0), betas=(0.9, 0.95), weight_decay=0.0
    )
    assert (run.data.max_len, run.train.clip_norm) == (512, None)
    micro_batches = run.algorithm.pieces
    assert run.train.batch_size / micro_batches == 4
    assert run.train.batch_size * run.cluster.islands == 128


def test_without_paths_the_recipe_says_the_command(tmp_path):
    with pytest.raises(ConfigError, match=r"atoll run finetune --set model\.path=FOLDER --set data\.path=FILE\.jsonl"):
        atoll.run(recipes.finetune(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
