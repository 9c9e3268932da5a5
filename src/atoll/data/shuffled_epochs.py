"""Shards without an end: which examples are in a batch, by position.

A shard is an endless sequence of epochs, each a permutation of its examples that depends on the seed, on which examples these are
and on the epoch. Batch p is the examples from p * `batch_size` on, and goes on into the next epoch where one ends. There is no
cursor: the same shard and position give the same examples to anybody. Any number of threads may ask at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.data.keyed_random import draws

_EPOCHS_KEPT = 3  # per shard: readers of one shard are seldom further apart


class Epochs:
    """The order of examples in each shard.

    Args:
        shards: the examples of each, by number.
        batch_size: examples per batch.
        seed: of the orders.
        begin: batches of each shard that somebody has read before: the first one comes after them.
    """

    def __init__(self, shards: Sequence[NDArray[Any]], *, batch_size: int, seed: int, begin: int = 0) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: a batch needs at least 1 example.")
        self._names = [blake2b(shard.astype("<i8").tobytes(), digest_size=16).hexdigest() for shard in shards]
        """Of each shard, by what is in it."""
        self._shards = list(shards)
        self._batch_size, self._seed, self._begin = batch_size, seed, begin
        self._orders: list[dict[int, NDArray[Any]]] = [{} for _ in shards]
        self._lock = Lock()

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def identity(self) -> bytes:
        """Of what is in each shard, and where reading begins if that is not the beginning: for fingerprints."""
        return "".join([*self._names, f"after {self._begin}" if self._begin else ""]).encode()

    def examples(self, shard: int) -> int:
        """How many the shard holds."""
        if not 0 <= shard < self.num_shards:
            raise ConfigError(f"shard={shard}: there are {self.num_shards} shards, counted from 0.")
        return len(self._shards[shard])

    def batch(self, shard: int, position: int) -> NDArray[Any]:
        """The numbers of the examples in a batch."""
        size = self.examples(shard)
        if position < 0:
            raise ConfigError(f"position={position}: positions are counted from 0.")
        epoch, at = divmod((self._begin + position) * self._batch_size, size)
        chosen = self._order(shard, epoch)[at : at + self._batch_size]
        while len(chosen) < self._batch_size:  # the batch goes on into the next epoch, or several if the shard is that small
            epoch += 1
            chosen = np.concatenate((chosen, self._order(shard, epoch)[: self._batch_size - len(chosen)]))
        return chosen

    def _order(self, shard: int, epoch: int) -> NDArray[Any]:
        """The shard's examples in the order of this epoch."""
        kept = self._orders[shard]
        with self._lock:
            order = kept.get(epoch)
        if order is None:
            # Outside the lock: other readers go on, and two that compute the same order get the same.
            mine = self._shards[shard]
            order = mine[draws("order", self._seed, self._names[shard], epoch).permutation(len(mine))]
            with self._lock:
                kept[epoch] = order
                while len(kept) > _EPOCHS_KEPT:
                    del kept[next(iter(kept))]
        return order
