"""Whether those with whom something is exchanged are still there.

A process that was stopped, a machine without power and a line that was cut close no connection: whoever waits for a message would
wait for as long as an exchange may take at all. So they are asked meanwhile, about once a second, at their piers. An answer that
comes late is an answer: a line that is busy with the exchange is slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from atoll.engines.elastic.membership import Member
from atoll.engines.elastic.pier import ask

EVERY_S = 1.0


class Watch:
    """A watch over one exchange, while it is entered.

    Args:
        members: who is asked.
        group: what they exchange over. It is ended when one of them is silent for too long, so that whoever waits for it goes on.
        rank: of one of the others in it.
        silent_s: how long that is.
    """

    def __init__(self, members: Sequence[Member], group: Any, rank: int, silent_s: float) -> None:
        self._members, self._group, self._rank, self._silent_s = members, group, rank, silent_s
        self._over, self._ending = threading.Event(), threading.Lock()
        self.lost: str | None = None
        """Who did not answer."""

    def __enter__(self) -> Watch:
        for member in self._members:
            threading.Thread(target=self._ask, args=(member,), name=f"watch {member.name}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._ending:
            self._over.set()

    def _ask(self, member: Member) -> None:
        heard_s = time.monotonic()
        while not self._over.wait(EVERY_S):
            if ask(member.pier, self._silent_s) is not None:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > self._silent_s:
                self._end(member)
                return

    def _end(self, member: Member) -> None:
        with self._ending:
            if not self._over.is_set() and self.lost is None:
                self.lost = member.name
                end(self._group, self._rank)


def end(group: Any, rank: int) -> None:
    """End all that is under way in a group of gloo's, from another thread than the one that waits.

    Its own `abort` does not wake anybody. But where one message has taken too long, gloo gives up all of them: so here is one that
    nobody sends, from any other rank.
    """
    with suppress(RuntimeError):
        group.recv([torch.zeros(1)], rank, _NOBODYS_TAG).wait(timedelta(milliseconds=1))


_NOBODYS_TAG = 1  # messages that are sent have 0
