"""Whether those with whom something is exchanged are still there.

A process that was stopped, a machine without power and a line that was cut close no connection: whoever waits for a message would
wait for as long as an exchange may take at all. So they are asked meanwhile, about once a second, at their piers. An answer that
comes late is an answer: a line that is busy with the exchange is slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from atoll.engines.elastic.membership import Member
from atoll.engines.elastic.snapshot_server import ask

EVERY_S = 1.0


class Watch:
    """A watch over one exchange, while it is entered.

    Args:
        members: who is asked, by its rank in the group.
        group: what they exchange over. It is ended when one of them is silent for too long, so that whoever waits for it goes on.
        silent_s: how long that is.
    """

    def __init__(self, members: Mapping[int, Member], group: Any, silent_s: float) -> None:
        self._members, self._group, self._silent_s = members, group, silent_s
        self._over, self._ending = threading.Event(), threading.Lock()
        self._left_out: set[int] = set()
        self.lost: str | None = None
        """Who did not answer, of those who take part: the first."""

    def __enter__(self) -> Watch:
        for rank, member in self._members.items():
            threading.Thread(target=self._ask, args=(rank, member), name=f"watch {member.name}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._ending:
            self._over.set()

    def leave_out(self, ranks: Collection[int]) -> None:
        """These take no part in the exchange any more: whether they answer is all one."""
        with self._ending:
            self._left_out.update(ranks)

    def _ask(self, rank: int, member: Member) -> None:
        heard_s = time.monotonic()
        while not self._over.wait(EVERY_S):
            said = ask(member.pier, self._silent_s)
            if said is not None and said.get("name") == member.name:  # and not another process that has got its port
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > self._silent_s:
                self._end(rank, member)
                return

    def _end(self, rank: int, member: Member) -> None:
        with self._ending:
            if not self._over.is_set() and rank not in self._left_out:
                self.lost = self.lost or member.name
                end(self._group, rank)


def end(group: Any, rank: int) -> None:
    """End all that is under way in a group of gloo's, from another thread than the one that waits.

    Its own `abort` does not wake anybody. But where one message has taken too long, gloo gives up all of them: so here is one that
    nobody sends, from a rank whose connection stands. Of one that is closed gloo says so, and gives up nothing else.
    """
    with suppress(RuntimeError):
        group.recv([torch.zeros(1)], rank, _NOBODYS_TAG).wait(timedelta(milliseconds=1))


_NOBODYS_TAG = 1  # messages that are sent have 0
