"""Text to ids and back."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from atoll.core.errors import ConfigError, DataError
from atoll.data.document_sources import Document
from atoll.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    bpe_vocab_size,
    huggingface_files,
    load_tokenizer,
    train_bpe,
)

TEXTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + x\n" * 20, "naïve café — 東京 🙂\n" * 5]
DOCUMENTS = [Document(str(n), "a", text) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return train_bpe(DOCUMENTS, 300)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: BPETokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


@pytest.mark.parametrize("text", [*TEXTS, "", "\x00\r\n\t", "<|endoftext|>", "unseen: ελληνικά \u202e \u0301"])
def test_decoding_gives_the_text_back_and_no_text_contains_the_end(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids.tolist()
    assert ids.ndim == 1
    assert ids.dtype == np.uint16


@pytest.mark.parametrize("text", [*TEXTS, "\x00\r\n\t", "a<|endoftext|>b", "unseen: ελληνικά \u202e \u0301"])
def test_the_files_for_transformers_give_the_same_ids_and_text(tokenizer: Tokenizer, text: str, tmp_path: Path):
    for name, content in huggingface_files(tokenizer, 64).items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs, ids = AutoTokenizer.from_pretrained(tmp_path), tokenizer.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.end_of_text, tokenizer.vocab_size)


def test_the_byte_tokenizer_for_transformers_is_read_back_with_the_same_ids(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(huggingface_files(ByteTokenizer(), 64)["tokenizer.json"]))
    again, everything = load_tokenizer(str(tmp_path)), bytes(range(1, 128)).decode() + "é🙂"
    assert again.encode(everything).tolist() == ByteTokenizer().encode(everything).tolist()


@given(st.text())
def test_bytes_are_those_of_utf8(text: str):
    text = text.encode(errors="replace").decode()
    assert bytes(ByteTokenizer().encode(text).astype(np.uint8)) == text.encode()


def test_many_texts_are_encoded_like_each_of_them(tokenizer: Tokenizer):
    for one, together in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.encode(one).tolist() == together.tolist()


def test_the_end_of_a_text_can_be_read(tokenizer: Tokenizer):
    assert tokenizer.end_of_text is not None
    assert tokenizer.decode([*tokenizer.encode("a").tolist(), tokenizer.end_of_text]) == "a<|endoftext|>"


def test_invalid_utf8_is_decoded_to_the_replacement_character():
    assert ByteTokenizer().decode([0xC3]) == "�"


@pytest.mark.parametrize("wrong", [-1, 257, 300])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int):
    if wrong >= 0:
        wrong = tokenizer.vocab_size + wrong - 257
    with pytest.raises(DataError, match=f"id {wrong} is outside the vocabulary of {tokenizer.vocab_size}"):
        tokenizer.decode([0, wrong])


def test_merges_make_text_shorter_and_the_vocabulary_is_what_was_asked_for(bpe: BPETokenizer):
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXTS[0])) < 0.5 * len(TEXTS[0])


def test_training_on_the_same_text_gives_the_same_tokenizer(bpe: BPETokenizer):
    assert train_bpe(iter(DOCUMENTS), 300).digest == bpe.digest
    assert train_bpe(DOCUMENTS, 290).digest != bpe.digest


def test_a_short_text_gives_fewer_ids_and_no_error():
    assert 257 <= train_bpe([Document("a", "a", "abc")], 1000).vocab_size < 300


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_too_small_for_all_bytes_is_refused(size: int):
    with pytest.raises(ConfigError, match=f"vocab_size={size}.*257"):
        train_bpe(DOCUMENTS, size)


def test_a_saved_tokenizer_loads_with_the_same_digest(bpe: BPETokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(bpe.text)
    for spec in (tmp_path / "tokenizer.json", tmp_path):
        loaded = load_tokenizer(str(spec))
        assert (loaded.digest, loaded.vocab_size, loaded.end_of_text) == (bpe.digest, bpe.vocab_size, bpe.end_of_text)
        assert loaded.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()


def test_a_vocabulary_with_merges_in_gpt2s_form_loads_even_compressed(bpe: BPETokenizer, tmp_path: Path):
    model = json.loads(bpe.text)["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""])
    (tmp_path / "vocab.json.xz").write_bytes(lzma.compress(json.dumps(model["vocab"]).encode()))
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    loaded = load_tokenizer(str(tmp_path))
    assert [loaded.encode(text).tolist() for text in TEXTS] == [bpe.encode(text).tolist() for text in TEXTS]
    assert loaded.end_of_text == bpe.end_of_text


def test_digests_distinguish_tokenizers(bpe: BPETokenizer):
    assert len(ByteTokenizer.digest) == len(bpe.digest) == 32
    assert ByteTokenizer.digest != bpe.digest


def test_bytes_need_no_file():
    assert load_tokenizer("bytes").vocab_size == 257


def test_an_unknown_tokenizer_is_refused_with_what_is_allowed():
    with pytest.raises(DataError, match=r"'nowhere.json' is neither `bytes` nor a file.*bpe:VOCAB"):
        load_tokenizer("nowhere.json")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"t.json is not"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:-3"])
def test_a_bpe_spec_without_a_size_is_refused(spec: str):
    with pytest.raises(ConfigError, match="bpe:32000"):
        bpe_vocab_size(spec)
