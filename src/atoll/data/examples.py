"""Examples: windows on the tokens, numbered.

Example i is the `seq_len` + 1 tokens from i * `seq_len` on: each token but the first is predicted exactly once. Its domain is that
of the document at its first token.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from atoll.core.errors import DataError
from atoll.data.tokens import Tokens

Indices = NDArray[np.int64]


class Examples:
    """The examples of some tokens.

    Raises:
        DataError: there are too few tokens for one example.
    """

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
        # All examples as rows of one array that copies nothing: a row begins at the last token of the row before.
        self._rows = as_strided(tokens.ids, shape=shape, strides=strides, writeable=False)

    def read(self, indices: NDArray[Any]) -> NDArray[np.int64]:
        """These examples as rows of int64."""
        rows: NDArray[np.int64] = self._rows[indices].astype(np.int64)
        return rows

    @cached_property
    def domain_ids(self) -> NDArray[np.int32]:
        """The domain of each example, as a place in `tokens.domains`."""
        return self.tokens.domains_at(np.arange(self.count, dtype=np.int64) * self.seq_len)
