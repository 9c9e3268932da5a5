"""Token files: what is written is read, and what was damaged is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.token_files import HEADER_BYTES, VERSION, TokenFile, write_tokens
from atoll.data.tokenizer import Ids

DIGEST = "0123456789abcdef" * 2
DOCUMENTS = [("books", [1, 2, 3, 4]), ("law", [5, 6]), ("books", [7, 299])]


def written(folder: Path, vocab_size: int = 300) -> Path:
    documents = [(domain, np.array(ids, dtype=np.uint32)) for domain, ids in DOCUMENTS]
    write_tokens(folder / "a.tokens", documents, vocab_size=vocab_size, tokenizer_digest=DIGEST)
    return folder / "a.tokens"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_what_was_written_is_read_in_the_narrowest_dtype(tmp_path: Path, vocab_size: int, dtype: str):
    tokens = TokenFile.open(written(tmp_path, vocab_size)).tokens
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 299]
    assert tokens.ids.dtype == dtype
    assert tokens.starts.tolist() == [0, 4, 6]
    assert [tokens.domains[i] for i in tokens.domain_ids] == ["books", "law", "books"]
    assert (tokens.vocab_size, tokens.tokenizer_digest) == (vocab_size, DIGEST)


def test_tokens_are_mapped_and_cannot_be_changed(tmp_path: Path):
    ids = TokenFile.open(written(tmp_path)).tokens.ids
    assert isinstance(ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9


def test_documents_are_taken_as_a_stream(tmp_path: Path):
    def documents() -> Iterator[tuple[str, Ids]]:
        for n in range(3):
            (unfinished,) = tmp_path.glob(".a.tokens.*")  # the file grows while we are asked for more
            assert unfinished.exists()
            yield "a", np.full(10, n, dtype=np.uint16)

    write_tokens(tmp_path / "a.tokens", documents(), vocab_size=300, tokenizer_digest=DIGEST)
    assert TokenFile.open(tmp_path / "a.tokens").tokens.num_documents == 3


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = written(tmp_path)
    before = path.read_bytes()

    def documents() -> Iterator[tuple[str, Ids]]:
        yield "a", np.arange(5, dtype=np.uint16)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_tokens(path, documents(), vocab_size=300, tokenizer_digest=DIGEST)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


def test_no_tokens_and_foreign_ids_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no tokens to write"):
        write_tokens(tmp_path / "a", [], vocab_size=300, tokenizer_digest=DIGEST)
    with pytest.raises(DataError, match="id 300 is outside the vocabulary of 300"):
        write_tokens(tmp_path / "a", [("a", np.array([300], dtype=np.uint16))], vocab_size=300, tokenizer_digest=DIGEST)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="could not write"):
        write_tokens(tmp_path / "no" / "a", [("a", np.array([1], dtype=np.uint16))], vocab_size=300, tokenizer_digest=DIGEST)


def test_every_damaged_byte_of_the_header_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good = path.read_bytes()
    for at in range(HEADER_BYTES):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[at] ^= flip
            path.write_bytes(bad)
            with pytest.raises(DataError):
                TokenFile.open(path)


def test_every_damaged_byte_of_the_index_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good, tokens_bytes = path.read_bytes(), 2 * 8
    for at in range(HEADER_BYTES + tokens_bytes, len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x01
        path.write_bytes(bad)
        with pytest.raises(DataError, match="index does not match"):
            TokenFile.open(path)


def test_damaged_tokens_are_found_by_verify(tmp_path: Path):
    path = written(tmp_path)
    TokenFile.open(path).verify()
    bad = bytearray(path.read_bytes())
    bad[HEADER_BYTES] ^= 1
    path.write_bytes(bad)
    with pytest.raises(DataError, match="tokens do not match"):
        TokenFile.open(path).verify()


def test_a_file_cut_at_any_length_or_added_to_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(DataError):
            TokenFile.open(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(DataError, match="cut short or added to"):
        TokenFile.open(path)


def test_a_file_of_another_kind_and_a_missing_one_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    with pytest.raises(DataError, match="is not a token file"):
        TokenFile.open(tmp_path / "a.txt")
    with pytest.raises(DataError, match="could not read"):
        TokenFile.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match="could not read"):
        TokenFile.open(tmp_path)


def test_a_newer_version_is_refused_with_advice_to_upgrade(tmp_path: Path):
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", VERSION + 1)
    data[HEADER_BYTES - 16 : HEADER_BYTES] = blake2b(data[: HEADER_BYTES - 16], digest_size=16).digest()
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"format version 2.*Upgrade"):
        TokenFile.open(path)


def test_another_tokenizer_is_refused(tmp_path: Path):
    path = written(tmp_path)
    assert len(TokenFile.open(path, DIGEST).tokens) == 8
    with pytest.raises(DataError, match=f"another tokenizer .digest {DIGEST}, given {'f' * 32}"):
        TokenFile.open(path, "f" * 32)
