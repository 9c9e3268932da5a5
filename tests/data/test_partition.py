"""Shards: no example lost or doubled, whatever the partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings, strategies as st
from numpy.typing import NDArray

from atoll.core.errors import ConfigError, DataError
from atoll.data.document_sources import Document
from atoll.data.partition import IID, ByDomain, Dirichlet, KMeans, Partition
from atoll.data.token_batches import TokenExamples
from atoll.data.token_store import encode_in_memory
from atoll.data.tokenizer import ByteTokenizer
from atoll.models.gpt import GPT


def examples_of(sizes: dict[str, int], seq_len: int = 4) -> TokenExamples:
    """Domains of about these many examples; the text of a domain repeats the first letter of its name."""
    documents = [Document(name, name, name[0] * (seq_len * size)) for name, size in sizes.items()]
    return TokenExamples(encode_in_memory(documents, ByteTokenizer()), seq_len)


def letter_counts(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """A stand-in for a model's features: how often each id occurs."""
    return np.stack([np.bincount(row, minlength=257) for row in tokens]).astype(np.float64)


PARTITIONS: list[Partition] = [IID(), ByDomain(), Dirichlet(alpha=1.0), KMeans(fit_examples=50, batch_examples=7, restarts=1)]
each_partition = pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)


@each_partition
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(2, 40), min_size=3, max_size=6), num_shards=st.integers(1, 3), seed=st.integers(-5, 1000))
def test_no_example_is_lost_or_doubled(partition: Partition, sizes: list[int], num_shards: int, seed: int):
    examples = examples_of({f"{chr(97 + n)}{n}": size for n, size in enumerate(sizes)})
    try:
        shards = partition.shards(examples, num_shards, seed, letter_counts)
    except DataError:  # a draw may leave a shard empty, which is refused
        assert isinstance(partition, Dirichlet)
        reject()
    assert len(shards) == num_shards
    assert all(len(shard) for shard in shards)
    assert sorted(np.concatenate(shards).tolist()) == list(range(examples.count))


@each_partition
def test_the_same_seed_gives_the_same_shards(partition: Partition):
    examples = examples_of({"a": 30, "b": 50, "c": 20})
    one, two = (partition.shards(examples, 3, 7, letter_counts) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("partition", [IID(), Dirichlet(alpha=1.0)])
def test_another_seed_gives_other_shards(partition: Partition):
    examples = examples_of({"a": 300, "b": 50})
    assert not np.array_equal(partition.shards(examples, 2, 0)[0], partition.shards(examples, 2, 1)[0])


def test_iid_shards_are_equal_in_size_and_each_like_the_whole():
    examples = examples_of({"a": 600, "b": 200})
    shards = IID().shards(examples, 3, 0)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert all(0.15 < examples.domain_ids[shard].mean() < 0.35 for shard in shards)


def test_by_domain_keeps_domains_whole_and_fills_the_emptiest_shard_with_the_largest():
    examples = examples_of({"s": 10, "l": 50, "m": 30, "t": 15})
    shards = ByDomain().shards(examples, 2, 0)
    names = [{examples.tokens.domains[d] for d in examples.domain_ids[shard]} for shard in shards]
    assert names == [{"l"}, {"m", "t", "s"}]


def test_fewer_domains_than_shards_are_refused_by_name():
    with pytest.raises(DataError, match=r"3 shards cannot be made of 2 domains \(b, a\).*at most 2.*Dirichlet"):
        ByDomain().shards(examples_of({"a": 10, "b": 20}), 3, 0)


def test_dirichlet_shards_have_similar_domains_for_a_large_alpha_and_differ_for_a_small_one():
    examples = examples_of(dict.fromkeys("abcdefgh", 400))

    def spread(alpha: float) -> float:
        shards = Dirichlet(alpha=alpha).shards(examples, 4, 0)
        mixes = np.stack([np.bincount(examples.domain_ids[shard], minlength=8) / len(shard) for shard in shards])
        return float(mixes.std(axis=0).mean())

    assert spread(1000.0) < 0.01 < 0.1 < spread(0.1)


def test_a_dirichlet_draw_that_leaves_a_shard_empty_says_what_to_do():
    with pytest.raises(DataError, match=r"would be empty .sizes: .*Raise alpha .now 0.001."):
        Dirichlet(alpha=0.001).shards(examples_of({"a": 20}), 4, 0)


def test_the_tiniest_alpha_gives_a_domain_to_one_shard():
    examples = examples_of(dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 10))
    shards = Dirichlet(alpha=1e-300).shards(examples, 2, 0)
    owners = [set(examples.domain_ids[shard].tolist()) for shard in shards]
    assert not owners[0] & owners[1]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_alpha_is_refused(alpha: float):
    with pytest.raises(ConfigError, match="alpha="):
        Dirichlet(alpha=alpha)


def test_kmeans_separates_two_obviously_different_domains():
    examples = examples_of({"a": 40, "z": 25})
    shards = KMeans().shards(examples, 2, 0, letter_counts)
    inside = [i for i in range(examples.count) if len(set(examples.read(np.array([i]))[0, :-1].tolist())) == 1]
    of = {int(i): shard for shard, members in enumerate(shards) for i in members}
    label = {of[i]: examples.domain_ids[i] for i in inside}
    assert len(label) == 2
    assert all(label[of[i]] == examples.domain_ids[i] for i in inside)


def test_kmeans_takes_the_hidden_states_of_a_model_and_averages_them():
    import torch

    decoder = GPT(layers=1, width=16, heads=2, head_size=8).build(vocab_size=257, seq_len=4, seed=0)

    def hidden(tokens: NDArray[np.int64]) -> NDArray[Any]:
        with torch.no_grad():
            return decoder.features(torch.from_numpy(tokens)).numpy()

    examples = examples_of({"a": 30, "z": 30})
    whole = KMeans().shards(examples, 2, 0, hidden)
    pooled = KMeans().shards(examples, 2, 0, lambda tokens: hidden(tokens).mean(axis=1))
    assert all(np.array_equal(a, b) for a, b in zip(whole, pooled, strict=True))
    assert {tuple(np.unique(examples.domain_ids[shard]).tolist()) for shard in whole} != {(0, 1)}


def test_a_sample_decides_the_clusters_and_every_example_is_assigned():
    examples = examples_of({"a": 200, "z": 200})
    shards = KMeans(fit_examples=10).shards(examples, 2, 0, letter_counts)
    assert sum(map(len, shards)) == examples.count
    assert abs(len(shards[0]) - 200) <= 3


def test_more_clusters_than_the_text_has_are_refused():
    with pytest.raises(DataError, match=r"would be empty.*fewer clusters"):
        KMeans().shards(examples_of({"a": 50}), 4, 0, lambda tokens: np.ones((len(tokens), 3)))


def test_kmeans_without_features_or_with_wrong_ones_is_refused():
    examples = examples_of({"a": 20})
    with pytest.raises(ConfigError, match="KMeans needs the features of a model"):
        KMeans().shards(examples, 2, 0)
    with pytest.raises(DataError, match="not finite"):
        KMeans().shards(examples, 2, 0, lambda tokens: np.full((len(tokens), 2), np.nan))
    with pytest.raises(DataError, match="one row"):
        KMeans().shards(examples, 2, 0, lambda tokens: np.ones((1, 2)))
    with pytest.raises(ConfigError, match="fit_examples=2 cannot show 3"):
        KMeans(fit_examples=2).shards(examples, 3, 0, letter_counts)


@pytest.mark.parametrize("field", ["fit_examples", "restarts", "max_iterations", "batch_examples"])
def test_impossible_kmeans_settings_are_refused(field: str):
    with pytest.raises(ConfigError, match=f"{field}=0"):
        KMeans(**{field: 0})


@each_partition
def test_more_shards_than_examples_or_no_shards_are_refused(partition: Partition):
    examples = examples_of({"a": 1, "b": 1})
    with pytest.raises(DataError, match=r"cannot fill 9 shards"):
        partition.shards(examples, 9, 0, letter_counts)
    with pytest.raises(ConfigError, match="num_shards=0"):
        partition.shards(examples, 0, 0, letter_counts)


def test_settings_of_another_type_are_refused():
    with pytest.raises(ConfigError, match=r"alpha='0.3' is text, not a number"):
        Dirichlet(alpha="0.3")
    with pytest.raises(ConfigError, match=r"restarts=2.5 is not a whole number"):
        KMeans(restarts=2.5)
