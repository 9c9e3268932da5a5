"""An exported model can be loaded elsewhere, with the same logits."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError, ConfigError, DataError
from atoll.core.flat_tree import Tree
from atoll.core.serialization import read_tensors, write_tensors
from atoll.data.tokenizer import load_tokenizer
from atoll.recipes import toy_sync
from atoll.runs.export import export, load_exported, trained
from atoll.runs.run_settings import candidates
from atoll.testing.simulated_runs import Regression
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl
from tests.samples import SMALL

TOKENS = torch.arange(40).view(4, 10)


def finetuned(folder, *settings):
    model, data = save_tiny_model(folder / "model"), write_jsonl(folder / "sums.jsonl", SUMS)
    given = [f"model.path={model}", f"data.path={data}", "train.steps=2", "cluster.islands=2", "optimizer.lr.lr=0.01"]
    return override(recipes.finetune(), [*given, "train.device=cpu", "train.precision=fp32", *settings], candidates)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    return atoll.run(finetuned(folder, 'model.frozen=["transformer.wpe.*"]'), out=folder / "run")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    settings = [*SMALL, "train.steps=20", "train.warm_start_steps=0", "data.tokenizer=bpe:300"]
    return atoll.run(override(recipes.demo_diloco(), settings, candidates), out=tmp_path_factory.mktemp("decoder") / "run")


def test_an_exported_pretrained_model_has_the_logits_of_the_trained_one(tuned, tmp_path):
    out = export(tuned.folder, tmp_path / "out")
    again, loading_info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading_info.values())
    before = AutoModelForCausalLM.from_pretrained(atoll.Pretrained(path=str(tuned.folder.parent / "model")).path)
    with torch.no_grad():
        logits = tuned.module.eval()(TOKENS).logits
        assert torch.equal(again(TOKENS).logits, logits)
        assert not torch.equal(before(TOKENS).logits, logits)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert "lm_head.weight" not in read_tensors(out / "model.safetensors")[0], "tied weights are written once"


def test_the_tokenizer_goes_with_the_model_as_it_was(tuned, tmp_path):
    out = export(tuned.folder, tmp_path / "out")
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (out, tuned.folder.parent / "model"))
    assert one("2+2=4")["input_ids"] == two("2+2=4")["input_ids"]
    assert (one.eos_token, one.model_max_length) == (two.eos_token, two.model_max_length)


def test_an_exported_model_can_be_finetuned_again(tuned, tmp_path):
    out = export(tuned.folder, tmp_path / "out")
    again = finetuned(tmp_path, f"model.path={out}")
    assert atoll.run(again, out=tmp_path / "run").val_loss < tuned.val_loss


def test_transformers_loads_an_exported_decoder_with_its_logits_and_its_tokenizer(decoder, tmp_path):
    out = export(decoder.folder, tmp_path / "out")
    again, loading_info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading_info.values())
    with torch.no_grad():
        ours = decoder.module.eval()(TOKENS)
        torch.testing.assert_close(again.eval()(TOKENS).logits, ours, atol=1e-5, rtol=0)
        assert torch.equal(load_exported(out)(TOKENS), ours), "atoll reads its own export bit for bit"
    tokenizer, theirs = load_tokenizer(str(decoder.folder / "tokenizer.json")), AutoTokenizer.from_pretrained(out)
    text = "import os  # naïve <|endoftext|>\n"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.eos_token_id == again.generation_config.eos_token_id == tokenizer.end_of_text


def test_an_exported_decoder_can_be_trained_on_by_transformers_weights(decoder, tmp_path):
    out = export(decoder.folder, tmp_path / "out")
    more = [*SMALL[4:], "train.steps=20", "train.warm_start_steps=0", f"data.tokenizer={out}"]
    run = replace(recipes.demo_diloco(), model=atoll.Pretrained(path=str(out)))
    assert atoll.run(override(run, more, candidates), out=tmp_path / "run").val_loss < decoder.val_loss


def test_the_export_of_an_older_version_is_loaded(decoder, tmp_path):
    out = export(decoder.folder, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({name: config[name] for name in ("atoll", "sizes")}))
    write_tensors(out / "model.safetensors", decoder.module.state_dict())
    assert Tree.of(load_exported(out)).equal(Tree.of(decoder.module.cpu()))


def test_an_exported_perceptron_has_the_scores_of_the_trained_one(tmp_path):
    small = ["model.hidden=8", "data.examples=64", "data.clusters_per_class=1", "data.dimensions=16", "train.steps=20"]
    done = atoll.run(override(toy_sync(), small, candidates), out=tmp_path / "run")
    again = load_exported(export(done.folder, tmp_path / "out"))
    with torch.no_grad():
        assert torch.equal(again(torch.ones(2, 16)), done.module(torch.ones(2, 16)))


def test_an_empty_folder_is_filled_and_another_is_left_alone(decoder, tmp_path):
    (tmp_path / "empty").mkdir()
    export(decoder.folder, tmp_path / "empty")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"empty is there already, and is not overwritten"):
        export(decoder.folder, tmp_path / "empty")
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_export_leaves_nothing(tmp_path):
    done = atoll.run(finetuned(tmp_path), out=tmp_path / "run")
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"holds no tokenizer: the one that was loaded encodes a text as nothing"):
        export(done.folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_that_cannot_be_written_is_named(decoder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*out: Not a directory"):
        export(decoder.folder, tmp_path / "file" / "out")


def test_only_a_finished_run_of_its_own_model_is_exported(decoder, tmp_path):
    own = atoll.run(
        override(recipes.demo_ddp(), [*SMALL, "train.steps=2", "train.warm_start_steps=0"], candidates),
        out=tmp_path / "own",
        workload=Regression(),
    )
    with pytest.raises(ConfigError, match=r"trained a user's workload, Regression.*Make the model in your code") as refused:
        export(own.folder, tmp_path / "out")
    module = Regression().module()
    code = re.search(r"module\.load_state_dict\(.*?strict=False\)", str(refused.value))[0]
    exec(f"import safetensors.torch\n{code}", {"module": module})
    assert all(torch.equal(value, own.module.state_dict()[name]) for name, value in module.state_dict().items())
    (decoder.folder / "final.safetensors").rename(tmp_path / "final.safetensors")
    with pytest.raises(ConfigError, match=r"has no final weights yet.*atoll run --resume"):
        export(decoder.folder, tmp_path / "out")
    (tmp_path / "final.safetensors").rename(decoder.folder / "final.safetensors")


def test_weights_of_a_model_that_has_changed_since_are_refused(tmp_path):
    done = atoll.run(finetuned(tmp_path), out=tmp_path / "run")
    save_tiny_model(tmp_path / "model", positions=32)
    with pytest.raises(CheckpointError, match=r"are not those of the model .*have changed since"):
        trained(done.folder)


def test_a_folder_that_atoll_did_not_export_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no model that atoll exported .*AutoModelForCausalLM"):
        load_exported(save_tiny_model(tmp_path / "model"))
