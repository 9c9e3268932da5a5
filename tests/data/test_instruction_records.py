"""Prompts and answers from files, in three forms."""

from __future__ import annotations

import gzip
import json

import pytest

from atoll.core.errors import DataError
from atoll.data.instruction_records import Record, read_records, record_of
from atoll.testing.pretrained import write_jsonl

FORMS = [{"text": "an island"}, {"prompt": "2+2=", "completion": "4"}, {"instruction": "Add.", "input": "2 2", "output": "4"}]


def read(path):
    return list(read_records(str(path)))


def test_the_three_forms_give_prompts_and_answers(tmp_path):
    (_, text), (_, pair), (name, alpaca) = read(write_jsonl(tmp_path / "a.jsonl", FORMS))
    assert text == Record("", "an island")
    assert pair == Record("2+2=", "4")
    assert (name, alpaca.answer) == ("a.jsonl#3", "4")
    assert alpaca.prompt.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n")
    assert "paired with an input" in alpaca.prompt


@pytest.mark.parametrize("record", [{"instruction": "Add.", "output": "4"}, {"instruction": "Add.", "input": "", "output": "4"}])
def test_an_instruction_without_input_has_no_place_for_it(record):
    assert record_of(record).prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_a_record_with_the_fields_of_two_forms_is_of_the_more_particular_one():
    """Alpaca's own dataset has a `text` besides, which is prompt and answer in one."""
    assert record_of({**FORMS[0], **FORMS[2]}) == record_of(FORMS[2])
    assert record_of({**FORMS[0], **FORMS[1]}) == record_of(FORMS[1])


def test_lines_an_array_and_compressed_lines_are_read_alike(tmp_path):
    lines = read(write_jsonl(tmp_path / "a.jsonl", FORMS))
    (tmp_path / "b.json").write_text(json.dumps(FORMS))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in ("b.json", "c.jsonl.gz"):
        assert [record for _, record in read(tmp_path / name)] == [record for _, record in lines]


def test_a_folder_and_a_glob_are_read_in_the_order_of_their_paths(tmp_path):
    for name, text in (("b.jsonl", "two"), ("a.jsonl", "one"), (".hidden.jsonl", "never"), ("notes.txt", "nor this")):
        write_jsonl(tmp_path / name, [{"text": text}])
    assert [record.answer for _, record in read(tmp_path)] == ["one", "two"]
    assert read(tmp_path / "*.jsonl") == read(tmp_path)


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "one"}\n\n{"text": "two"}\n')
    assert [name for name, _ in read(tmp_path / "a.jsonl")] == ["a.jsonl#1", "a.jsonl#3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?"}', r"record 1 has the fields question. Each record is one of .*Rename the fields"),
        ('{"prompt": "?"}', r"has the fields prompt"),
        ("[1]", r"is a JSON list, not an object"),
        ('{"text": 3}', r"the field 'text' holds int, not text"),
        ('{"instruction": "a", "input": 3, "output": "b"}', r"the field 'input' holds int"),
        ('{"text": ', r"a.jsonl, line 1 is not JSON"),
        (b'{"text": "\xff"}', r"line 1 is not UTF-8"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl")


def test_json_that_is_no_array_is_refused_with_advice(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"is not JSON .*call it \.jsonl"):
        read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"text": "one"}')
    with pytest.raises(DataError, match=r"is a JSON dict, not an array"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("where", ["", "nowhere.jsonl", "*.jsonl"])
def test_where_there_is_no_file_the_error_says_what_to_give(where, tmp_path):
    with pytest.raises(DataError, match=r"there is no \.jsonl or \.json file .*Give a file, a folder"):
        read(tmp_path / where)
