"""Which state of a run an island holds: whoever holds an older one is never the source of truth."""

from __future__ import annotations

from typing import NamedTuple

_EPOCHS = 32  # bits


class Generation(NamedTuple):
    """A committed state.

    A round alone does not say which: an island that commits and is then cut off has a round that the others do again without it.
    Every attempt to commit therefore has an epoch, later than any that one of those who attempt it has seen. Of two states of the
    same round the one with the later epoch counts, and nobody goes on from the other.

    Attributes:
        round: commits so far.
        epoch: of the attempt that led to it.
    """

    round: int
    epoch: int

    @property
    def number(self) -> int:
        """As one number, in the same order.

        >>> Generation.of(Generation(3, 7).number)
        Generation(round=3, epoch=7)
        >>> Generation(3, 7).number < Generation(3, 8).number < Generation(4, 0).number
        True
        """
        return self.round << _EPOCHS | self.epoch

    @staticmethod
    def of(number: int) -> Generation:
        return Generation(number >> _EPOCHS, number & ((1 << _EPOCHS) - 1))
