"""Random draws that a key decides, on every machine and in every version of numpy."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def draws(*key: str | int) -> np.random.RandomState:
    """A generator of its own for this key.

    >>> draws("shuffle", 7).permutation(5).tolist()
    [1, 3, 0, 2, 4]
    """
    number = int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")
    # RandomState and not Generator: numpy has frozen its streams, while a Generator's may change with a release.
    return np.random.RandomState(np.random.PCG64(number))
