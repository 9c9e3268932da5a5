"""Which state of a run an island holds, and which one counts: whoever holds an older one is never the source of truth."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_EPOCHS = 32  # bits
MOST = 1 << _EPOCHS
"""Rounds and epochs are less."""


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
        return Generation(number >> _EPOCHS, number & (MOST - 1))


NOTHING = Generation(-1, 0)
"""What a log tells of that is empty."""


def epoch_of(names: Sequence[str], first: int) -> int:
    """Of an attempt by these islands, where the first that none of them has seen is this one.

    Two companies that do not know of each other, and attempt the same round, come to different epochs, and the larger to the later
    one; of companies of one size one in sixteen pairs does not.

    >>> epoch_of(["a"], 8) < epoch_of(["b", "c"], 8) != epoch_of(["b", "d"], 8)
    True
    """
    return first + 16 * min(len(names), 15) + zlib.crc32(",".join(names).encode()) % 16


class Held(NamedTuple):
    """What an island tells that it holds.

    Attributes:
        state: round, epoch, and whether it is in a round.
        digest: of it.
        vouched: whether it has committed it itself.
        home: whether it has the run's folder.
    """

    state: tuple[int, ...]
    digest: int
    vouched: bool
    home: bool


def sound(held: Sequence[Held]) -> tuple[list[int], list[int]]:
    """Who holds what counts, and who holds other bits of it.

    Of those who are ahead, what most hold who have committed it themselves; of as many, what one holds that has the run's
    folder, or the first. Whoever was given it counts only where nobody has committed it.

    >>> old, new = Held((2, 7, 1), 5, True, False), Held((3, 8, 1), 5, True, False)
    >>> sound([old, new, new._replace(digest=7), new])
    ([1, 3], [2])
    >>> sound([new._replace(digest=7, vouched=False), new._replace(digest=7, vouched=False), new])
    ([2], [0, 1])
    """
    ahead = max(one.state for one in held)
    there = [one for one in held if one.state == ahead]
    witnesses = [one for one in there if one.vouched] or there
    counted = Counter(one.digest for one in witnesses)
    chosen = max(witnesses, key=lambda one: (counted[one.digest], one.home)).digest
    these = [rank for rank, one in enumerate(held) if one.state == ahead and one.digest == chosen]
    return these, [rank for rank, one in enumerate(held) if one.state == ahead and one.digest != chosen]
