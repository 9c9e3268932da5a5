"""Padded batches by position, and what is held out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.data.instructions import Instructions
from atoll.testing.tiny_pretrained_model import SUMS, save_byte_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    save_byte_tokenizer(folder)
    path = write_jsonl(folder / "sums.jsonl", SUMS)
    return Instructions(path=str(path), tokenizer=str(folder), validation_fraction=0.2, learn="answer")


@pytest.fixture(scope="module")
def loaded(spec):
    return spec.load()


def texts(loaded, batch):
    return [
        loaded.tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def same(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def test_every_example_is_trained_on_or_held_out_and_none_is_both(loaded):
    data = loaded.open(2, 4, seed=0)
    trained = {text for shard in range(2) for p in range(20) for text in texts(loaded, data.train.batch(shard, p))}
    held_out = {text for batch in data.validation for text in texts(loaded, batch)}
    assert not trained & held_out
    assert trained | held_out == {f"{record['prompt']}{record['completion']}<|endoftext|>" for record in SUMS}


def test_an_epoch_gives_each_example_once_and_the_next_in_another_order(loaded):
    train = loaded.open(1, 1, seed=0).train
    size = train.examples(0)
    first, second = ([texts(loaded, train.batch(0, p))[0] for p in range(at, at + size)] for at in (0, size))
    assert len(set(first)) == size
    assert sorted(first) == sorted(second)
    assert first != second


def test_shards_are_random_parts_of_the_whole_by_seed(loaded):
    one, again, other = (loaded.open(4, 2, seed=seed).train for seed in (0, 0, 1))
    assert sum(one.examples(shard) for shard in range(4)) == len(loaded.train)
    assert same(one.batch(3, 7), again.batch(3, 7))
    assert one.fingerprint() == again.fingerprint()
    assert one.fingerprint() != other.fingerprint()


def test_the_fingerprint_depends_on_targets_and_batches(spec, loaded):
    prints = {loaded.open(shards, size, 0).train.fingerprint() for shards in (1, 2) for size in (2, 4)}
    prints |= {replace(spec, learn="all").load().open(1, 2, 0).train.fingerprint()}
    prints |= {replace(spec, max_len=5).load().open(1, 2, 0).train.fingerprint()}
    assert len(prints) == 6


def test_tokens_counts_the_target_positions(loaded):
    batch = loaded.open(1, 3, seed=0).train.batch(0, 0)
    answers = [text.partition("=")[2].removesuffix("<|endoftext|>") for text in texts(loaded, batch)]
    assert loaded.open(1, 3, seed=0).train.tokens(batch) == sum(len(answer) + 1 for answer in answers)


def test_a_batch_is_as_long_as_its_longest_example(loaded):
    train = loaded.open(1, 3, seed=0).train
    for position in range(10):
        mask = train.batch(0, position)["attention_mask"]
        assert mask.shape[1] == int(mask.sum(dim=1).max())


def test_copies_of_an_example_are_held_out_together(spec, tmp_path):
    path = write_jsonl(tmp_path / "twice.jsonl", [*SUMS, *SUMS])
    loaded = replace(spec, path=str(path)).load()
    data = loaded.open(1, 1, 0)
    trained = {text for p in range(len(loaded.train)) for text in texts(loaded, data.train.batch(0, p))}
    assert not trained & {text for batch in data.validation for text in texts(loaded, batch)}


def test_with_a_validation_path_all_of_path_is_for_training(spec, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "never seen"}])
    loaded = replace(spec, validation_path=str(other)).load()
    assert (len(loaded.train), len(loaded.validation)) == (len(SUMS), 1)


def test_evaluation_uses_at_most_eval_examples_and_only_those_with_targets(spec, tmp_path):
    long = [{"prompt": "x" * 30, "completion": "y"}] * 5
    other = write_jsonl(tmp_path / "other.jsonl", [*long, *SUMS])
    loaded = replace(spec, validation_path=str(other), max_len=20, eval_examples=10).load()
    data = loaded.open(1, 4, 0)
    assert [len(batch["labels"]) for batch in data.validation] == [4, 4, 2]
    assert all((batch["labels"] >= 0).any(dim=1).all() for batch in data.validation)


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_len": 1}, r"max_len=1: an example has at least 2 tokens"),
        ({"eval_examples": 0}, r"eval_examples=0: at least 1"),
        ({"shards": 0}, r"shards=0: there is at least 1 shard"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1.0 must lie between"),
        ({"learn": "prompt"}, r"learn='prompt' is none of 'all', 'answer'"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Instructions(**change)


def test_missing_settings_are_named(spec):
    with pytest.raises(ConfigError, match=r"^data\.path is not given.*--set data\.path=FILE"):
        Instructions().load()
    with pytest.raises(ConfigError, match=r"^data\.tokenizer is not given"):
        replace(spec, tokenizer=None).load()


def test_too_few_examples_are_refused(spec, tmp_path):
    one = str(write_jsonl(tmp_path / "one.jsonl", SUMS[:1]))
    empty = str(write_jsonl(tmp_path / "none.jsonl", []))
    with pytest.raises(DataError, match=r"holds 1 examples: one to train on and one to validate on are needed"):
        replace(spec, path=one).load()
    with pytest.raises(DataError, match=r"none.jsonl holds no examples"):
        replace(spec, path=one, validation_path=empty).load()
    with pytest.raises(ConfigError, match=r"9999 shards of \d+ examples"):
        spec.load().open(9999, 4, 0)


def test_examples_without_targets_are_refused(spec):
    with pytest.raises(DataError, match=r"training examples have no token to learn within data\.max_len=2. Raise data\.max_len"):
        replace(spec, max_len=2).load()
