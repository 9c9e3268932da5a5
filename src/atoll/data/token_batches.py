"""Batches of token windows: for training by shard and position, for validation in a fixed list.

Example i is the `seq_len` + 1 tokens from i * `seq_len` on, so each token but the first is predicted exactly once. The domain of an
example is that of the document at its first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
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
_MEMORY_FRACTION = 8
"""Tokens are uploaded if they take at most one 8th of a device's free memory."""


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

    @cached_property
    def domain_ids(self) -> NDArray[np.int32]:
        """The domain of each example, as an index into `tokens.domains`."""
        return self.tokens.domains_at(np.arange(self.count, dtype=np.int64) * self.seq_len)


class DeviceExamples:
    """Gathers batches on a device, many steps at a time.

    Copying each batch from host memory would make the host wait for the device at every step. So the tokens are uploaded once and
    only the indices of examples travel. If the tokens do not fit, examples are read on the host instead.
    """

    def __init__(self, examples: TokenExamples, device: str) -> None:
        self._examples, self._device = examples, torch.device(device)
        self._rows = self._upload() if self._fits() else None

    def _fits(self) -> bool:
        if self._device.type != "cuda" or self._examples.tokens.is_uploaded(str(self._device)):
            return True
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        free_bytes += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)  # torch's own reserve
        return len(self._examples.tokens) * 4 <= free_bytes // _MEMORY_FRACTION

    def _upload(self) -> Tensor:
        """All examples as overlapping rows."""
        length = self._examples.seq_len
        return self._examples.tokens.upload(str(self._device)).as_strided((self._examples.count, length + 1), (length, 1))

    def batches(self, batch_indices: Iterator[NDArray[Any]]) -> Iterator[Tensor]:
        row_bytes = 8 * (self._examples.seq_len + 1)
        pending: list[NDArray[Any]] = []
        for indices in batch_indices:
            pending.append(indices)
            if sum(map(len, pending)) * row_bytes >= _GATHER_BYTES:
                yield from self._gather(pending)
                pending = []
        if pending:
            yield from self._gather(pending)

    def _gather(self, batches: Sequence[NDArray[Any]]) -> Iterator[Tensor]:
        indices = np.concatenate(batches)
        if self._rows is None:
            rows = self._move(torch.from_numpy(self._examples.read(indices)))
        else:
            rows = self._rows.index_select(0, self._move(torch.from_numpy(indices.astype(np.int64)))).long()
        yield from torch.split(rows, [len(batch) for batch in batches])

    def _move(self, tensor: Tensor) -> Tensor:
        """Through pinned memory, so that the host does not wait for the copy."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


class TokenBatches(ShuffledShards):
    """Batches of tokens from shards of examples; implements `atoll.core.protocols.Batches` and `ReadsAhead`."""

    def __init__(
        self, examples: TokenExamples, shards: Sequence[Indices], *, batch_size: int, seed: int, skip_batches: int = 0
    ) -> None:
        # uint32 takes half the memory. Sorted, so that the order of a shard does not depend on how the partition listed it.
        dtype = np.uint32 if examples.count <= 1 << 32 else np.int64
        sorted_shards = [np.sort(shard).astype(dtype) for shard in shards]
        super().__init__(sorted_shards, batch_size=batch_size, seed=seed, skip_batches=skip_batches)
        self.seq_len, self._examples = examples.seq_len, examples
        self._on_device: dict[str, DeviceExamples] = {}
        self._upload_lock = Lock()

    def fingerprint(self) -> str:
        """A digest of a sample of the tokens, the shards and their order: equal for readers of the same batches."""
        ids = self._examples.tokens.ids
        sample = np.asarray(ids[:: max(1, len(ids) // _FINGERPRINT_TOKENS)], dtype="<i8")
        return self._fingerprint(f"{len(ids)}/{self.seq_len}/{self.batch_size}/{self._seed}".encode(), sample.tobytes())

    def batch(self, shard: int, position: int) -> Tensor:
        """Tokens (batch_size, seq_len + 1), int64."""
        return torch.from_numpy(self._examples.read(self.indices(shard, position)))

    def ahead(self, shard: int, start: int, count: int, device: str) -> Iterator[Tensor]:
        """Consecutive batches on a device, to which the tokens are uploaded once."""
        with self._upload_lock:
            if device not in self._on_device:
                self._on_device[device] = DeviceExamples(self._examples, device)
        return self._on_device[device].batches(self.indices(shard, position) for position in range(start, start + count))

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
