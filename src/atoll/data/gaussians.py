"""Gaussians: a problem of classification that is made, not read; opened, it gives batches.

The toy of the asynchronous Local-SGD paper's authors, a mixture of mixtures of Gaussians. Each class has several clusters, each
cluster a centre of length 1 and as many points around it as any other. Points lie in the order of their clusters, and clusters in
the order of their classes. All points are shuffled and cut into shards, so that every shard is a sample of the whole. A model is
judged on points that it also trains on.

>>> data = Gaussians.small().open(num_shards=4, batch_size=32, seed=0)
>>> inputs, labels = data.train.batch(shard=3, position=0)
>>> inputs.shape, labels.shape
(torch.Size([32, 512]), torch.Size([32]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.layout import shard_range
from atoll.data.examples import Indices
from atoll.data.keyed_random import draws
from atoll.data.shuffled_epochs import Epochs

LabelledBatch = tuple[Tensor, Tensor]
"""Inputs (batch_size, dimensions), float32, and labels (batch_size,), int64."""

_SAMPLE_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Gaussians:
    """Which points there are, and into how many shards they are cut.

    Args:
        dimensions: of a point.
        classes: to tell apart.
        clusters_per_class: Gaussians that make up a class.
        examples: points in all; the same number for each cluster, so that a remainder is left out.
        noise: standard deviation around a centre, in every dimension. Centres have length 1.
        eval_examples: points, drawn from those that are trained on, to judge a model on; all, if there are no more.
        shards: how many; none: one per island.
        seed: of the points, the shards and the choice of points to judge on. The order within a shard has the Run's seed.
    """

    dimensions: int = 512
    classes: int = 4
    clusters_per_class: int = 8
    examples: int = 128_000
    noise: float = 0.5
    eval_examples: int = 10_000
    shards: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("dimensions", "classes", "clusters_per_class", "eval_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: it is at least 1. Give a positive number.")
        if self.examples < self.clusters:
            raise ConfigError(
                f"examples={self.examples} is fewer than the {self.clusters} clusters ({self.classes} classes of "
                f"{self.clusters_per_class}): each has at least 1 point. Raise examples, or lower clusters_per_class."
            )
        if not 0 <= self.noise < math.inf:
            raise ConfigError(f"noise={self.noise}: a standard deviation is 0 or more, and finite. Use 0 for the centres alone.")
        if self.shards is not None and not 1 <= self.shards <= self.count:
            raise ConfigError(
                f"shards={self.shards}: there is at least 1 shard, and at most one for each of {self.count} examples. "
                f"Use none for one per island."
            )

    @property
    def clusters(self) -> int:
        """Of all classes together."""
        return self.classes * self.clusters_per_class

    @property
    def count(self) -> int:
        """How many points there are: as many as asked for, less the remainder that clusters cannot share evenly."""
        return self.examples // self.clusters * self.clusters

    @staticmethod
    def small() -> Gaussians:
        """The authors' small variant: 4,096 points, one cluster per class, judged on all of them."""
        return Gaussians(examples=4096, clusters_per_class=1, eval_examples=4096)

    def load(self) -> LoadedGaussians:
        """The points, not yet cut into shards."""
        each = self.count // self.clusters
        centres = draws("centres", self.seed).standard_normal((self.clusters, self.dimensions))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        inputs = np.empty((self.count, self.dimensions), dtype=np.float32)
        for cluster, centre in enumerate(centres):  # one at a time: all of them in float64 would take twice the memory
            around = draws("points", self.seed, cluster).standard_normal((each, self.dimensions))
            inputs[cluster * each : (cluster + 1) * each] = centre + self.noise * around
        labels = np.repeat(np.arange(self.classes), self.clusters_per_class * each)
        return LoadedGaussians(
            gaussians=self,
            centres=torch.from_numpy(centres),
            inputs=torch.from_numpy(inputs),
            labels=torch.from_numpy(labels.astype(np.int64)),
        )

    def open(self, num_shards: int, batch_size: int, seed: int) -> GaussianData:
        """Batches to train on, from `num_shards` shards, and points to judge on. `seed` is of the order within each shard."""
        return self.load().open(num_shards, batch_size, seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedGaussians:
    """All points in memory. May be opened several times, with other shards.

    Attributes:
        gaussians: what they were made from.
        centres: (clusters, dimensions), float64.
        inputs: (count, dimensions), float32, cluster by cluster.
        labels: (count,), int64.
    """

    gaussians: Gaussians
    centres: Tensor
    inputs: Tensor
    labels: Tensor

    def open(self, num_shards: int, batch_size: int, seed: int, begin: int = 0) -> GaussianData:
        """See `Gaussians.open`. `begin`: batches of each shard that were read before."""
        spec, count = self.gaussians, len(self.labels)
        if not 1 <= num_shards <= count:
            raise ConfigError(
                f"{num_shards} shards of {count} examples: there is at least 1 shard, and each has at least 1 example. "
                f"Use fewer shards, or more examples."
            )
        order = draws("shards", spec.seed).permutation(count)
        shards = [order[slice(*shard_range(count, shard, num_shards))] for shard in range(num_shards)]
        chosen: Indices = np.arange(count)
        if spec.eval_examples < count:
            chosen = draws("evaluation", spec.seed).permutation(count)[: spec.eval_examples]
        judged = torch.from_numpy(chosen)
        return GaussianData(
            train=GaussianBatches(self.inputs, self.labels, shards, batch_size=batch_size, seed=seed, begin=begin),
            evaluation=(self.inputs[judged], self.labels[judged]),
            dimensions=spec.dimensions,
            classes=spec.classes,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianData:
    """Opened Gaussians: batches by position, and points to judge on."""

    train: GaussianBatches
    evaluation: LabelledBatch
    dimensions: int
    classes: int


class GaussianBatches:
    """Batches of points from shards; implements `atoll.core.protocols.Batches`. Any number of threads may read at once.

    A shard is an endless sequence of epochs, each a permutation of the shard's points that depends on the seed, on which points
    these are and on the epoch. Batch p is the points from p * `batch_size` on.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, shards: Sequence[Indices], *, batch_size: int, seed: int, begin: int = 0
    ) -> None:
        self.batch_size = batch_size
        self._inputs, self._labels, self._seed = inputs, labels, seed
        self._epochs = Epochs(
            [np.asarray(shard, dtype=np.int64) for shard in shards], batch_size=batch_size, seed=seed, begin=begin
        )

    @property
    def num_shards(self) -> int:
        return self._epochs.num_shards

    def examples(self, shard: int) -> int:
        """How many points the shard holds."""
        return self._epochs.examples(shard)

    def fingerprint(self) -> str:
        """Of the points, by sample, of which each shard holds, and of their order: whether two readers read the same."""
        sample = self._inputs[:: max(1, len(self._inputs) // _SAMPLE_ROWS)].contiguous()
        what = f"{tuple(self._inputs.shape)}/{self.batch_size}/{self._seed}"
        parts = [
            what.encode(),
            sample.numpy().tobytes(),
            self._labels.numpy().tobytes(),
            self._epochs.identity,
        ]
        return blake2b(b"".join(parts), digest_size=16).hexdigest()

    def batch(self, shard: int, position: int) -> LabelledBatch:
        """Inputs and labels; the same for the same shard and position, whoever asks and when."""
        chosen = torch.from_numpy(self._epochs.batch(shard, position))
        return self._inputs[chosen], self._labels[chosen]

    def tokens(self, batch: LabelledBatch) -> int:
        """How many points the batch has."""
        return len(batch[1])
