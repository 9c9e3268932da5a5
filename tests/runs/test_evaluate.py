"""A run's model on other text: every token is predicted once, and a last word from what stands before it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import atoll
from atoll import recipes
from atoll.cli.inspect_commands import evaluate_run
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError, DataError
from atoll.runs.evaluate import Scorer, evaluate
from atoll.runs.export import trained
from atoll.runs.run_settings import candidates
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl

SETTINGS = ["train.steps=20", "train.warm_start_steps=0", "data.limit_bytes=50000", "cluster.islands=1", "data.seq_len=16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = override(recipes.demo_diloco(), SETTINGS, candidates)
    return atoll.run(run, out=tmp_path_factory.mktemp("evaluated") / "run").folder


@pytest.fixture
def corpus(tmp_path):
    def write(*texts):
        path = tmp_path / "passages.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return f"files:{path}#text"

    return write


def log_likelihoods(folder, ids):
    """Token by token, each from at most 16 before it in its window, as it was trained."""
    _, decoder = trained(folder)
    losses = []
    for place in range(1, len(ids)):
        begin = (place - 1) // 16 * 16
        logits = decoder(torch.tensor([ids[begin:place]]))[0, -1].float().detach()
        losses.append(float(F.cross_entropy(logits[None], torch.tensor([ids[place]]))))
    return losses


def test_all_tokens_but_the_first_are_predicted_once_in_windows_of_the_models_length(folder, corpus):
    texts = ["def f(x):\n    return x", "é" * 9]
    found = evaluate(folder, corpus(*texts))
    ids = [*texts[0].encode(), 256, *texts[1].encode(), 256]
    expected = log_likelihoods(folder, ids)
    assert (found.documents, found.tokens) == (2, len(ids) - 1)
    assert found.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / (22 + 18), rel=1e-5)
    assert found.accuracy is None


def test_the_loss_of_a_last_word_is_the_sum_of_its_tokens(folder, corpus):
    found = evaluate(folder, corpus("return zq"), last_word=True)
    word = log_likelihoods(folder, list(b"return zq"))[5:]  # a blank, z and q
    assert (found.documents, found.tokens, found.accuracy) == (1, 3, 0.0)
    assert found.loss == pytest.approx(sum(word), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(word)), rel=1e-5)


def test_a_passage_without_a_context_is_skipped_and_counted(folder, corpus):
    good = evaluate(folder, corpus("return zq"), last_word=True)
    found = evaluate(folder, corpus("word", "return zq"), last_word=True)
    assert (found.documents, found.skipped, found.tokens, found.loss) == (1, 1, good.tokens, pytest.approx(good.loss))
    assert (good.skipped, evaluate(folder, corpus("return zq")).skipped) == (0, None)


class Successor(torch.nn.Module):
    """Predicts that a token is followed by the next number."""

    config = SimpleNamespace(max_position_embeddings=8)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=10.0 * F.one_hot(input_ids + 1, 20))


def test_a_last_word_is_predicted_if_each_of_its_tokens_is_the_likeliest():
    rows = [(np.array(ids), first) for ids, first in (([1, 2, 3, 4], 2), ([1, 2, 3, 5], 2), ([7, 2, 3], 2), ([9, 1, 2, 4, 5], 4))]
    assert [predicted for _, _, predicted in Scorer(Successor(), "cpu").score(rows, str)] == [True, False, True, True]


def test_of_a_long_passage_the_model_reads_the_end(folder, corpus):
    long, short = ("a" * 100 + " bcdefgh", "a" * 9 + " bcdefgh")
    one, two = (evaluate(folder, corpus(text), last_word=True) for text in (long, short))
    assert one.loss == pytest.approx(two.loss, rel=1e-5)


def test_passages_of_several_lengths_do_not_see_each_other(folder, corpus):
    texts = ["one two", "a much longer one", "x y"]
    together = evaluate(folder, corpus(*texts), last_word=True)
    apart = [evaluate(folder, corpus(text), last_word=True).loss for text in texts]
    assert together.loss == pytest.approx(sum(apart) / 3, rel=1e-5)


def test_a_pretrained_model_is_evaluated_with_its_own_tokenizer(tmp_path, corpus):
    model, data = save_tiny_model(tmp_path / "model"), write_jsonl(tmp_path / "sums.jsonl", SUMS)
    given = [f"model.path={model}", f"data.path={data}", "train.steps=2", "cluster.islands=1", "train.device=cpu"]
    run = override(recipes.finetune(), [*given, "train.precision=fp32"], candidates)
    folder = atoll.run(run, out=tmp_path / "run").folder
    found = evaluate(folder, corpus("2+2=4 and 3+3=6"))
    assert 0 < found.loss < 20
    assert evaluate(folder, corpus("2+2=4 and 3+3=6"), last_word=True).accuracy in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "last_word", "says"), [("word", True, "has a word before its last one"), ("", False, "no text|empty|no documents")]
)
def test_a_text_without_anything_to_predict_is_refused(folder, corpus, text, last_word, says):
    with pytest.raises(DataError, match=says):
        evaluate(folder, corpus(text), last_word=last_word)


def test_lines_of_a_plain_file_are_one_passage_and_the_command_warns(folder, tmp_path, capsys):
    text = tmp_path / "lambada.txt"
    text.write_text("he said yes\nshe said no\nthey said maybe\n")
    found = evaluate(folder, f"files:{text}", last_word=True)
    assert found.documents == 1
    assert "is one document of 3 lines, so one word was scored" in found.warning
    evaluate_run(folder, f"files:{text}", last_word=True, limit_bytes=None, device=None, as_json=True, quiet=True)
    said = capsys.readouterr()
    assert said.err == f"warning: {found.warning}\n"
    assert json.loads(said.out)["warning"] == found.warning
    text.write_text("he said yes\n<|endoftext|>\nshe said no\n<|endoftext|>\n")
    found = evaluate(folder, f"files:{text}", last_word=True)
    assert (found.documents, found.warning) == (2, None)
    text.write_text("he said yes\n")
    assert evaluate(folder, f"files:{text}", last_word=True).warning is None


def test_a_run_without_a_language_model_is_refused(tmp_path):
    done = atoll.run(
        override(recipes.toy_sync(), ["train.steps=40", "model.hidden=8", "data.examples=4000"], candidates), out=tmp_path / "toy"
    )
    with pytest.raises(ConfigError, match="trained an MLP, which reads no text"):
        evaluate(done.folder, "stdlib")
