"""Which state of the run an island holds: a version that orders committed states, and a digest of the state's bits."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.nested_trees import trees
from atoll.core.optional_imports import require
from atoll.core.protocols import Owner, fields_owned

_EPOCH_BITS = 32
VERSION_LIMIT = 1 << _EPOCH_BITS
"""Rounds and epochs are less than this."""
_EARLY_DIGITS = 8


class StateVersion(NamedTuple):
    """The round of a committed state, and the epoch of the commit attempt that produced it.

    A round alone does not identify a state: when an island commits and is cut off, the other islands repeat that round without it.
    Every commit attempt therefore has an epoch that is later than any epoch its participants have seen. Of two states of one round
    the state with the later epoch is valid, and no island continues from the other.
    """

    round: int
    epoch: int

    @property
    def number(self) -> int:
        """The version as one integer, in the same order.

        >>> StateVersion.of(StateVersion(3, 7).number)
        StateVersion(round=3, epoch=7)
        >>> StateVersion(3, 7).number < StateVersion(3, 8).number < StateVersion(4, 0).number
        True
        """
        return self.round << _EPOCH_BITS | self.epoch

    @staticmethod
    def of(number: int) -> StateVersion:
        return StateVersion(number >> _EPOCH_BITS, number & (VERSION_LIMIT - 1))


NO_VERSION = StateVersion(-1, 0)
"""The last commit of an empty log."""


def attempt_epoch(names: Sequence[str], first: int) -> int:
    """The epoch of a commit attempt by these islands, none of which has seen epoch `first` or a later one.

    Two quorums that do not know of each other and attempt the same round get different epochs, and the larger quorum the later one.
    Quorums of one size collide in one of 16 pairs.

    >>> attempt_epoch(["a"], 8) < attempt_epoch(["b", "c"], 8) != attempt_epoch(["b", "d"], 8)
    True
    """
    return first + 16 * min(len(names), 15) + zlib.crc32(",".join(names).encode()) % 16


class HeldState(NamedTuple):
    """The state that an island reports to hold."""

    position: tuple[int, ...]  # round, epoch, and 1 if the island is in a round
    digest: int
    confirmed: bool  # whether the island took part in the commit of this state
    has_folder: bool


def select_state(held: Sequence[HeldState]) -> tuple[list[int], list[int]]:
    """The ranks that hold the valid state, and the ranks that hold its version with other bits.

    Of the newest version, the digest of most islands that confirmed it is valid. On a tie an island with the run's folder decides,
    then the lowest rank. Islands that fetched the state count only if no island has confirmed it.

    >>> old, new = HeldState((2, 7, 1), 5, True, False), HeldState((3, 8, 1), 5, True, False)
    >>> select_state([old, new, new._replace(digest=7), new])
    ([1, 3], [2])
    >>> select_state([new._replace(digest=7, confirmed=False), new._replace(digest=7, confirmed=False), new])
    ([2], [0, 1])
    """
    newest = max(one.position for one in held)
    holders = [one for one in held if one.position == newest]
    voters = [one for one in holders if one.confirmed] or holders
    votes = Counter(one.digest for one in voters)
    chosen = max(voters, key=lambda one: (votes[one.digest], one.has_folder)).digest
    valid = [rank for rank, one in enumerate(held) if one.position == newest and one.digest == chosen]
    return valid, [rank for rank, one in enumerate(held) if one.position == newest and one.digest != chosen]


def _memory(flat: Tensor) -> Any:
    return flat.detach().cpu().contiguous().view(torch.uint8).numpy()


class Checksum:
    """The checksum of bits that are added chunk by chunk: 52 bits of XXH3, which fit into a float.

    A sum misses a changed order and two flipped signs. CRC-32 takes five times as long.
    """

    def __init__(self) -> None:
        xxhash: Any = require("xxhash", extra="torchft", purpose="elastic runs")
        self._hash = xxhash.xxh3_64()

    def add(self, chunk: Tensor | memoryview | bytes) -> None:
        self._hash.update(_memory(chunk) if isinstance(chunk, Tensor) else chunk)

    @property
    def value(self) -> int:
        number: int = self._hash.intdigest()
        return number >> 12


def checksum(*chunks: Tensor | memoryview | bytes) -> int:
    """The checksum of these chunks in their order."""
    total = Checksum()
    for chunk in chunks:
        total.add(chunk)
    return total.value


def combine_checksums(sums: Iterable[int], text: str = "") -> int:
    return checksum(f"{','.join(map(str, sums))}{text}".encode())


def state_digest(shared: Mapping[str, Any], metadata: Mapping[str, Any]) -> int:
    """The digest of all that islands replicate: the algorithm's shared fields, leases, validator, membership and last quorum."""
    return combine_checksums([checksum(tree.flat) for tree in trees(shared)], _replicated_text(metadata))


def digest_text(digest: int) -> str:
    return f"{digest:013x}"


def differing_digest(shared: Mapping[str, Any], metadata: Mapping[str, Any], *, of_checkpoint: bool = False) -> str | None:
    """The digest of a state that is not the one which its metadata records, else None. Early checkpoints record a CRC-32, which is
    accepted of a checkpoint alone: it misses changes that an island could send."""
    recorded, found = metadata["digest"], digest_text(state_digest(shared, metadata))
    if of_checkpoint and isinstance(recorded, str) and len(recorded) == _EARLY_DIGITS:
        sums = ",".join(str(zlib.crc32(_memory(tree.flat))) for tree in trees(shared))
        found = f"{zlib.crc32(f'{sums}{_replicated_text(metadata)}'.encode()):08x}"
    return None if found == recorded else found


def _replicated_text(metadata: Mapping[str, Any]) -> str:
    names = [name for name in ("leases", "validator", "known", "present", "quorum") if name in metadata]  # early ones lack the last
    return json.dumps([metadata[name] for name in names])


def refuse_unreplicated(algorithm: Any, state: Any) -> None:
    """Refuse an algorithm part of whose state would be lost with one island."""
    if fields_owned(state, Owner.SHARDED):
        raise ConfigError(
            f"{type(algorithm).__name__} with --engine elastic: each island holds a slice of its state, which is lost with it. Use "
            f"DiLoCo or DDP, or --engine processes, which resumes from checkpoints."
        )
    if getattr(algorithm, "missed", "global") != "global":
        raise ConfigError(
            "algorithm.missed=agreed with --engine elastic: an island that misses one fetches the quorum's weights. Use global."
        )
