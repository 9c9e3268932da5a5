"""Fine-tuning with the paper's settings."""

import pytest
import torch

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Evaluated
from atoll.core.serialization import read_tensors
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import read_events
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl


def test_recipe_has_the_papers_settings():
    run = recipes.finetune()
    assert run.resolved.optimizer == AdamW(
        lr=Cosine(lr=2e-5, steps=1_562, warmup=0, floor=0.0), betas=(0.9, 0.95), weight_decay=0.0
    )
    assert (run.data.max_len, run.train.clip_norm) == (512, None)
    micro_batches = run.algorithm.pieces
    assert run.train.batch_size / micro_batches == 4
    assert run.train.batch_size * run.cluster.islands == 128
    assert run.train.precision == "all-bf16"


@pytest.fixture
def sums(tmp_path):
    """The recipe on a tiny model, for a few steps."""
    save_tiny_model(tmp_path / "model")
    write_jsonl(tmp_path / "sums.jsonl", SUMS)
    settings = [f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'sums.jsonl'}", "data.learn=answer"]
    settings += ["optimizer.lr.lr=0.01", "train.steps=12", "cluster.islands=2", "train.device=cpu"]
    return override(recipes.finetune(), settings, candidates)


def test_a_module_in_bfloat16_learns_and_is_exported_as_the_single_precision_masters(sums, tmp_path):
    result = atoll.run(sums, out=tmp_path / "run")
    assert {parameter.dtype for parameter in result.module.parameters()} == {torch.bfloat16}
    first, *_, last = [event.loss for event in read_events(result.folder / "events.jsonl") if isinstance(event, Evaluated)]
    assert last < first - 0.5
    exported, _ = read_tensors(atoll.export(result.folder, tmp_path / "exported") / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16(), dict(result.module.named_parameters())[name]) for name, tensor in exported.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in exported.values()), "masters have more digits"


def test_without_paths_the_recipe_says_the_command(tmp_path):
    with pytest.raises(ConfigError, match=r"atoll run finetune --set model\.path=FOLDER --set data\.path=FILE\.jsonl"):
        atoll.run(recipes.finetune(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
