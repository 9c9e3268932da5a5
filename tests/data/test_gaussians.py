"""The toy's points are made as its authors describe them, and batches by position are the same for every reader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.protocols import Batches
from atoll.data.gaussians import GaussianBatches, Gaussians

LITTLE = Gaussians(dimensions=16, classes=3, clusters_per_class=2, examples=603, eval_examples=50)
"""Six clusters of 100 points; three are left out."""


@pytest.fixture(scope="module")
def little():
    return LITTLE.load()


@pytest.fixture(scope="module")
def small():
    return Gaussians.small().load()


def numbered(count: int, num_shards: int = 1, batch_size: int = 4, seed: int = 0) -> GaussianBatches:
    """Batches in which every label is the number of its point."""
    shards = np.array_split(np.arange(count), num_shards)
    return GaussianBatches((torch.zeros(count, 1), torch.arange(count)), shards, batch_size=batch_size, seed=seed)


def read(batches: Batches, shard: int, positions: range) -> list[int]:
    return [number for position in positions for number in batches.batch(shard, position)[1].tolist()]


# ------------------------------------------------------------------------------------------------------------------- points


def test_by_default_it_is_the_authors_toy():
    toy = Gaussians()
    assert (toy.dimensions, toy.classes, toy.clusters_per_class, toy.examples) == (512, 4, 8, 128_000)
    assert (toy.noise, toy.eval_examples, toy.shards, toy.seed) == (0.5, 10_000, None, 42)
    assert (toy.clusters, toy.count, toy.count // toy.clusters) == (32, 128_000, 4000)


def test_the_small_variant_has_one_cluster_per_class_and_is_evaluated_on_all_of_it(small):
    assert (small.inputs.shape, small.inputs.dtype) == ((4096, 512), torch.float32)
    assert (small.labels.shape, small.labels.dtype) == ((4096,), torch.int64)
    assert small.centres.shape == (4, 512)
    inputs, labels = small.open(4, 32, 0).validation
    assert torch.equal(inputs, small.inputs)
    assert torch.equal(labels, small.labels)


def test_centres_have_length_one(little):
    assert little.centres.norm(dim=1).numpy() == pytest.approx(1.0, rel=1e-12)


def test_points_lie_around_their_centres_with_the_given_noise(small):
    around = (small.inputs - small.centres.repeat_interleave(1024, dim=0)).double()
    assert float(around.std()) == pytest.approx(0.5, rel=0.01)
    assert float(around.mean()) == pytest.approx(0.0, abs=0.01)
    means = small.inputs.double().reshape(4, 1024, 512).mean(dim=1)
    assert float((means - small.centres).abs().max()) < 6 * 0.5 / 1024**0.5


def test_without_noise_points_are_their_centres():
    still = replace(LITTLE, noise=0.0).load()
    assert torch.equal(still.inputs, still.centres.repeat_interleave(100, dim=0).float())


def test_clusters_lie_together_and_in_the_order_of_their_classes(little):
    assert little.labels.tolist() == [0] * 200 + [1] * 200 + [2] * 200


def test_the_same_seed_makes_the_same_points_and_another_seed_others(little):
    assert torch.equal(LITTLE.load().inputs, little.inputs)
    assert not torch.equal(replace(LITTLE, seed=1).load().inputs, little.inputs)


# ------------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_shards_are_contiguous_slices_of_one_shuffle_of_all_points(num_shards):
    """Points of one dimension, no two equal, so that a batch as large as its shard shows which points the shard holds."""
    loaded = Gaussians(dimensions=1, classes=2, clusters_per_class=1, examples=200).load()
    train = loaded.open(num_shards, 1, 0).train
    sizes = [train.examples(shard) for shard in range(num_shards)]
    assert sum(sizes) == 200
    assert max(sizes) - min(sizes) <= 1

    def held(shards: int) -> list[set[float]]:
        opened = loaded.open(shards, 1, 0).train
        return [{float(opened.batch(s, p)[0]) for p in range(opened.examples(s))} for s in range(shards)]

    assert set.union(*held(num_shards)) == set(loaded.inputs.flatten().tolist())
    assert sum(map(len, held(num_shards))) == 200, "no point is in two shards"
    if num_shards == 4:  # one shuffle, whatever the number of shards: two neighbouring quarters are a half
        quarters, halves = held(4), held(2)
        assert [quarters[0] | quarters[1], quarters[2] | quarters[3]] == halves


def test_every_shard_is_a_sample_of_the_whole(small):
    train = small.open(4, 1024, 0).train
    for shard in range(4):
        counts = torch.bincount(train.batch(shard, 0)[1], minlength=4)
        assert counts.sum() == 1024
        assert all(abs(int(count) - 256) < 6 * 14 for count in counts), "14 is the standard deviation of such a count"


def test_a_model_is_evaluated_on_different_points_of_the_training_set(little):
    data = little.open(2, 8, 0)
    inputs, labels = data.validation
    assert inputs.shape == (50, 16)
    known = {row.numpy().tobytes(): int(label) for row, label in zip(little.inputs, little.labels, strict=True)}
    chosen = {row.numpy().tobytes(): int(label) for row, label in zip(inputs, labels, strict=True)}
    assert len(chosen) == 50
    assert chosen.items() <= known.items()
    assert torch.equal(little.open(3, 4, seed=9).validation[0], inputs), "neither shards nor the run's seed choose others"


# ------------------------------------------------------------------------------------------------------------------ batches


def test_it_implements_the_batches_protocol(little):
    batches: Batches = little.open(4, 8, 0).train
    assert (batches.num_shards, batches.examples(0)) == (4, 150)
    inputs, labels = batches.batch(3, 17)
    assert (inputs.shape, labels.shape) == ((8, 16), (8,))
    assert batches.tokens((inputs, labels)) == 8


def test_an_input_comes_with_its_own_label(little):
    batches = little.open(2, 8, 0).train
    labels = {row.numpy().tobytes(): int(label) for row, label in zip(little.inputs, little.labels, strict=True)}
    for position in range(10):
        for row, label in zip(*batches.batch(1, position), strict=True):
            assert labels[row.numpy().tobytes()] == int(label)


def test_the_runs_seed_orders_a_shard_and_does_not_fill_it(little):
    def rows(seed: int) -> list[bytes]:
        train = little.open(4, 150, seed).train
        return [row.numpy().tobytes() for row in train.batch(2, 0)[0]]

    assert rows(0) != rows(1)
    assert set(rows(0)) == set(rows(1))


def test_a_batch_is_a_copy(little):
    batches = little.open(2, 8, 0).train
    before: Tensor = batches.batch(0, 0)[0].clone()
    batches.batch(0, 0)[0].zero_()
    assert torch.equal(batches.batch(0, 0)[0], before)


def test_the_fingerprint_depends_on_points_shards_batches_and_order(little):
    mine = little.open(2, 8, 0).train.fingerprint()
    assert LITTLE.load().open(2, 8, 0).train.fingerprint() == mine
    others = [
        little.open(3, 8, 0),
        little.open(2, 4, 0),
        little.open(2, 8, 1),
        replace(LITTLE, seed=7).load().open(2, 8, 0),
        replace(LITTLE, noise=0.4).load().open(2, 8, 0),
    ]
    assert len({mine, *(other.train.fingerprint() for other in others)}) == 6


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dimensions": 0}, r"dimensions=0: at least 1"),
        ({"classes": -1}, r"classes=-1: at least 1"),
        ({"clusters_per_class": 0}, r"clusters_per_class=0"),
        ({"eval_examples": 0}, r"eval_examples=0"),
        ({"examples": 31}, r"examples=31 is fewer than the 32 clusters.*Raise examples"),
        ({"noise": -0.5}, r"noise=-0.5.*0 or more"),
        ({"noise": float("nan")}, r"noise=nan"),
        ({"shards": 0}, r"shards=0: there is at least 1.*none for one per island"),
        ({"examples": 40, "shards": 33}, r"shards=33.*each of 32 examples"),
        ({"examples": 1.5}, r"examples=1.5 is not a whole number"),
    ],
)
def test_invalid_settings_are_refused_with_advice(settings, message):
    with pytest.raises(ConfigError, match=message):
        Gaussians(**settings)


def test_a_wrong_shard_position_or_size_is_refused(little):
    batches = little.open(2, 8, 0).train
    with pytest.raises(ConfigError, match=r"shard=2: there are 2 shards"):
        batches.batch(2, 0)
    with pytest.raises(ConfigError, match=r"position=-1"):
        batches.batch(0, -1)
    with pytest.raises(ConfigError, match=r"601 shards of 600 examples.*Use fewer shards"):
        little.open(601, 8, 0)
    with pytest.raises(ConfigError, match=r"batch_size=0"):
        little.open(2, 0, 0)
