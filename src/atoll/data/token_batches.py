"""Batches of token windows: for training by shard and position, for validation in a fixed list.

Example i is the `seq_len` + 1 tokens from i * `seq_len` on, so each token but the first is predicted exactly once. The domain of an
example is that of the document at its first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.errors import DataError
from atoll.data.shuffled_epochs import Indices, ShuffledShards
from atoll.data.token_store import Tokens

_FINGERPRINT_TOKENS = 1 << 16
_GATHER_BYTES = 64 << 20
"""Batches that are gathered on a device at once."""


class TokenExamples:
    """The examples of some tokens, by index. Raises DataError if there are too few tokens for one example."""

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            raise DataError(
                f"the training text has {len(tokens)} tokens, fewer than one example of seq_len + 1 = {seq_len + 1}. "
                f"Give more text, or lower seq_len{f' to at most {len(tokens) - 1}' if len(tokens) > 1 else ''}."
            )
        self.tokens, self.seq_len, self.count = tokens, seq_len, count
        item_bytes = tokens.ids.strides[0]
        shape, strides = (count, seq_len + 1), (seq_len * item_bytes, item_bytes)
        # All examples as overlapping rows of one array, without a copy: a row begins at the last token of the row before.
        self._rows = as_strided(tokens.ids, shape=shape, strides=strides, writeable=False)

    def read(self, indices: NDArray[Any]) -> NDArray[np.int64]:
        """A copy of these examples, one per row."""
        rows: NDArray[np.int64] = self._rows[indices].astype(np.int64)
        return rows

    def read_on(self, device: str, indices: NDArray[Any]) -> Tensor:
        """These examples on a device. Only their indices are copied there, unless the tokens do not fit on it."""
        ids = self.tokens.on_device(device)
        if ids is None:
            return _copy_to(device, self.read(indices))
        rows = ids.as_strided((self.count, self.seq_len + 1), (self.seq_len, 1))
        return rows.index_select(0, _copy_to(device, indices.astype(np.int64))).long()

    @cached_property
    def domain_ids(self) -> NDArray[np.int32]:
        """The domain of each example, as an index into `tokens.domains`."""
        return self.tokens.domains_at(np.arange(self.count, dtype=np.int64) * self.seq_len)


def _copy_to(device: str, numbers: NDArray[np.int64]) -> Tensor:
    """Through pinned memory, so that the host does not wait for the copy."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


class TokenBatches(ShuffledShards[TokenExamples]):
    """Batches of tokens from shards of examples; implements `atoll.core.protocols.Batches` and `ReadsAhead`."""

    def __init__(
        self, examples: TokenExamples, shards: Sequence[Indices], *, batch_size: int, seed: int, skip_batches: int = 0
    ) -> None:
        # uint32 takes half the memory. Sorted, so that the order of a shard does not depend on how the partition listed it.
        dtype = np.uint32 if examples.count <= 1 << 32 else np.int64
        sorted_shards = [np.sort(shard).astype(dtype) for shard in shards]
        super().__init__(examples, sorted_shards, batch_size=batch_size, seed=seed, skip_batches=skip_batches)
        self.seq_len = examples.seq_len

    def fingerprint(self) -> str:
        """A digest of a sample of the tokens, the shards and their order: equal for readers of the same batches."""
        ids = self._examples.tokens.ids
        sample = np.asarray(ids[:: max(1, len(ids) // _FINGERPRINT_TOKENS)], dtype="<i8")
        return self._fingerprint(f"{len(ids)}/{self.seq_len}/{self.batch_size}/{self._seed}".encode(), sample.tobytes())

    def batch(self, shard: int, position: int) -> Tensor:
        """Tokens (batch_size, seq_len + 1), int64."""
        return torch.from_numpy(self._examples.read(self.indices(shard, position)))

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Tensor]:
        """Consecutive batches on a device. Many are gathered at once: a copy of each batch from the host's memory would make the
        host wait for the device at every step."""
        gathered = math.ceil(_GATHER_BYTES / (8 * self.batch_size * (self.seq_len + 1)))
        for first in range(start, start + count, gathered):
            positions = range(first, min(first + gathered, start + count))
            indices = np.concatenate([self.indices(shard, position) for position in positions])
            yield from torch.split(self._examples.read_on(device, indices), self.batch_size)

    def tokens(self, batch: Tensor) -> int:
        """How many tokens of the batch are predicted."""
        return batch.shape[0] * (batch.shape[1] - 1)


def validation_batches(tokens: Tokens, *, seq_len: int, batch_size: int, count: int) -> list[Tensor]:
    """At most `count` batches of windows (batch_size, seq_len + 1) that do not overlap, spread evenly over the text in its order.

    All batches are full, unless the text has fewer windows than one batch needs: then there is one smaller batch.
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
