"""Batches by position: nothing here moves, so that anybody may read anything in any order.

A shard is an endless sequence of epochs, each a permutation of the shard's examples. A permutation depends on the seed, on which
examples the shard holds, and on the epoch: not on who reads, how many read, or what else there is. Batch p is the examples
from p * `batch_size` on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.data.device_tokens import Uploaded
from atoll.data.examples import Examples, Indices
from atoll.data.shuffled_epochs import Epochs
from atoll.data.tokens import Tokens

_SAMPLE_TOKENS = 1 << 16


class TokenBatches:
    """Batches of tokens from shards of examples; implements `atoll.core.protocols.Batches`. Any number of threads may read at once.

    Args:
        examples: what the shards' numbers mean.
        shards: for each shard its examples.
        batch_size: examples per batch.
        seed: of the order.
        begin: batches of each shard that were read before.
    """

    def __init__(self, examples: Examples, shards: Sequence[Indices], *, batch_size: int, seed: int, begin: int = 0) -> None:
        self.batch_size, self.seq_len = batch_size, examples.seq_len
        self._examples, self._seed = examples, seed
        # Half the memory, where that is enough; sorted, so that the order does not depend on how the partition listed them.
        dtype = np.uint32 if examples.count <= 1 << 32 else np.int64
        self._epochs = Epochs([np.sort(shard).astype(dtype) for shard in shards], batch_size=batch_size, seed=seed, begin=begin)
        self._uploaded: dict[str, Uploaded] = {}
        self._uploading = Lock()

    @property
    def num_shards(self) -> int:
        return self._epochs.num_shards

    def examples(self, shard: int) -> int:
        """How many examples the shard holds."""
        return self._epochs.examples(shard)

    def fingerprint(self) -> str:
        """Of the text, by sample, and of which examples each shard holds: whether two readers read the same."""
        ids = self._examples.tokens.ids
        sample = np.asarray(ids[:: max(1, len(ids) // _SAMPLE_TOKENS)], dtype="<i8")
        parts = [
            f"{len(ids)}/{self.seq_len}/{self.batch_size}/{self._seed}".encode(),
            sample.tobytes(),
            self._epochs.identity,
        ]
        return blake2b(b"".join(parts), digest_size=16).hexdigest()

    def batch(self, shard: int, position: int) -> Tensor:
        """Tokens (batch_size, seq_len + 1), int64."""
        return torch.from_numpy(self._examples.read(self._epochs.batch(shard, position)))

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Tensor]:
        """Consecutive batches, on a device that the tokens are uploaded to once."""
        with self._uploading:
            if device not in self._uploaded:
                self._uploaded[device] = Uploaded(self._examples, device)
        return self._uploaded[device].batches(self._epochs.batch(shard, position) for position in range(start, start + count))

    def tokens(self, batch: Tensor) -> int:
        """How many tokens of the batch are predicted."""
        return batch.shape[0] * (batch.shape[1] - 1)


def validation_batches(tokens: Tokens, *, seq_len: int, batch_size: int, count: int) -> list[Tensor]:
    """At most `count` fixed batches of windows (batch_size, seq_len + 1) that do not overlap, in the order of the text.

    The windows are spread evenly over the whole, so that a few batches show all of it. Batches are full; only where there are fewer
    windows than one batch needs, there is one smaller batch.

    Raises:
        DataError: there are too few tokens for one window.
    """
    length = seq_len + 1
    available = len(tokens) // length
    if available < 1:
        raise DataError(
            f"the validation text has {len(tokens)} tokens, fewer than one window of seq_len + 1 = {length}. "
            f"Hold out more (validation_fraction), give more text, or lower seq_len."
        )
    size = min(batch_size, available)
    wanted = min(count, available // size) * size
    windows = tokens.ids[: available * length].reshape(available, length)
    rows = windows[np.arange(wanted) * available // wanted].astype(np.int64)
    return list(torch.split(torch.from_numpy(rows), size))
