"""Windows on the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import DataError
from atoll.data.documents import Document
from atoll.data.examples import Examples
from atoll.data.tokenizer import ByteTokenizer
from atoll.data.tokens import Tokens, in_memory


def tokens_of(*documents: tuple[str, str]) -> Tokens:
    return in_memory([Document(str(n), domain, text) for n, (domain, text) in enumerate(documents)], ByteTokenizer())


@given(st.integers(2, 60), st.integers(1, 20))
def test_every_token_but_the_first_is_predicted_once_up_to_a_last_part(length: int, seq_len: int):
    tokens = tokens_of(("a", "".join(chr(33 + n) for n in range(length))))
    if len(tokens) <= seq_len:
        return
    examples = Examples(tokens, seq_len)
    rows = examples.read(np.arange(examples.count))
    assert rows.shape == ((len(tokens) - 1) // seq_len, seq_len + 1)
    assert rows[:, 1:].ravel().tolist() == tokens.ids[1 : 1 + examples.count * seq_len].tolist()
    assert rows[:, 0].tolist() == tokens.ids[: examples.count * seq_len : seq_len].tolist()


def test_an_example_belongs_to_the_domain_of_its_first_token():
    examples = Examples(tokens_of(("a", "xxxxx"), ("b", "yy"), ("a", "zzz")), seq_len=4)
    domains = [examples.tokens.domains[i] for i in examples.domain_ids]
    assert domains == ["a", "a", "b"]  # tokens 0, 4 and 8


def test_examples_are_copies_in_int64():
    tokens = tokens_of(("a", "abcdef"))
    rows = Examples(tokens, 3).read(np.array([1, 0, 1]))
    rows[0, 0] = -1
    assert rows.dtype == np.int64
    assert tokens.ids.tolist() == [*b"abcdef", 256]


def test_too_few_tokens_for_one_example_are_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"4 tokens, fewer than one example of seq_len \+ 1 = 11.*at most 3"):
        Examples(tokens_of(("a", "abc")), 10)
