"""Which GPU of its machine an island computes on: one of its own as far as there are some, whoever started it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress


class Card:
    """One of several cards, which nobody else has as long as this process lives; or one that is shared, if all are taken.

    Args:
        cards: what is unlike of each, on this machine.
        first: the one that is asked for before the others.
    """

    def __init__(self, cards: Sequence[str], first: int) -> None:
        self.number = first % len(cards)
        # A name that Linux keeps as long as the socket is there: no file is left behind by whoever is killed.
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for number in (*range(self.number, len(cards)), *range(self.number)):
            with suppress(OSError):
                self._claim.bind(f"\0atoll card {cards[number]}")
                self.number = number
                return

    def close(self) -> None:
        """Others may have it."""
        self._claim.close()
