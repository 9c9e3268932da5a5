"""Which GPUs of its machine an island computes on: some of its own as far as there are some, whoever started it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from atoll.core.errors import ConfigError


class Cards:
    """Some of a machine's cards, which nobody else has as long as this process lives; or shared ones, if too many are taken.

    Args:
        cards: what is unlike of each, on this machine.
        number: of the island: the first has the first cards, if they are free.
        count: how many it is to have.
    """

    def __init__(self, cards: Sequence[str], number: int, count: int = 1) -> None:
        if count > len(cards):
            raise ConfigError(f"--devices {count}: this machine has {len(cards)} GPUs. Use as many or fewer.")
        first = number * count % len(cards)
        order = (*range(first, len(cards)), *range(first))
        self._claims: dict[int, socket.socket] = {}
        for card in order:
            if len(self._claims) < count:
                self._claim(card, cards[card])
        shared = [card for card in order if card not in self._claims]
        self.numbers = (*self._claims, *shared)[:count]

    def _claim(self, card: int, name: str) -> None:
        # A name that Linux keeps as long as the socket is there: no file is left behind by whoever is killed.
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with suppress(OSError):
            claim.bind(f"\0atoll card {name}")
            self._claims[card] = claim
            return
        claim.close()

    def close(self) -> None:
        """Others may have them."""
        for claim in self._claims.values():
            claim.close()
