"""A model of the Hugging Face library from disk: loaded as it is, frozen where asked, refused where it is not whole."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.serialization import read_tensors, write_tensors
from atoll.models.pretrained import Pretrained
from atoll.replica.flat_parameters import trainable_weights
from atoll.testing.tiny_pretrained_model import save_tiny_model

TOKENS = torch.arange(60).view(2, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def built(folder, *frozen):
    return Pretrained(path=str(folder), frozen=frozen).build()


def test_it_is_the_librarys_own_model_in_float32_and_training_mode(folder):
    module, theirs = built(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert module.training
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert torch.equal(module.eval()(TOKENS).logits, theirs(TOKENS).logits)


def test_every_call_gives_a_new_module_with_the_same_weights_and_draws_no_random_numbers(folder):
    before = torch.get_rng_state()
    one, two = built(folder), built(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert Tree.of(one).equal(Tree.of(two))
    assert not {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in two.parameters()}


def test_weights_saved_in_half_precision_are_loaded_in_float32(folder, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    module = built(tmp_path / "half")
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
    assert torch.equal(module.lm_head.weight, half.lm_head.weight.float())


def test_dropout_follows_the_config_in_training_and_is_off_in_evaluation(tmp_path):
    module = built(save_tiny_model(tmp_path / "tiny", dropout=0.5))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        one, two = module(TOKENS).logits, module(TOKENS).logits
    assert not torch.equal(one, two)
    module.eval()
    assert torch.equal(module(TOKENS).logits, module(TOKENS).logits)


def test_tied_weights_stay_tied_also_in_a_flat_buffer(folder):
    weights = trainable_weights(built(folder))
    module = weights.module
    assert module.lm_head.weight is module.transformer.wte.weight
    weights.load(weights.read() * 2)
    assert torch.equal(module.lm_head.weight, module.transformer.wte.weight)
    assert "lm_head.weight" not in weights.layout.index


def test_loading_restores_the_librarys_progress_bars_and_log_level(folder, capsys):
    before = (logging.is_progress_bar_enabled(), logging.get_verbosity())
    built(folder)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == before
    assert capsys.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------------- freezing


def test_frozen_parameters_are_those_whose_names_match(folder):
    module = built(folder, "transformer.wpe.*", "*.ln_?.*")
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in module.named_parameters() if ".wpe." in name or ".ln_" in name}


def test_a_tied_parameter_is_frozen_by_either_name(folder):
    one, two = built(folder, "lm_head.weight"), built(folder, "transformer.wte.weight")
    assert not one.lm_head.weight.requires_grad
    assert set(Tree.of(one)) == set(Tree.of(two))


def test_a_pattern_that_matches_nothing_is_refused_with_names_near_it(folder):
    with pytest.raises(
        ConfigError, match=r"^model\.frozen: 'transformer.wtf.weight' matches no parameter .*transformer\.wt?p?e\.weight"
    ):
        built(folder, "transformer.wtf.weight")


def test_freezing_everything_is_refused(folder):
    with pytest.raises(ConfigError, match=r"^model\.frozen=\['\*'\] leaves no parameter .* to train. Freeze fewer"):
        built(folder, "*")


def test_one_pattern_without_brackets_is_refused(folder):
    with pytest.raises(ConfigError, match=r"^model\.frozen='\*' is not a list"):
        Pretrained(path=str(folder), frozen="*")


# -------------------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_is_of_what_is_in_the_folder_and_not_of_where_it_is(folder, copy):
    here, there = Pretrained(path=str(folder)), Pretrained(path=str(copy))
    assert here.fingerprint() == there.fingerprint()
    tensors, metadata = read_tensors(copy / "model.safetensors")
    write_tensors(copy / "model.safetensors", {name: tensor + 1 for name, tensor in tensors.items()}, metadata)
    assert here.fingerprint() != there.fingerprint()


# ------------------------------------------------------------------------------------------------------------------ refusals


def test_no_path_no_folder_no_config_and_no_weights_have_different_errors(copy, tmp_path):
    with pytest.raises(ConfigError, match=r"^model\.path is not given.*--set model\.path=FOLDER"):
        built("")
    with pytest.raises(ConfigError, match=r"^model\.path='.*nowhere' is not a folder .*Give the folder of a model on this disk"):
        built(tmp_path / "nowhere")
    (copy / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"has a config.json but no weights"):
        built(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json, so it holds no model"):
        built(copy)


def test_damaged_weights_are_refused(copy):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"could not be loaded as a causal language model .*Check that its files are whole"):
        built(copy)


def test_weights_that_lack_a_parameter_are_refused_and_not_drawn_at_random(copy):
    tensors, metadata = read_tensors(copy / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name != "transformer.ln_f.weight"}
    write_tensors(copy / "model.safetensors", rest, metadata)
    with pytest.raises(ConfigError, match=r"lacks the weights of transformer.ln_f.weight"):
        built(copy)


def test_another_family_of_models_is_loaded_in_the_same_way(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    module = built(tmp_path / "llama", "model.embed_tokens.*")
    assert module(TOKENS[:, :8] % 64).logits.shape == (2, 8, 64)
    assert not module.model.embed_tokens.weight.requires_grad
    assert module.lm_head.weight.requires_grad
