"""Everything atoll raises on purpose. Catch AtollError to catch them all; the command line prints its message and exits with 2."""

from __future__ import annotations

import errno


class AtollError(Exception):
    """The base class. Its message says what was given, what is allowed, and what to do."""


class ConfigError(AtollError):
    """A setting is impossible."""


class DataError(AtollError):
    """Text, tokens or a tokenizer cannot be used as they are."""


class CheckpointError(AtollError):
    """A checkpoint is truncated, foreign, or could not be written."""


class TrainingDiverged(AtollError):
    """A loss is NaN or infinite. The message names island, round and step."""


class ExchangeFailed(AtollError):
    """The islands could not agree. Every participant of the exchange raises it, or none does."""


class TreeDonated(AtollError):
    """A Tree was read after its buffer had been donated: a bug in the calling code."""


def one_line(error: BaseException) -> str:
    """What another library's error says, on one line of bounded length: a damaged file may be quoted in it."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed from, says that a disk is full or a quota is used up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
