"""Text: one value that opens to batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.core.errors import ConfigError, DataError
from atoll.data.partition import IID, ByDomain, Dirichlet, KMeans
from atoll.data.prepare import Preparation, prepare
from atoll.data.text_dataset import Text

torch.set_num_threads(1)

SMALL = Text(limit_bytes=60_000, seq_len=16)


def test_the_default_opens_the_standard_library():
    loaded = Text().load()
    data = loaded.open(num_shards=4, batch_size=8, seed=0)
    assert loaded.tokenizer.vocab_size == 257
    assert data.train.batch(3, 10_000).shape == (8, 65)
    assert [batch.shape for batch in data.validation] == [(8, 65)] * 8
    assert "def " in "".join(loaded.tokenizer.decode(data.train.batch(0, position).flatten()) for position in range(20))


def test_opening_twice_gives_the_same_batches():
    one, two = (SMALL.load().open(num_shards=3, batch_size=4, seed=5) for _ in range(2))
    assert torch.equal(one.train.batch(2, 7), two.train.batch(2, 7))
    assert all(torch.equal(a, b) for a, b in zip(one.validation, two.validation, strict=True))


def test_a_loaded_text_may_be_opened_with_other_shards_and_another_partition():
    loaded = SMALL.load()
    assert loaded.open(1, 4, 0).train.num_shards == 1
    by_domain = loaded.open(4, 4, 0, partition=ByDomain()).train
    assert torch.equal(by_domain.batch(1, 0), replace(SMALL, partition=ByDomain()).load().open(4, 4, 0).train.batch(1, 0))


@pytest.mark.parametrize("partition", [IID(), ByDomain(), Dirichlet(alpha=2.0), KMeans(restarts=1, fit_examples=200)])
def test_every_partition_opens_and_shards_hold_all_examples(partition: IID | ByDomain | Dirichlet | KMeans):
    counts = lambda tokens: np.stack([np.bincount(row, minlength=257) for row in tokens])  # noqa: E731
    data = replace(SMALL, partition=partition).load().open(3, 4, 0, features=counts)
    assert sum(data.train.examples(shard) for shard in range(3)) == (len(SMALL.load().train) - 1) // 16


def test_validation_text_is_never_trained_on():
    loaded = SMALL.load()
    train, validation = ({part.tobytes() for part in np.split(t.ids, t.starts[1:])} for t in (loaded.train, loaded.validation))
    assert not train & validation


def test_a_tokenizer_may_be_trained_on_the_fly():
    loaded = replace(SMALL, tokenizer="bpe:400").load()
    assert loaded.tokenizer.vocab_size == 400
    assert int(loaded.open(2, 4, 0).train.batch(0, 0).max()) < 400


def test_another_text_may_be_held_out(tmp_path: Path):
    (tmp_path / "v.txt").write_text("held out, word by word. " * 10)
    loaded = replace(SMALL, validation_corpus=f"files:{tmp_path}/v.txt").load()
    assert loaded.tokenizer.decode(loaded.open(1, 2, 0).validation[0][0]) == "held out, word by"


@pytest.mark.parametrize("form", ["prepared:{}", "{}"])
def test_prepared_text_opens_by_its_folder(tmp_path: Path, form: str):
    prepare(Preparation(corpus="stdlib", tokenizer="bpe:300", limit_bytes=60_000), tmp_path / "out")
    mapped = Text(corpus=form.format(tmp_path / "out"), seq_len=16).load().open(2, 4, 0)
    read = replace(SMALL, tokenizer="bpe:300").load().open(2, 4, 0)
    assert torch.equal(mapped.train.batch(1, 3), read.train.batch(1, 3))
    assert torch.equal(mapped.validation[0], read.validation[0])


def test_prepared_text_brings_its_own_tokenizer_and_limits(tmp_path: Path):
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=60_000), tmp_path / "out")
    prepare(Preparation(corpus="stdlib", tokenizer="bpe:300", limit_bytes=60_000), tmp_path / "other")
    with pytest.raises(DataError, match="is not the one that"):
        Text(corpus=f"prepared:{tmp_path}/out", tokenizer=str(tmp_path / "other" / "tokenizer.json")).load()
    same = Text(corpus=f"prepared:{tmp_path}/other", tokenizer=str(tmp_path / "other" / "tokenizer.json"))
    assert same.load().tokenizer.vocab_size == 300
    with pytest.raises(ConfigError, match="limit_bytes and validation_corpus do not go with"):
        Text(corpus=f"prepared:{tmp_path}/out", limit_bytes=10)


def test_a_corpus_smaller_than_one_sequence_is_refused_with_the_numbers(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words " * 10)
    text = Text(corpus=f"files:{tmp_path}/a.txt", seq_len=128, validation_fraction=0.2)
    with pytest.raises(DataError, match=r"training text has \d+ tokens, fewer than one example of seq_len \+ 1 = 129"):
        text.load().open(1, 1, 0)


def test_a_corpus_of_one_character_cannot_be_split(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="too short to hold some of it out"):
        Text(corpus=f"files:{tmp_path}/a.txt").load()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"seq_len": 0}, ConfigError, "seq_len=0"),
        ({"eval_batches": 0}, ConfigError, "eval_batches=0"),
        ({"limit_bytes": 0}, ConfigError, "limit_bytes=0"),
        ({"shards": 0}, ConfigError, "shards=0: there is at least 1 shard.*none for one per island"),
        ({"shards": 1.5}, ConfigError, "shards=1.5 is not a whole number"),
        ({"validation_fraction": 0.0}, ConfigError, r"validation_fraction=0.0"),
        ({"tokenizer": "bpe:x"}, ConfigError, "bpe:32000"),
        ({"partition": "iid"}, ConfigError, "partition='iid' is none of atoll.IID"),
        ({"corpus": "wikipedia"}, DataError, "'wikipedia' is not known"),
    ],
)
def test_impossible_settings_are_refused_when_they_are_made(fields: dict[str, object], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        replace(Text(), **fields)
