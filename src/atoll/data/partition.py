"""Partitions of examples into shards. Every example is in exactly one shard.

IID assigns examples at random. The others make shards that differ, as islands' own data would: by domain, by clusters of a model's
features (k-means, as in the DiLoCo paper), or by a Dirichlet draw over domains.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.config.type_checks import check_positive, check_types
from atoll.core.errors import ConfigError, DataError
from atoll.core.optional_imports import require
from atoll.data.shuffled_epochs import Indices, keyed_random
from atoll.data.token_batches import TokenExamples

Features = Callable[[NDArray[np.int64]], NDArray[np.floating[Any]]]
"""Maps tokens (examples, seq_len) to features (examples, width), or (examples, seq_len, width) to be averaged over positions."""
_PREDICT_EXAMPLES = 4096


class _LabelPartition(ABC):
    def shards(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None = None) -> list[Indices]:
        """The indices of each shard's examples, sorted."""
        if num_shards < 1:
            raise ConfigError(f"num_shards={num_shards}: there must be at least 1 shard.")
        if examples.count < num_shards:
            raise DataError(
                f"{examples.count} examples of seq_len={examples.seq_len} cannot fill {num_shards} shards. "
                f"Give more text, lower seq_len, or use at most {examples.count} shards."
            )
        label, advice = self._assign(examples, num_shards, seed, features)
        sizes = np.bincount(label, minlength=num_shards).tolist()
        if 0 in sizes:
            shown = ", ".join(map(str, sizes[:16]))
            raise DataError(f"shard {sizes.index(0)} of {num_shards} would be empty (sizes: {shown}). {advice}")
        return [np.flatnonzero(label == shard) for shard in range(num_shards)]

    @abstractmethod
    def _assign(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None) -> tuple[Indices, str]:
        """The shard of each example, and advice for the error of an empty shard."""


@dataclass(frozen=True, kw_only=True)
class IID(_LabelPartition):
    """Each shard is a random sample of the examples; sizes differ by at most one."""

    def _assign(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None) -> tuple[Indices, str]:
        label = np.empty(examples.count, dtype=np.int64)
        for shard, part in enumerate(np.array_split(keyed_random("iid", seed).permutation(examples.count), num_shards)):
            label[part] = shard
        return label, "Use fewer shards."


@dataclass(frozen=True, kw_only=True)
class ByDomain(_LabelPartition):
    """Assigns whole domains, the largest first, each to the shard that has the fewest examples so far."""

    def _assign(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None) -> tuple[Indices, str]:
        sizes = np.bincount(examples.domain_ids, minlength=len(examples.tokens.domains))
        present = [domain for domain in np.argsort(-sizes, kind="stable") if sizes[domain]]
        if len(present) < num_shards:
            names = ", ".join(examples.tokens.domains[domain] for domain in present)
            raise DataError(
                f"ByDomain: {num_shards} shards cannot be made of {len(present)} domains ({names}), because a domain stays whole. "
                f"Use at most {len(present)} shards, put the text into more sub-folders, or use Dirichlet, which splits domains."
            )
        owner, load = np.zeros(len(sizes), dtype=np.int64), np.zeros(num_shards, dtype=np.int64)
        for domain in present:
            emptiest = int(np.argmin(load))
            owner[domain] = emptiest
            load[emptiest] += sizes[domain]
        return owner[examples.domain_ids], "Use fewer shards."


@dataclass(frozen=True, kw_only=True)
class Dirichlet(_LabelPartition):
    """Splits each domain over the shards in proportions drawn from a Dirichlet distribution.

    With alpha = 100 shards are nearly IID; with alpha = 0.1 one or two shards get most of a domain.
    """

    alpha: float

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.alpha < float("inf"):
            raise ConfigError(f"alpha={self.alpha} must be above 0 and finite: 0.1 makes shards very different, 100 nearly equal.")

    def _assign(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None) -> tuple[Indices, str]:
        random = keyed_random("dirichlet", seed)
        label = np.zeros(examples.count, dtype=np.int64)
        for domain in range(len(examples.tokens.domains)):
            indices = random.permutation(np.flatnonzero(examples.domain_ids == domain))
            shares = random.dirichlet(np.full(num_shards, self.alpha))
            # Tiny alphas round to 0/0: then one shard gets the whole domain.
            shares = shares if np.isfinite(shares).all() else np.eye(num_shards)[random.randint(num_shards)]
            cuts = np.rint(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
            for shard, part in enumerate(np.split(indices, cuts)):
                label[part] = shard
        return label, f"Raise alpha (now {self.alpha:g}), use fewer shards, or use another seed."


@dataclass(frozen=True, kw_only=True)
class KMeans(_LabelPartition):
    """One shard for each k-means cluster of a model's features (DiLoCo, section 3.1). Shards may differ much in size.

    Features are averaged over an example's positions. k-means is fitted on a sample; each example goes to the nearest centre.

    Args:
        fit_examples: size of the evenly spaced sample.
        restarts: fits from different initial centres, of which the best is kept.
        max_iterations: of each fit.
        batch_examples: examples given to the model at once.
    """

    fit_examples: int = 20_000
    restarts: int = 4
    max_iterations: int = 100
    batch_examples: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "fit_examples", "restarts", "max_iterations", "batch_examples", path="KMeans ")

    def libraries(self) -> tuple[Any, Any]:
        """sklearn.cluster and threadpoolctl, or a ConfigError that says how to install them."""
        return tuple(require(name, extra="noniid", purpose="KMeans partitions") for name in ("sklearn.cluster", "threadpoolctl"))

    def _assign(self, examples: TokenExamples, num_shards: int, seed: int, features: Features | None) -> tuple[Indices, str]:
        if features is None:
            raise ConfigError(
                "KMeans needs the features of a model, and none were given. Give `features`, or use another partition."
            )
        if self.fit_examples < num_shards:
            raise ConfigError(
                f"KMeans fit_examples={self.fit_examples} cannot show {num_shards} clusters. Raise it to {num_shards} or more."
            )
        cluster, threads = self.libraries()
        clustering = cluster.KMeans(
            num_shards,
            n_init=self.restarts,
            max_iter=self.max_iterations,
            random_state=keyed_random("kmeans", seed).randint(1 << 31),
        )
        sample = np.unique(np.linspace(0, examples.count - 1, min(self.fit_examples, examples.count)).astype(np.int64))
        # One thread: with several, the order of sums varies from run to run. Sklearn warns of too few clusters; `shards` raises.
        with threads.threadpool_limits(limits=1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clustering.fit(self._features(examples, sample, features))
            label = np.empty(examples.count, dtype=np.int64)
            for start in range(0, examples.count, _PREDICT_EXAMPLES):
                part = np.arange(start, min(start + _PREDICT_EXAMPLES, examples.count))
                label[part] = clustering.predict(self._features(examples, part, features))
        return label, "The text has fewer clusters than that: use fewer shards, or another partition."

    def _features(self, examples: TokenExamples, indices: Indices, features: Features) -> NDArray[np.float64]:
        parts = []
        for start in range(0, len(indices), self.batch_examples):
            rows = np.asarray(features(examples.read(indices[start : start + self.batch_examples])[:, :-1]), dtype=np.float64)
            parts.append(rows.mean(axis=1) if rows.ndim == 3 else rows)
        joined = np.concatenate(parts)
        if joined.shape[0] != len(indices) or joined.ndim != 2 or not np.isfinite(joined).all():
            raise DataError(
                f"KMeans: the features of {len(indices)} examples have shape {joined.shape} or are not finite. "
                f"Give one row of finite numbers for each example."
            )
        return joined


Partition = IID | ByDomain | KMeans | Dirichlet
