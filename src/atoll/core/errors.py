"""Everything atoll raises on purpose.

AtollError                    catch this to catch them all; the command line shows the message alone and exits with 2
├── ConfigError               a setting is impossible: what was given, what is allowed, what to do
├── DataError                 text, tokens or a tokenizer cannot be used as they are
├── CheckpointError           a checkpoint is truncated, foreign, or could not be written
├── TrainingDiverged          a loss is NaN or infinite; says which island, round and step
├── ExchangeFailed            islands could not agree; every participant of the exchange sees it
└── TreeDonated             a Tree was read after its buffer had been donated (a bug in the calling code)
"""

from __future__ import annotations


class AtollError(Exception):
    """The root of the tree above. Its message is written for the person at the keyboard."""


class ConfigError(AtollError):
    """A setting is impossible."""


class DataError(AtollError):
    """Text, tokens or a tokenizer cannot be used as they are."""


class CheckpointError(AtollError):
    """A checkpoint is truncated, foreign, or could not be written."""


class TrainingDiverged(AtollError):
    """A loss is NaN or infinite."""


class ExchangeFailed(AtollError):
    """The islands could not agree. Every participant of the exchange raises it, or none does."""


class TreeDonated(AtollError):
    """A Tree was read after its buffer had been handed on."""
