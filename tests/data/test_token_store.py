"""Tokens in memory and in files: what is written is read, and a damaged file is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.document_sources import Document
from atoll.data.token_store import (
    HEADER_BYTES,
    VERSION,
    encode_documents,
    encode_in_memory,
    open_token_file,
    token_writer,
)
from atoll.data.tokenizer import BPETokenizer, ByteTokenizer, Ids, train_bpe

TEXT_DOCUMENTS = [Document("1", "a", "abc"), Document("2", "b", "de"), Document("3", "a", "f")]


def test_each_document_is_followed_by_the_end_of_text():
    tokens = encode_in_memory(TEXT_DOCUMENTS, ByteTokenizer())
    assert ByteTokenizer().decode(tokens.ids) == "abc<|endoftext|>de<|endoftext|>f<|endoftext|>"
    assert tokens.starts.tolist() == [0, 4, 7]


def test_every_position_knows_its_domain():
    tokens = encode_in_memory(TEXT_DOCUMENTS, ByteTokenizer())
    names = [tokens.domains[i] for i in tokens.domains_at(np.arange(len(tokens)))]
    assert "".join(names) == "aaaabbbaa"


def test_long_streams_are_encoded_in_parts_without_losing_or_mixing_any():
    documents = [Document(str(n), "a", f"{n}." * 50_000) for n in range(40)]
    back = [ids.astype(np.uint8).tobytes() for ids in encode_documents(iter(documents), ByteTokenizer())]
    assert back == [document.text.encode() + b"\0" for document in documents]  # 256, the end of text, as uint8


def test_without_an_end_of_text_documents_are_simply_joined():
    named = train_bpe(TEXT_DOCUMENTS, 257).text.replace("<|endoftext|>", "<|something_else|>")
    tokenizer = BPETokenizer(named)
    assert tokenizer.end_of_text is None
    assert tokenizer.decode(encode_in_memory(TEXT_DOCUMENTS, tokenizer).ids) == "abcdef"


def test_no_documents_make_no_tokens():
    with pytest.raises(DataError, match="no documents"):
        encode_in_memory([], ByteTokenizer())


# ----------------------------------------------------------------------------------------------------------- token files

DIGEST = "0123456789abcdef" * 2
DOCUMENTS = [("books", [1, 2, 3, 4]), ("law", [5, 6]), ("books", [7, 299])]


def write_tokens(path: Path, documents: Iterable[tuple[str, Ids]], vocab_size: int = 300) -> None:
    with token_writer(path, vocab_size=vocab_size, tokenizer_digest=DIGEST) as writer:
        for domain, ids in documents:
            writer.add(domain, ids)


def written(folder: Path, vocab_size: int = 300) -> Path:
    documents = [(domain, np.array(ids, dtype=np.uint32)) for domain, ids in DOCUMENTS]
    write_tokens(folder / "a.tokens", documents, vocab_size)
    return folder / "a.tokens"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_what_was_written_is_read_in_the_narrowest_dtype(tmp_path: Path, vocab_size: int, dtype: str):
    tokens = open_token_file(written(tmp_path, vocab_size))
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 299]
    assert tokens.ids.dtype == dtype
    assert tokens.starts.tolist() == [0, 4, 6]
    assert [tokens.domains[i] for i in tokens.domain_ids] == ["books", "law", "books"]


def test_tokens_are_mapped_and_cannot_be_changed(tmp_path: Path):
    ids = open_token_file(written(tmp_path)).ids
    assert isinstance(ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9


def test_documents_are_taken_as_a_stream(tmp_path: Path):
    def documents() -> Iterator[tuple[str, Ids]]:
        for n in range(3):
            (unfinished,) = tmp_path.glob(".a.tokens.*")  # the file grows while we are asked for more
            assert unfinished.exists()
            yield "a", np.full(10, n, dtype=np.uint16)

    write_tokens(tmp_path / "a.tokens", documents())
    assert open_token_file(tmp_path / "a.tokens").num_documents == 3


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = written(tmp_path)
    before = path.read_bytes()

    def documents() -> Iterator[tuple[str, Ids]]:
        yield "a", np.arange(5, dtype=np.uint16)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_tokens(path, documents())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


def test_no_tokens_and_foreign_ids_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no tokens to write"):
        write_tokens(tmp_path / "a", [])
    with pytest.raises(DataError, match="id 300 is outside the vocabulary of 300"):
        write_tokens(tmp_path / "a", [("a", np.array([300], dtype=np.uint16))])
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="could not write"):
        write_tokens(tmp_path / "no" / "a", [("a", np.array([1], dtype=np.uint16))])


def test_every_damaged_byte_of_the_header_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good = path.read_bytes()
    for at in range(HEADER_BYTES):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[at] ^= flip
            path.write_bytes(bad)
            with pytest.raises(DataError):
                open_token_file(path)


def test_every_damaged_byte_of_the_index_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good, tokens_bytes = path.read_bytes(), 2 * 8
    for at in range(HEADER_BYTES + tokens_bytes, len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x01
        path.write_bytes(bad)
        with pytest.raises(DataError, match="index does not match"):
            open_token_file(path)


def test_every_damaged_byte_of_the_tokens_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good = path.read_bytes()
    for at in range(HEADER_BYTES, HEADER_BYTES + 2 * 8):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(DataError, match=r"tokens do not match their checksum|outside of its vocabulary"):
            open_token_file(path)
    path.write_bytes(good)
    assert len(open_token_file(path)) == 8


def test_tokens_are_read_to_verify_them_once_for_each_change_of_the_file(tmp_path: Path):
    """A folder that cannot be written is verified by every process."""
    path = written(tmp_path)
    open_token_file(path)
    remembered = tmp_path / "a.tokens.verified"
    first = remembered.read_text()
    stamp = remembered.stat().st_mtime_ns
    open_token_file(path)
    assert remembered.stat().st_mtime_ns == stamp
    os.utime(path, (1, 1))
    open_token_file(path)
    assert remembered.read_text() != first
    for damage in (b"", b"{}", b"[" * 5000, first.encode()):
        remembered.write_bytes(damage)
        open_token_file(path)
        assert remembered.read_bytes() not in (damage, b"")
    remembered.unlink()
    remembered.mkdir()
    assert len(open_token_file(path)) == 8
    remembered.rmdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError):
        open_token_file(path)
    assert not remembered.exists()


def test_ids_outside_of_the_vocabulary_are_refused_also_with_a_fitting_checksum(tmp_path: Path):
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES : HEADER_BYTES + 2] = struct.pack("<H", 300)
    tokens = bytes(data[HEADER_BYTES : HEADER_BYTES + 2 * 8])
    at = HEADER_BYTES - 3 * 16  # of the checksum of the tokens; those of the index and of the header follow
    data[at : at + 16] = blake2b(tokens, digest_size=16).digest()
    data[HEADER_BYTES - 16 : HEADER_BYTES] = blake2b(data[: HEADER_BYTES - 16], digest_size=16).digest()
    path.write_bytes(data)
    with pytest.raises(DataError, match="has the id 300, outside of its vocabulary of 300"):
        open_token_file(path)


def test_a_file_cut_at_any_length_or_added_to_is_refused(tmp_path: Path):
    path = written(tmp_path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(DataError):
            open_token_file(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(DataError, match="cut short or added to"):
        open_token_file(path)


def test_a_file_of_another_kind_and_a_missing_one_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("hello " * 100)
    with pytest.raises(DataError, match="is not a token file"):
        open_token_file(tmp_path / "a.txt")
    with pytest.raises(DataError, match="could not read"):
        open_token_file(tmp_path / "nowhere")
    with pytest.raises(DataError, match="could not read"):
        open_token_file(tmp_path)


def test_a_newer_version_is_refused_with_advice_to_upgrade(tmp_path: Path):
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", VERSION + 1)
    data[HEADER_BYTES - 16 : HEADER_BYTES] = blake2b(data[: HEADER_BYTES - 16], digest_size=16).digest()
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"format version 2.*Upgrade"):
        open_token_file(path)


def test_another_tokenizer_is_refused(tmp_path: Path):
    path = written(tmp_path)
    assert len(open_token_file(path, DIGEST)) == 8
    with pytest.raises(DataError, match=f"another tokenizer .digest {DIGEST}, given {'f' * 32}"):
        open_token_file(path, "f" * 32)
