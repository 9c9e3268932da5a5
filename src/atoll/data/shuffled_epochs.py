"""Shards of examples in shuffled epochs, read by position, and the keyed random numbers that shuffle them.

A shard is an endless sequence of epochs. Each epoch is a permutation of the shard's examples, which depends on the seed, on the
examples of the shard and on the number of the epoch. Batch p is the examples from p * `batch_size` on; it continues into the next
epoch where one ends. The same shard and position give the same examples to every reader. Several threads may read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError, DataError
from atoll.core.layout import shard_range

Indices = NDArray[np.int64]
ExamplesT = TypeVar("ExamplesT")
TrainT = TypeVar("TrainT")
ValidationT = TypeVar("ValidationT")
_EPOCHS_PER_BATCH = 16  # a small shard repeats within a batch; a batch of many times the data is a mistake
_CACHED_EPOCHS = 3  # per shard: readers of one shard are seldom further apart


def keyed_random(*key: str | int) -> np.random.RandomState:
    """A generator for this key, with the same numbers on every machine and in every version of numpy.

    >>> keyed_random("shuffle", 7).permutation(5).tolist()
    [1, 3, 0, 2, 4]
    """
    number = int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
    # RandomState and not Generator: numpy has frozen its streams, while a Generator's may change with a release.
    return np.random.RandomState(np.random.PCG64(number))


class OpenedData(NamedTuple, Generic[TrainT, ValidationT]):
    """Training batches by shard and position, and fixed examples to evaluate on."""

    train: TrainT
    validation: ValidationT


class ShuffledShards(Generic[ExamplesT]):
    """The order of examples in each shard. Subclasses read batches of these examples.

    Args:
        examples: what batches are read from, by index.
        shards: the indices of each shard's examples.
        batch_size: examples per batch.
        seed: of the permutations.
        skip_batches: batches of each shard that were read before. Position 0 comes after them.
    """

    def __init__(
        self, examples: ExamplesT, shards: Sequence[NDArray[Any]], *, batch_size: int, seed: int, skip_batches: int = 0
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: a batch needs at least 1 example.")
        if batch_size > _EPOCHS_PER_BATCH * (available := sum(map(len, shards))):
            raise DataError(
                f"batch_size={batch_size}: the data have {available} examples, and a batch holds each of them at most "
                f"{_EPOCHS_PER_BATCH} times. Use batch_size={available} or less, or more data."
            )
        self.batch_size = batch_size
        self._shard_digests = [blake2b(shard.astype("<i8").tobytes(), digest_size=16).hexdigest() for shard in shards]
        self._examples, self._shards = examples, list(shards)
        self._seed, self._skip_batches = seed, skip_batches
        self._orders: list[dict[int, NDArray[Any]]] = [{} for _ in shards]
        self._lock = Lock()

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def examples(self, shard: int) -> int:
        """How many examples the shard holds."""
        if not 0 <= shard < self.num_shards:
            raise ConfigError(f"shard={shard}: there are {self.num_shards} shards, counted from 0.")
        return len(self._shards[shard])

    def indices(self, shard: int, position: int) -> NDArray[Any]:
        """The indices of the examples in a batch."""
        size = self.examples(shard)
        if position < 0:
            raise ConfigError(f"position={position}: positions are counted from 0.")
        epoch, at = divmod((self._skip_batches + position) * self.batch_size, size)
        parts = [self._order(shard, epoch)[at : at + self.batch_size]]
        left = self.batch_size - len(parts[0])
        while left > 0:  # a batch that crosses the end of one epoch, or of several if the shard is small
            epoch += 1
            parts.append(self._order(shard, epoch)[:left])
            left -= len(parts[-1])
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _order(self, shard: int, epoch: int) -> NDArray[Any]:
        orders = self._orders[shard]
        with self._lock:
            order = orders.get(epoch)
        if order is None:
            # Outside the lock, so that other readers do not wait. Two that compute the same order get the same.
            indices = self._shards[shard]
            order = indices[keyed_random("order", self._seed, self._shard_digests[shard], epoch).permutation(len(indices))]
            with self._lock:
                orders[epoch] = order
                while len(orders) > _CACHED_EPOCHS:
                    del orders[next(iter(orders))]
        return order

    def _fingerprint(self, *content: bytes) -> str:
        """A digest of the content, of the examples in each shard, and of the position where reading starts."""
        skipped = f"after {self._skip_batches}" if self._skip_batches else ""
        shards = "".join([*self._shard_digests, skipped]).encode()
        return blake2b(b"".join([*content, shards]), digest_size=16).hexdigest()


def random_shards(num_examples: int, num_shards: int, seed: int) -> list[Indices]:
    """The indices of each shard's examples, drawn at random; sizes differ by at most one."""
    if not 1 <= num_shards <= num_examples:
        raise ConfigError(
            f"{num_shards} shards of {num_examples} examples: there is at least 1 shard, and each has at least 1 example. "
            f"Use fewer shards, or more examples."
        )
    order = keyed_random("shards", seed).permutation(num_examples)
    return [order[slice(*shard_range(num_examples, shard, num_shards))] for shard in range(num_shards)]


def check_shards_setting(shards: int | None) -> None:
    if shards is not None and shards < 1:
        raise ConfigError(f"shards={shards}: there is at least 1 shard. Use a positive number, or none for one per island.")
