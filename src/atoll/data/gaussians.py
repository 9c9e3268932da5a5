"""Gaussians: a synthetic classification problem, the toy of the asynchronous Local-SGD paper's authors.

It is a mixture of mixtures of Gaussians. Each class has several clusters; each cluster has a centre of length 1 and the same number
of points. Points lie in the order of their clusters, clusters in the order of their classes. Shards are random samples of all
points. A model is evaluated on points that it also trains on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.core.config.type_checks import LayerSize, WideInt, check_positive, check_types
from atoll.core.errors import ConfigError
from atoll.data.shuffled_epochs import Indices, OpenedData, ShuffledShards, keyed_random, random_shards

LabelledBatch = tuple[Tensor, Tensor]
"""Inputs (batch_size, dimensions), float32, and labels (batch_size,), int64."""

_FINGERPRINT_ROWS = 128
_MAX_NOISE = 1e6  # centres have a length of 1


@dataclass(frozen=True, kw_only=True)
class Gaussians:
    """The points and the number of shards.

    Args:
        dimensions: of a point.
        classes: number of labels.
        clusters_per_class: Gaussians in a class.
        examples: points in all; a remainder that clusters cannot share evenly is left out.
        noise: standard deviation around a centre, in every dimension.
        eval_examples: training points to evaluate on, drawn at random; all of them if there are no more.
        shards: number of shards; none: one per island.
        seed: of the points, the shards and the evaluation points. The order within a shard has the Run's seed.
    """

    dimensions: LayerSize = 512
    classes: LayerSize = 4
    clusters_per_class: int = 8
    examples: int = 128_000
    noise: float = 0.5
    eval_examples: int = 10_000
    shards: int | None = None
    seed: WideInt = 42

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "dimensions", "classes", "clusters_per_class", "eval_examples")
        if self.examples < self.clusters:
            raise ConfigError(
                f"examples={self.examples} is fewer than the {self.clusters} clusters ({self.classes} classes of "
                f"{self.clusters_per_class}): each has at least 1 point. Raise examples, or lower clusters_per_class."
            )
        if not 0 <= self.noise <= _MAX_NOISE:
            raise ConfigError(
                f"noise={self.noise}: a standard deviation is 0 or more, and at most {_MAX_NOISE:g}. Use 0 for the centres alone."
            )
        if self.shards is not None and not 1 <= self.shards <= self.count:
            raise ConfigError(
                f"shards={self.shards}: there is at least 1 shard, and at most one for each of {self.count} examples. "
                f"Use none for one per island."
            )

    @property
    def clusters(self) -> int:
        """Clusters of all classes together."""
        return self.classes * self.clusters_per_class

    @property
    def count(self) -> int:
        """Number of points: `examples` without the remainder that clusters cannot share evenly."""
        return self.examples // self.clusters * self.clusters

    @staticmethod
    def small() -> Gaussians:
        """The authors' small variant: 4,096 points, one cluster per class, all of them for evaluation."""
        return Gaussians(examples=4096, clusters_per_class=1, eval_examples=4096)

    def load(self) -> LoadedGaussians:
        """Generate the points."""
        each = self.count // self.clusters
        centres = keyed_random("centres", self.seed).standard_normal((self.clusters, self.dimensions))
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        inputs = np.empty((self.count, self.dimensions), dtype=np.float32)
        for cluster, centre in enumerate(centres):  # one at a time: all clusters in float64 would take twice the memory
            deviations = keyed_random("points", self.seed, cluster).standard_normal((each, self.dimensions))
            inputs[cluster * each : (cluster + 1) * each] = centre + self.noise * deviations
        labels = np.repeat(np.arange(self.classes), self.clusters_per_class * each)
        return LoadedGaussians(
            settings=self,
            centres=torch.from_numpy(centres),
            inputs=torch.from_numpy(inputs),
            labels=torch.from_numpy(labels.astype(np.int64)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedGaussians:
    """All points in memory, cluster by cluster. May be opened several times, with other shards."""

    settings: Gaussians
    centres: Tensor  # (clusters, dimensions), float64
    inputs: Tensor  # (count, dimensions), float32
    labels: Tensor  # (count,), int64

    def open(
        self, num_shards: int, batch_size: int, seed: int, skip_batches: int = 0
    ) -> OpenedData[GaussianBatches, LabelledBatch]:
        """Training batches from `num_shards` shards, and evaluation points. `seed` decides the order within each shard. Each shard
        starts after its first `skip_batches` batches."""
        count, evaluated = len(self.labels), self.settings.eval_examples
        shards = random_shards(count, num_shards, self.settings.seed)
        chosen: Indices = np.arange(count)
        if evaluated < count:
            chosen = keyed_random("evaluation", self.settings.seed).permutation(count)[:evaluated]
        return OpenedData(
            train=GaussianBatches((self.inputs, self.labels), shards, batch_size=batch_size, seed=seed, skip_batches=skip_batches),
            validation=(self.inputs[chosen], self.labels[chosen]),
        )


class GaussianBatches(ShuffledShards[LabelledBatch]):
    """Batches of points from shards; implements `atoll.core.protocols.Batches`."""

    def fingerprint(self) -> str:
        """A digest of a sample of the points, the shards and their order: equal for readers of the same batches."""
        inputs, labels = self._examples
        sample = inputs[:: max(1, len(inputs) // _FINGERPRINT_ROWS)].contiguous()
        what = f"{tuple(inputs.shape)}/{self.batch_size}/{self._seed}".encode()
        return self._fingerprint(what, sample.numpy().tobytes(), labels.numpy().tobytes())

    def batch(self, shard: int, position: int) -> LabelledBatch:
        (inputs, labels), chosen = self._examples, torch.from_numpy(self.indices(shard, position))
        return inputs[chosen], labels[chosen]

    def tokens(self, batch: LabelledBatch) -> int:
        """How many points the batch has."""
        return len(batch[1])
