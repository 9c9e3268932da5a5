"""Text generation from a fine-tuned model."""

from __future__ import annotations

import pytest

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.runs.generate import generate
from atoll.runs.run_settings import candidates
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("writing")
    model, data = save_tiny_model(place / "model"), write_jsonl(place / "sums.jsonl", SUMS)
    given = [f"model.path={model}", f"data.path={data}", "train.steps=2", "cluster.islands=1"]
    run = override(recipes.finetune(), [*given, "train.device=cpu", "train.precision=fp32"], candidates)
    return atoll.run(run, out=place / "run").folder


def text(folder, prompt="2+2=", *, tokens=8, temperature=1.0, top_k=None, seed=0):
    return generate(folder, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)


def test_it_continues_from_the_prompt_and_the_seed_decides_how(folder):
    assert text(folder).startswith("2+2=")
    assert text(folder) == text(folder)
    assert text(folder) != text(folder, seed=1)


def test_without_sampling_the_seed_has_no_effect(folder):
    assert text(folder, temperature=0.0) == text(folder, temperature=0.0, seed=1) == text(folder, top_k=1)


def test_it_stops_where_the_model_cannot_read_on(folder):
    assert len(text(folder, tokens=500).encode()) <= 64 * 3, "a byte that is no character is written as one of three bytes"


def test_a_prompt_longer_than_the_model_reads_is_refused(folder):
    with pytest.raises(ConfigError, match=r"the prompt has 70 tokens, and the model reads at most 64"):
        text(folder, "x" * 70)
