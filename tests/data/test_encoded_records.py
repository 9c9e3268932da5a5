"""Records as ids: where the answer begins, what the end is, and what padding leaves alone."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atoll.core.errors import ConfigError, DataError
from atoll.data.documents import Document
from atoll.data.encoded_records import NOTHING, encode, model_tokenizer
from atoll.data.instruction_records import Record
from atoll.data.tokenizer import train_bpe
from atoll.testing.pretrained import save_byte_tokenizer

END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return model_tokenizer(str(folder))


def one(tokenizer, prompt, answer, *, learn="answer", max_len=99):
    """The ids of an example, and those that are to be predicted."""
    encoded = encode([Record(prompt, answer)], tokenizer, max_len=max_len, learn=learn)
    return encoded.ids.tolist(), encoded.ids[encoded.firsts[0] :].tolist()


def test_an_example_is_its_text_and_an_end(tokenizer):
    ids, learnt = one(tokenizer, "2+2=", "4", learn="all")
    assert ids == [*tokenizer("2+2=4")["input_ids"], END]
    assert learnt == ids[1:], "nothing predicts the first"


def test_of_the_answer_its_end_is_learnt_too(tokenizer):
    _, learnt = one(tokenizer, "2+2=", "4")
    assert learnt == [*tokenizer("4")["input_ids"], END]


def test_prompt_and_answer_have_the_ids_of_the_one_text_that_they_make(tokenizer):
    assert one(tokenizer, "2+2=", "4")[0] == one(tokenizer, "", "2+2=4")[0]


def test_plain_text_is_learnt_whole_either_way(tokenizer):
    assert one(tokenizer, "", "abc", learn="answer") == one(tokenizer, "", "abc", learn="all")


def test_a_token_that_reaches_from_the_prompt_into_the_answer_is_the_answers(tmp_path):
    learned = train_bpe([Document("a", "a", "no yes " * 50)], 300)
    learned.save(tmp_path / "tokenizer.json")
    merged = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")
    ids, learnt = one(merged, "no ", "yes")
    assert len(ids) == 3, "`no`, ` yes` and the end"
    assert merged.decode(learnt) == " yes<|endoftext|>"


def test_a_longer_example_is_cut_and_has_no_end(tokenizer):
    ids, learnt = one(tokenizer, "ab", "cdef", max_len=4)
    assert (len(ids), END in ids) == (4, False)
    assert learnt == ids[2:]


def test_where_the_answer_is_cut_away_nothing_is_learnt(tokenizer):
    encoded = encode([Record("abcdef", "g"), Record("", "")], tokenizer, max_len=4, learn="answer")
    assert encoded.targets == 0
    assert (encoded.padded([0, 1])["labels"] == NOTHING).all()


def test_what_a_tokenizer_puts_around_a_text_is_kept_and_an_end_is_not_doubled(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    around = AutoTokenizer.from_pretrained(tmp_path)
    special = [("<|endoftext|>", END)]
    around.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=special)
    ids, learnt = one(around, "ab", "c")
    assert ids == [END, *tokenizer("abc")["input_ids"], END]
    assert learnt == ids[3:]


def test_padding_adds_nothing_to_see_and_nothing_to_learn(tokenizer):
    encoded = encode([Record("a", "bc"), Record("abcd", "efgh")], tokenizer, max_len=99, learn="answer")
    batch = encoded.padded([0, 1])
    assert {name: tuple(part.shape) for name, part in batch.items()} == dict.fromkeys(batch, (2, 9))
    alone = encoded.padded([0])
    for name, part in alone.items():
        assert torch.equal(batch[name][:1, :4], part)
    assert batch["attention_mask"].sum(dim=1).tolist() == [4, 9]
    assert (batch["labels"][0, 4:] == NOTHING).all()
    shown = batch["labels"] != NOTHING
    assert torch.equal(batch["labels"][shown], batch["input_ids"][shown])
    assert int(shown.sum()) == encoded.targets == 3 + 5


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no tokenizer that can be loaded"):
        model_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere' is not a folder"):
        model_tokenizer(str(tmp_path / "nowhere"))


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"has no token for the end of a text.*Set its eos_token"):
        model_tokenizer(str(tmp_path))
