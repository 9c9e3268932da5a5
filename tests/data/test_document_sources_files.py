"""A corpus of text files: documents, domains, globs, jsonl, and error messages."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from atoll.core.errors import DataError
from atoll.data.document_sources import Document, files_corpus


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(given: object) -> list[Document]:
    return list(files_corpus(str(given)))


def test_a_text_file_is_one_document(tmp_path: Path):
    write(tmp_path / "plays" / "hamlet.txt", "To be\nor not\n")
    assert read(tmp_path / "plays" / "hamlet.txt") == [Document("hamlet.txt", "plays", "To be\nor not\n")]


def test_a_line_with_end_of_text_alone_ends_a_document(tmp_path: Path):
    path = write(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo <|endoftext|> still two\n<|endoftext|>\r\n\n<|endoftext|>\nlast")
    documents = read(path)
    assert [d.text for d in documents] == ["one\n", "two <|endoftext|> still two\n", "last"]
    assert [d.name for d in documents] == ["a.txt", "a.txt#1", "a.txt#3"]


def test_sub_folders_are_domains(tmp_path: Path):
    for name in ("books/a.txt", "books/deep/b.txt", "law/c.txt", "loose.txt"):
        write(tmp_path / "all" / name, name)
    documents = read(tmp_path / "all")
    assert {d.name: d.domain for d in documents} == {
        "books/a.txt": "books",
        "books/deep/b.txt": "books",
        "law/c.txt": "law",
        "loose.txt": "all",
    }


def test_hidden_files_are_left_out(tmp_path: Path):
    write(tmp_path / "a.txt", "seen")
    write(tmp_path / ".git" / "b.txt", "hidden")
    write(tmp_path / ".c.txt", "hidden")
    assert [d.text for d in read(tmp_path)] == ["seen"]


def test_a_glob_takes_what_matches_and_counts_domains_from_its_first_wildcard(tmp_path: Path):
    for name in ("en/train.txt", "en/valid.txt", "de/train.txt"):
        write(tmp_path / name, name)
    assert {(d.domain, d.text) for d in read(tmp_path / "*" / "train.txt")} == {("en", "en/train.txt"), ("de", "de/train.txt")}
    assert {(d.domain, d.text) for d in read(tmp_path / "**" / "valid*")} == {("en", "en/valid.txt")}
    assert {(d.domain, d.text) for d in read(tmp_path / "en" / "*.txt")} == {("en", "en/train.txt"), ("en", "en/valid.txt")}


def test_documents_come_in_the_order_of_their_paths_and_are_named_apart_from_where_the_folder_lies(tmp_path: Path):
    for root in ("here", "there"):
        for name in ("b.txt", "a.txt", "c/z.txt"):
            write(tmp_path / root / "texts" / name, name)
    here, there = read(tmp_path / "here" / "texts"), read(tmp_path / "there" / "texts")
    assert here == there
    assert [d.name for d in here] == ["c/z.txt", "a.txt", "b.txt"]


def test_compressed_text_and_jsonl_are_read_by_their_inner_suffix(tmp_path: Path):
    write(tmp_path / "a.txt.xz", lzma.compress(b"xz"))
    write(tmp_path / "b.txt.gz", gzip.compress(b"gz"))
    write(tmp_path / "c.txt.zst", zstandard.compress(b"zst"))
    write(tmp_path / "d.jsonl.gz", gzip.compress(b'{"text": "json"}\n'))
    assert [d.text for d in read(tmp_path)] == ["xz", "gz", "zst", "json"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")
    assert [d.text for d in read(tmp_path)] == ["hello"]


def test_jsonl_has_a_document_per_line_in_the_named_field(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"text": "one", "body": "eins"}\n\n{"text": "two", "body": "zwei"}\n')
    assert [(d.name, d.text) for d in read(path)] == [("a.jsonl#1", "one"), ("a.jsonl#3", "two")]
    assert [d.text for d in read(f"{path}#body")] == ["eins", "zwei"]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x\ud800é"}))
    assert [d.text for d in read(path)] == ["x?é"]


def test_a_path_may_contain_a_hash(tmp_path: Path):
    path = write(tmp_path / "a#b.txt", "text")
    assert [d.text for d in read(path)] == ["text"]


def test_a_missing_path_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"files:.*nowhere: there is no file or folder .*Check the path"):
        read(tmp_path / "nowhere")


def test_no_path_is_refused():
    with pytest.raises(DataError, match="names no file"):
        files_corpus("#text")


@pytest.mark.parametrize("given", ["", "*.txt"])
def test_an_empty_folder_or_a_glob_without_a_match_is_refused(tmp_path: Path, given: str):
    with pytest.raises(DataError, match="nothing was found"):
        read(tmp_path / given)


def test_files_without_text_are_refused(tmp_path: Path):
    write(tmp_path / "a.txt", "")
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path)


def test_a_file_that_is_not_utf8_is_refused_with_the_byte_counted_in_the_file(tmp_path: Path):
    path = write(tmp_path / "a.txt", b"caf\xc3\xa9\n<|endoftext|>\nabc\xe9def")
    with pytest.raises(DataError, match=r"a.txt is not UTF-8: byte 23 is 0xe9"):
        read(path)
    assert path.read_bytes()[23] == 0xE9


def test_jsonl_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a.jsonl is not UTF-8: byte 25 is 0xff"):
        read(path)


def test_a_line_that_is_not_json_is_refused_with_its_number(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"text": "ok"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a.jsonl:2 is not JSON"):
        read(path)


def test_a_line_that_is_no_object_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"a.jsonl:1 is a JSON list"):
        read(write(tmp_path / "a.jsonl", '["text"]\n'))


def test_a_line_without_the_field_is_refused_with_the_fields_it_has(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"body": "x", "url": "y"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1 has no field 'text'; it has body, url.*PATH#field"):
        read(path)


def test_a_field_that_holds_no_text_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"a.jsonl:1: the field 'text' holds int"):
        read(write(tmp_path / "a.jsonl", '{"text": 3}\n'))
