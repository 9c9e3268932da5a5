"""Prepared folders hold the tokens that reading the text gives, and are complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import ConfigError, DataError
from atoll.core.events import Progress
from atoll.core.verified_files import read_record
from atoll.data.prepare import Preparation, PreparedText, find_prepared, open_prepared, prepare
from atoll.data.text_dataset import Text

FILES_OF_BYTES = ["meta.json", "train.tokens", "train.tokens.verified", "validation.tokens", "validation.tokens.verified"]


def prepare_text(corpus: str, tokenizer: str, out: Path, **settings: Any) -> PreparedText:
    return prepare(Preparation(corpus=corpus, tokenizer=tokenizer, **settings), out)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for domain in ("a", "b"):
        for n in range(20):
            path = tmp_path / "texts" / domain / f"{n}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{domain} {n}: the quick brown fox jumps over the lazy dog\n" * 30)
    return f"files:{tmp_path}/texts"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_prepared_text_is_the_text_that_would_be_read_afresh(corpus: str, tmp_path: Path, tokenizer: str):
    prepared = prepare_text(corpus, tokenizer, tmp_path / "out", validation_fraction=0.2)
    fresh = Text(corpus=corpus, tokenizer=tokenizer, validation_fraction=0.2).load()
    assert prepared.tokenizer.digest == fresh.tokenizer.digest
    for mapped, read in ((prepared.train, fresh.train), (prepared.validation, fresh.validation)):
        assert np.array_equal(mapped.ids, read.ids)
        assert np.array_equal(mapped.starts, read.starts)
        assert np.array_equal(mapped.domain_ids, read.domain_ids)
        assert mapped.domains == read.domains


def test_opening_again_gives_what_prepare_gave(corpus: str, tmp_path: Path):
    prepared, opened = prepare_text(corpus, "bpe:280", tmp_path / "out"), open_prepared(tmp_path / "out")
    assert np.array_equal(prepared.train.ids, opened.train.ids)
    assert opened.tokenizer.decode(opened.train.ids[:10]).startswith("a ")
    assert prepared.meta == opened.meta
    assert opened.meta["vocab_size"] == 280
    assert opened.meta["train"]["tokens"] == len(opened.train)
    assert opened.meta["domains"] == ["a", "b"]
    assert "to train on" in str(prepared)


def test_preparing_twice_writes_the_same_bytes(corpus: str, tmp_path: Path):
    for out in ("one", "two"):
        prepare_text(corpus, "bpe:300", tmp_path / out)
    for name in ("train.tokens", "validation.tokens", "tokenizer.json", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_preparing_again_replaces_the_old_files(corpus: str, tmp_path: Path):
    prepare_text(corpus, "bpe:300", tmp_path / "out")
    prepared = prepare_text(corpus, "bytes", tmp_path / "out")
    assert prepared.tokenizer.vocab_size == 257
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES_OF_BYTES


def test_an_equal_preparation_is_found_and_another_is_refused(corpus: str, tmp_path: Path):
    wanted = Preparation(corpus=corpus, tokenizer="bytes", limit_bytes=20_000)
    assert find_prepared(wanted, tmp_path / "out") is None
    prepare(wanted, tmp_path / "out")
    before = find_prepared(wanted, tmp_path / "out")
    assert before is not None
    assert before.meta["text_bytes"] == 20_000
    with pytest.raises(DataError, match=r"limit_bytes=20000, asked for is None; validation_fraction=0.05, asked for is 0.2. Use"):
        find_prepared(Preparation(corpus=corpus, tokenizer="bytes", validation_fraction=0.2), tmp_path / "out")
    (tmp_path / "out" / "train.tokens").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be opened. .*train.tokens.* remove this one first"):
        find_prepared(wanted, tmp_path / "out")


def test_a_failure_leaves_what_was_prepared_before(corpus: str, tmp_path: Path):
    before = prepare_text(corpus, "bytes", tmp_path / "out").train.ids.tolist()
    (tmp_path / "texts" / "b" / "5.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        prepare_text(corpus, "bytes", tmp_path / "out")
    assert open_prepared(tmp_path / "out").train.ids.tolist() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES_OF_BYTES


def test_a_limit_and_a_fraction_are_kept_to(corpus: str, tmp_path: Path):
    prepared = prepare_text(corpus, "bytes", tmp_path / "out", validation_fraction=0.5, limit_bytes=20_000)
    documents = prepared.train.num_documents + prepared.validation.num_documents
    assert len(prepared.train) + len(prepared.validation) - documents == prepared.meta["text_bytes"] == 20_000


def test_a_validation_corpus_is_held_out_and_all_the_rest_is_trained_on(corpus: str, tmp_path: Path):
    (tmp_path / "held.txt").write_text("held out")
    prepared = prepare_text(corpus, "bytes", tmp_path / "out", validation_corpus=f"files:{tmp_path}/held.txt")
    assert prepared.tokenizer.decode(prepared.validation.ids) == "held out<|endoftext|>"
    assert prepared.train.num_documents == 40


def test_a_lone_document_is_cut(tmp_path: Path):
    (tmp_path / "a.txt").write_text("word " * 1000)
    prepared = prepare_text(f"files:{tmp_path}/a.txt", "bytes", tmp_path / "out", validation_fraction=0.1)
    assert (len(prepared.train), len(prepared.validation)) == (4501, 501)


def test_progress_is_reported_in_bytes_and_ends_at_the_total(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    for n in range(5):
        (tmp_path / "texts" / f"{n}.txt").write_text("x" * 600_000)
    reported: list[Progress] = []
    prepare(Preparation(corpus=f"files:{tmp_path}/texts", tokenizer="bytes"), tmp_path / "out", reported.append)
    assert {event.phase for event in reported} == {"read", "encode"}
    for phase in ("read", "encode"):
        done = [event.done for event in reported if event.phase == phase]
        assert done == sorted(done)
        assert len(done) >= 2
        assert done[-1] == 3_000_000
    assert reported[-1].total == 3_000_000


def test_a_wrong_fraction_or_tokenizer_is_refused_before_anything_is_written(corpus: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="validation_fraction=1"):
        prepare_text(corpus, "bytes", tmp_path / "out", validation_fraction=1.0)
    with pytest.raises(DataError, match="neither `bytes` nor a file"):
        prepare_text(corpus, "nowhere.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_a_folder_is_refused(corpus: str, tmp_path: Path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match="could not write to"):
        prepare_text(corpus, "bytes", tmp_path / "out")


def test_folders_that_are_missing_unfinished_or_of_another_version_are_refused(corpus: str, tmp_path: Path):
    with pytest.raises(DataError, match="there is no folder"):
        open_prepared(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no meta.json"):
        open_prepared(tmp_path)
    prepare_text(corpus, "bytes", tmp_path / "out")
    meta = tmp_path / "out" / "meta.json"
    good = read_record(meta)
    meta.write_text(json.dumps(good | {"version": 99}))
    with pytest.raises(DataError, match=r"version 99.*Upgrade"):
        open_prepared(tmp_path / "out")
    for bad in ("{", "[]", "{}", '{"version": null}'):
        meta.write_text(bad)
        with pytest.raises(DataError, match="cannot be read"):
            open_prepared(tmp_path / "out")


def test_a_tokenizer_that_was_exchanged_is_refused(corpus: str, tmp_path: Path):
    prepare_text(corpus, "bpe:300", tmp_path / "one")
    prepare_text(corpus, "bpe:280", tmp_path / "two")
    (tmp_path / "one" / "tokenizer.json").write_bytes((tmp_path / "two" / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="another tokenizer"):
        open_prepared(tmp_path / "one")
