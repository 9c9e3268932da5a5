"""The failure detector of an exchange: it aborts the process group when a member of the quorum stops to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from atoll.engines.elastic.quorum import Member
from atoll.engines.elastic.snapshot_server import IslandStatus, query_status
from atoll.engines.liveness import FailureDetector
from atoll.engines.point_to_point import MessageGroup

PROBE_S, _PROBES_PER_S = 1.0, 16
"""The least time between two probes of a member, and how many each member sends: all of them probe all others."""
_UNUSED_TAG = 1  # messages have tag 0


class QuorumMonitor:
    """The failure detector of one exchange: it probes the members once a second, and aborts the process group when one of them is
    silent for `silent_s`.

    A stopped process, a machine without power and a cut link close no connection: a receiver would wait for as long as an exchange
    may take at all. A late answer counts as an answer, since a link that carries the exchange is slow.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        group: Any,
        silent_s: float,
        query: Callable[[str, str, float], IslandStatus | None] = query_status,
    ) -> None:
        self._members, self._group, self._query = members, group, query
        self._detector: FailureDetector[int] = FailureDetector(silent_s)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._ignored: set[int] = set()
        self.failed: str | None = None
        """The first participant that did not answer."""

    def __enter__(self) -> QuorumMonitor:
        for rank, member in self._members.items():
            threading.Thread(target=self._probe, args=(rank, member), name=f"probe {member.name}", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._over.set()

    def ignore(self, ranks: Collection[int]) -> None:
        """These ranks do not take part in the exchange any more."""
        with self._lock:
            self._ignored.update(ranks)

    def _probe(self, rank: int, member: Member) -> None:
        self._detector.observe(rank, None, time.monotonic())
        while not self._over.wait(max(PROBE_S, len(self._members) / _PROBES_PER_S)):
            answered = self._query(member.name, member.address, self._detector.limit_s) is not None
            now_s = time.monotonic()
            if answered:
                self._detector.observe(rank, now_s, now_s)
            elif not self._detector.is_alive(rank, now_s):
                self._fail(rank, member)
                return

    def _fail(self, rank: int, member: Member) -> None:
        with self._lock:
            if not self._over.is_set() and rank not in self._ignored:
                self.failed = self.failed or member.name
                if isinstance(self._group, MessageGroup):
                    self._group.abort()
                    return
                # gloo's own `abort` wakes no receiver. But when one message times out, gloo gives up all of them: so this waits for
                # a message that no rank sends, from a rank whose connection stands. A receive from a closed connection would give
                # up nothing else.
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))
