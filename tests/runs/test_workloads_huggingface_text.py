"""A Hugging Face model trains on text, from its config alone or from its weights, and its export is the library's own model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.events import Evaluated
from atoll.core.flat_tree import Tree
from atoll.data.prepare import Preparation, prepare
from atoll.data.tokenizer import load_tokenizer
from atoll.models.pretrained import Pretrained
from atoll.runs.evaluate import evaluate
from atoll.runs.export import export
from atoll.runs.generate import generate
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import read_events
from atoll.testing.tiny_pretrained_model import save_tiny_model

SETTINGS = (
    "data.limit_bytes=60000",
    "data.seq_len=16",
    "data.eval_batches=2",
    "train.batch_size=4",
    "train.warm_start_steps=0",
    "train.steps=40",
    "optimizer.lr.lr=0.02",
    "cluster.islands=2",
    "keep.evaluate_every=20",
)
TOKENS = torch.arange(40).view(4, 10)


def config(folder, vocabulary=304, positions=32):
    """The config of a small Llama, whose vocabulary pads the tokenizer's 300."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=vocabulary, max_position_embeddings=positions, **sizes).save_pretrained(folder)
    return Pretrained(path=str(folder), weights="random")


def run_of(model, *settings):
    return override(replace(recipes.demo_diloco(), model=model), [*SETTINGS, *settings], candidates)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("huggingface")
    prepare(Preparation(corpus="stdlib", tokenizer="bpe:300", limit_bytes=60_000), folder / "text")
    return folder


@pytest.fixture(scope="module")
def trained(place):
    run = run_of(config(place / "llama"), "data.limit_bytes=none", f"data.corpus=prepared:{place / 'text'}")
    return atoll.run(run, out=place / "run")


def test_a_config_trains_on_prepared_text(trained):
    losses = [event.loss for event in read_events(trained.folder / "events.jsonl", [Evaluated])]
    assert losses[0] == pytest.approx(torch.tensor(304.0).log().item(), abs=0.1), "untrained, every token is as likely"
    assert losses[-1] < losses[0] - 0.5
    assert trained.summary.params == sum(parameter.numel() for parameter in trained.module.parameters())


def test_random_weights_are_those_of_the_seed(place, trained):
    model, before = Pretrained(path=str(place / "llama"), weights="random"), torch.get_rng_state()
    one, two, other = (Tree.of(model.build(seed)) for seed in (3, 3, 4))
    assert one.equal(two)
    assert not one.equal(other)
    assert torch.equal(torch.get_rng_state(), before)


def test_its_export_has_the_logits_the_ids_and_the_end_of_text(place, trained, tmp_path):
    out = export(trained.folder, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, trained.module.eval().cpu()(TOKENS).logits)
    ours, theirs = load_tokenizer(str(place / "text")), AutoTokenizer.from_pretrained(out)
    assert theirs("import os\n")["input_ids"] == ours.encode("import os\n").tolist()
    assert again.config.eos_token_id == theirs.eos_token_id == ours.end_of_text
    assert again.generation_config.suppress_tokens == [300, 301, 302, 303]


def test_its_run_is_resumed_evaluated_and_generates(trained):
    assert atoll.resume(trained.folder).val_loss == trained.val_loss
    assert evaluate(trained.folder, "stdlib", limit_bytes=2_000).bits_per_byte > 0
    text = generate(trained.folder, "import ", tokens=8, temperature=1.0, top_k=None, seed=0)
    assert text.startswith("import ")


def test_weights_train_on_text_with_their_own_tokenizer(tmp_path):
    model = Pretrained(path=str(save_tiny_model(tmp_path / "model")), frozen=("transformer.wpe.*",))
    run = run_of(model, "data.tokenizer=bytes")  # the tokenizer in the folder gives the same ids
    done = atoll.run(run, out=tmp_path / "run")
    before = Tree.of(model.build())
    assert torch.equal(done.module.transformer.wpe.weight.cpu(), model.build().transformer.wpe.weight)
    assert not done.params.equal(before)
    out = export(done.folder, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).model_max_length == AutoTokenizer.from_pretrained(model.path).model_max_length


def test_text_with_another_tokenizer_than_that_of_the_weights_is_refused_and_leaves_no_folder(place, tmp_path):
    model = Pretrained(path=str(save_tiny_model(tmp_path / "model")))
    with pytest.raises(ConfigError, match=r"gives other ids than the one in .*model.*Set data\.tokenizer=.*model, or .*random"):
        atoll.run(run_of(model, "data.tokenizer=bpe:300"), out=tmp_path / "run")
    prepared = run_of(model, "data.limit_bytes=none", f"data.corpus=prepared:{place / 'text'}")
    with pytest.raises(ConfigError, match=r"gives other ids .*Prepare the text again with --tokenizer .*model"):
        atoll.run(prepared, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("vocabulary", "positions", "message"),
    [
        (200, 32, r"hold the token 256, and the model in .* has 200 tokens.*Use a config with a vocab_size of 257 or more"),
        (257, 8, r"an example has 16 tokens, and the model in .* reads at most 8\. Set data\.seq_len=8"),
    ],
)
def test_a_config_that_cannot_read_the_tokens_is_refused_before_there_is_a_folder(vocabulary, positions, message, tmp_path):
    model = config(tmp_path / "llama", vocabulary, positions)
    with pytest.raises(ConfigError, match=message):
        atoll.run(run_of(model), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_weights_and_a_config_of_no_decoder_are_refused(tmp_path):
    model = config(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"has a config\.json but no weights .*start from random weights: model\.weights=random"):
        replace(model, weights="loaded").build()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ConfigError, match=r"describes no causal language model that transformers can build"):
        model.build()
