"""Instruction records: the three forms in files, and their ids, targets and padding."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atoll.core.errors import ConfigError, DataError
from atoll.data.document_sources import Document
from atoll.data.instructions import (
    IGNORED_LABEL,
    InstructionRecord,
    encode_records,
    load_model_tokenizer,
    parse_record,
    read_records,
)
from atoll.data.tokenizer import train_bpe
from atoll.testing.tiny_pretrained_model import save_byte_tokenizer, write_jsonl

FORMS = [{"text": "an island"}, {"prompt": "2+2=", "completion": "4"}, {"instruction": "Add.", "input": "2 2", "output": "4"}]


def read(path):
    return list(read_records(str(path)))


def test_the_three_forms_give_prompts_and_answers(tmp_path):
    (_, text), (_, pair), (name, alpaca) = read(write_jsonl(tmp_path / "a.jsonl", FORMS))
    assert text == InstructionRecord("", "an island")
    assert pair == InstructionRecord("2+2=", "4")
    assert (name, alpaca.answer) == ("a.jsonl#3", "4")
    assert alpaca.prompt.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n")
    assert "paired with an input" in alpaca.prompt


@pytest.mark.parametrize("record", [{"instruction": "Add.", "output": "4"}, {"instruction": "Add.", "input": "", "output": "4"}])
def test_an_instruction_without_input_has_no_input_section(record):
    assert parse_record(record).prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_a_record_with_the_fields_of_two_forms_has_the_more_specific_one():
    """Alpaca's own dataset has a `text` besides, which is prompt and answer in one."""
    assert parse_record({**FORMS[0], **FORMS[2]}) == parse_record(FORMS[2])
    assert parse_record({**FORMS[0], **FORMS[1]}) == parse_record(FORMS[1])


def test_lines_an_array_and_compressed_lines_are_read_in_the_same_way(tmp_path):
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
        ('{"text": ', r"a.jsonl:1 is not JSON"),
        (b'{"text": "\xff"}', r"a.jsonl is not UTF-8: byte 10"),
    ],
)
def test_an_invalid_record_is_refused_with_its_location(line, message, tmp_path):
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
def test_the_error_of_a_missing_file_says_what_to_give(where, tmp_path):
    with pytest.raises(DataError, match=r"there is no \.jsonl or \.json file .*Give a file, a folder"):
        read(tmp_path / where)


# -------------------------------------------------------------------------------------------------------------- encoding

END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return load_model_tokenizer(str(folder))


def one(tokenizer, prompt, answer, *, learn="answer", max_len=99):
    """The ids of an example, and those that are to be predicted."""
    encoded = encode_records([InstructionRecord(prompt, answer)], tokenizer, max_len=max_len, learn=learn)
    return encoded.ids.tolist(), encoded.ids[encoded.first_targets[0] :].tolist()


def test_an_example_is_its_text_and_the_end_of_text(tokenizer):
    ids, learnt = one(tokenizer, "2+2=", "4", learn="all")
    assert ids == [*tokenizer("2+2=4")["input_ids"], END]
    assert learnt == ids[1:], "nothing predicts the first"


def test_the_end_of_text_after_an_answer_is_a_target(tokenizer):
    _, learnt = one(tokenizer, "2+2=", "4")
    assert learnt == [*tokenizer("4")["input_ids"], END]


def test_prompt_and_answer_are_encoded_as_one_text(tokenizer):
    assert one(tokenizer, "2+2=", "4")[0] == one(tokenizer, "", "2+2=4")[0]


def test_all_tokens_of_plain_text_are_targets(tokenizer):
    assert one(tokenizer, "", "abc", learn="answer") == one(tokenizer, "", "abc", learn="all")


def test_a_token_that_spans_prompt_and_answer_belongs_to_the_answer(tmp_path):
    learned = train_bpe([Document("a", "a", "no yes " * 50)], 300)
    (tmp_path / "tokenizer.json").write_text(learned.text)
    merged = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")
    ids, learnt = one(merged, "no ", "yes")
    assert len(ids) == 3, "`no`, ` yes` and the end"
    assert merged.decode(learnt) == " yes<|endoftext|>"


def test_a_truncated_example_has_no_end_of_text(tokenizer):
    ids, learnt = one(tokenizer, "ab", "cdef", max_len=4)
    assert (len(ids), END in ids) == (4, False)
    assert learnt == ids[2:]


def test_an_example_truncated_before_its_answer_has_no_targets(tokenizer):
    encoded = encode_records([InstructionRecord("abcdef", "g"), InstructionRecord("", "")], tokenizer, max_len=4, learn="answer")
    assert encoded.num_targets == 0
    assert (encoded.padded([0, 1])["labels"] == IGNORED_LABEL).all()


def test_special_tokens_of_a_tokenizer_are_kept_and_its_end_of_text_is_not_doubled(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    around = AutoTokenizer.from_pretrained(tmp_path)
    special = [("<|endoftext|>", END)]
    around.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=special)
    ids, learnt = one(around, "ab", "c")
    assert ids == [END, *tokenizer("abc")["input_ids"], END]
    assert learnt == ids[3:]


def test_padding_adds_no_inputs_and_no_targets(tokenizer):
    encoded = encode_records(
        [InstructionRecord("a", "bc"), InstructionRecord("abcd", "efgh")], tokenizer, max_len=99, learn="answer"
    )
    batch = encoded.padded([0, 1])
    assert {name: tuple(part.shape) for name, part in batch.items()} == dict.fromkeys(batch, (2, 9))
    alone = encoded.padded([0])
    for name, part in alone.items():
        assert torch.equal(batch[name][:1, :4], part)
    assert batch["attention_mask"].sum(dim=1).tolist() == [4, 9]
    assert (batch["labels"][0, 4:] == IGNORED_LABEL).all()
    shown = batch["labels"] != IGNORED_LABEL
    assert torch.equal(batch["labels"][shown], batch["input_ids"][shown])
    assert int(shown.sum()) == encoded.num_targets == 3 + 5


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no tokenizer that can be loaded"):
        load_model_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere' is not a folder"):
        load_model_tokenizer(str(tmp_path / "nowhere"))


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"has no token for the end of a text.*Set its eos_token"):
        load_model_tokenizer(str(tmp_path))
