"""Token windows, and batches by position: the same for every reader, at any time, in any number of threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from atoll.core.errors import ConfigError, DataError
from atoll.core.protocols import Batches
from atoll.data.document_sources import Document
from atoll.data.partition import IID
from atoll.data.shuffled_epochs import Indices
from atoll.data.token_batches import TokenBatches, TokenExamples, validation_batches
from atoll.data.token_store import Tokens, encode_in_memory
from atoll.data.tokenizer import ByteTokenizer

torch.set_num_threads(1)


class Counting:
    """A tokenizer that numbers the characters of a text, so that every token is its own position."""

    vocab_size = 60_000
    end_of_text = None
    digest = "0" * 32

    def encode(self, text: str) -> np.ndarray:
        return np.arange(len(text), dtype=np.uint16)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        return "x" * len(ids)


def tokens_of(count: int) -> Tokens:
    return encode_in_memory([Document("a", "a", "x" * count)], Counting())


def batches_of(
    num_examples: int, *, shards: list[Indices] | None = None, batch_size: int = 4, seed: int = 0, seq_len: int = 3
) -> TokenBatches:
    examples = TokenExamples(tokens_of(num_examples * seq_len + 1), seq_len)
    return TokenBatches(examples, shards or [np.arange(num_examples)], batch_size=batch_size, seed=seed)


def numbers(batch: Tensor, seq_len: int = 3) -> list[int]:
    """Which examples a batch holds."""
    return (batch[:, 0] // seq_len).tolist()


def test_it_implements_the_batches_protocol():
    batches: Batches = batches_of(10, shards=[np.arange(6), np.arange(6, 10)])
    assert (batches.num_shards, batches.examples(0), batches.examples(1)) == (2, 6, 4)
    batch = batches.batch(1, 0)
    assert batch.shape == (4, 4)
    assert batch.dtype == torch.int64
    assert batches.tokens(batch) == 12


def test_a_row_is_an_example_from_the_text():
    batch = batches_of(10).batch(0, 1)
    assert torch.equal(batch - batch[:, :1], torch.arange(4).expand(4, 4))
    assert all(first % 3 == 0 for first in batch[:, 0].tolist())


@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_holds_every_example_once(num_examples: int, batch_size: int, seed: int):
    batches = batches_of(num_examples, batch_size=batch_size, seed=seed)
    read = [n for position in range(3 * num_examples) for n in numbers(batches.batch(0, position))]
    for epoch in range(3):
        assert sorted(read[epoch * num_examples : (epoch + 1) * num_examples]) == list(range(num_examples))


def test_epochs_and_seeds_have_their_own_order():
    batches, other = batches_of(64, batch_size=64), batches_of(64, batch_size=64, seed=1)
    first, second = numbers(batches.batch(0, 0)), numbers(batches.batch(0, 1))
    assert first != second
    assert first != sorted(first)
    assert first != numbers(other.batch(0, 0))


def test_the_batch_size_cuts_the_same_sequence_differently():
    small, large = batches_of(20, batch_size=2), batches_of(20, batch_size=6)
    assert numbers(large.batch(0, 1)) == [n for position in (3, 4, 5) for n in numbers(small.batch(0, position))]


def test_a_shard_smaller_than_a_batch_wraps_over_epochs():
    batch = batches_of(20, shards=[np.array([5]), np.array([3, 9])], batch_size=7)
    assert numbers(batch.batch(0, 12)) == [5] * 7
    assert sorted(numbers(batch.batch(1, 0))[:6]) == [3, 3, 3, 9, 9, 9]


def test_a_batch_of_many_times_the_data_is_refused():
    batches_of(20, batch_size=320)
    with pytest.raises(DataError, match=r"batch_size=321: the data have 20 examples.*batch_size=20 or less, or more data"):
        batches_of(20, batch_size=321)


def test_order_depends_on_what_a_shard_holds_and_not_on_its_number_or_its_neighbours():
    mine, others = np.arange(10, 20), [np.arange(5), np.arange(5, 10)]
    alone, last = batches_of(20, shards=[mine]), batches_of(20, shards=[*others, mine[::-1]])
    for position in range(10):
        assert torch.equal(alone.batch(0, position), last.batch(2, position))


def test_order_does_not_depend_on_the_number_of_readers():
    """Four islands on two shards, or one island on both: each position is what it is."""
    shards = IID().shards(TokenExamples(tokens_of(61), 3), 2, 0)
    one, many = batches_of(20, shards=shards), batches_of(20, shards=shards)
    straight = {(shard, position): one.batch(shard, position) for shard in range(2) for position in range(12)}
    for island in range(4):
        for position in range(island // 2, 12, 2):
            assert torch.equal(many.batch(island % 2, position), straight[island % 2, position])


def test_a_batch_does_not_depend_on_what_was_read_before():
    fresh, used = batches_of(11), batches_of(11)
    for position in (40, 3, 900, 0, 41, 3):
        used.batch(0, position)
    assert torch.equal(used.batch(0, 17), fresh.batch(0, 17))


def test_a_batch_may_be_written_to_without_changing_the_text():
    batches = batches_of(10)
    before = batches.batch(0, 0).clone()
    batches.batch(0, 0).zero_()
    assert torch.equal(batches.batch(0, 0), before)


def test_threads_read_what_one_reader_would():
    shards = [np.arange(0, 13), np.arange(13, 17), np.arange(17, 50)]
    batches, alone = batches_of(50, shards=shards), batches_of(50, shards=shards)
    wanted = [(n % 3, n * 7919 % 200) for n in range(3000)]
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda at: batches.batch(*at), wanted))
    assert all(torch.equal(batch, alone.batch(*at)) for batch, at in zip(read, wanted, strict=True))


def test_only_a_few_epochs_are_kept_in_memory():
    batches = batches_of(5)
    for position in range(100):
        batches.batch(0, position)
    assert len(batches._orders[0]) <= 3


def test_the_order_is_pinned():
    """A change here changes every run's data: it must be meant."""
    assert numbers(batches_of(8, batch_size=8).batch(0, 0)) == [3, 7, 4, 2, 6, 5, 1, 0]


@pytest.mark.parametrize(
    ("shard", "position", "message"), [(1, 0, "shard=1: there are 1"), (-1, 0, "shard=-1"), (0, -1, "position=-1")]
)
def test_unknown_shards_and_positions_are_refused(shard: int, position: int, message: str):
    with pytest.raises(ConfigError, match=message):
        batches_of(5).batch(shard, position)


def test_an_empty_batch_is_refused():
    with pytest.raises(ConfigError, match="batch_size=0"):
        batches_of(5, batch_size=0)


# ---------------------------------------------------------------------------------------------------------- validation


def starts(batches: list[Tensor]) -> list[int]:
    return [int(first) for batch in batches for first in batch[:, 0]]


@given(st.integers(4, 300), st.integers(1, 9), st.integers(1, 12))
def test_validation_windows_never_overlap_and_come_in_the_order_of_the_text(length: int, batch_size: int, count: int):
    batches = validation_batches(tokens_of(length), seq_len=3, batch_size=batch_size, count=count)
    at = starts(batches)
    assert all(b - a >= 4 for a, b in pairwise(at))
    assert at[-1] + 4 <= length
    assert 1 <= len(batches) <= count
    assert len({batch.shape for batch in batches}) == 1


def test_validation_windows_are_spread_over_the_whole_text():
    at = starts(validation_batches(tokens_of(4000), seq_len=3, batch_size=5, count=2))
    assert at == list(range(0, 4000, 400))


def test_all_windows_are_used_where_as_many_are_asked_for():
    assert starts(validation_batches(tokens_of(24), seq_len=3, batch_size=2, count=3)) == [0, 4, 8, 12, 16, 20]


def test_fewer_windows_than_asked_for_give_what_there_is():
    assert [len(b) for b in validation_batches(tokens_of(30), seq_len=3, batch_size=3, count=99)] == [3, 3]
    assert [len(b) for b in validation_batches(tokens_of(11), seq_len=3, batch_size=8, count=4)] == [2]


def test_too_little_validation_text_is_refused_with_the_numbers():
    with pytest.raises(
        DataError, match=r"validation text has 3 tokens, fewer than one window of seq_len \+ 1 = 4.*validation_fraction"
    ):
        validation_batches(tokens_of(3), seq_len=3, batch_size=1, count=1)


@pytest.mark.parametrize("gather_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("fits", [True, False])
def test_batches_read_ahead_are_those_read_one_by_one(gather_bytes: int, fits: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.data.token_batches._GATHER_BYTES", gather_bytes)
    monkeypatch.setattr("atoll.data.token_store._upload_limit", lambda device: math.inf if fits else 0)
    batches = batches_of(10, batch_size=3)
    ahead = list(batches.ahead(0, 2, 7, "cpu"))
    assert len(ahead) == 7
    for position, batch in enumerate(ahead, start=2):
        assert torch.equal(batch, batches.batch(0, position))
        assert batch.dtype == torch.int64


def test_tokens_are_uploaded_once_for_all_readers():
    text = tokens_of(70)
    uploaded = text.on_device("cpu")
    assert uploaded is not None
    assert uploaded is text.on_device("cpu")
    assert uploaded.tolist() == text.ids.tolist()


# -------------------------------------------------------------------------------------------------------------- examples


def byte_tokens(*documents: tuple[str, str]) -> Tokens:
    return encode_in_memory([Document(str(n), domain, text) for n, (domain, text) in enumerate(documents)], ByteTokenizer())


@given(st.integers(2, 60), st.integers(1, 20))
def test_every_token_but_the_first_is_predicted_once_up_to_a_last_part(length: int, seq_len: int):
    tokens = byte_tokens(("a", "".join(chr(33 + n) for n in range(length))))
    if len(tokens) <= seq_len:
        return
    examples = TokenExamples(tokens, seq_len)
    rows = examples.read(np.arange(examples.count))
    assert rows.shape == ((len(tokens) - 1) // seq_len, seq_len + 1)
    assert rows[:, 1:].ravel().tolist() == tokens.ids[1 : 1 + examples.count * seq_len].tolist()
    assert rows[:, 0].tolist() == tokens.ids[: examples.count * seq_len : seq_len].tolist()


def test_an_example_belongs_to_the_domain_of_its_first_token():
    examples = TokenExamples(byte_tokens(("a", "xxxxx"), ("b", "yy"), ("a", "zzz")), seq_len=4)
    domains = [examples.tokens.domains[i] for i in examples.domain_ids]
    assert domains == ["a", "a", "b"]  # tokens 0, 4 and 8


def test_examples_are_copies_in_int64():
    tokens = byte_tokens(("a", "abcdef"))
    rows = TokenExamples(tokens, 3).read(np.array([1, 0, 1]))
    rows[0, 0] = -1
    assert rows.dtype == np.int64
    assert tokens.ids.tolist() == [*b"abcdef", 256]


def test_too_few_tokens_for_one_example_are_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"4 tokens, fewer than one example of seq_len \+ 1 = 11.*at most 3"):
        TokenExamples(byte_tokens(("a", "abc")), 10)
