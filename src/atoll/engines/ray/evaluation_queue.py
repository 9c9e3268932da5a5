"""Weights that are to be judged: claimed at the desk, put into the object store beside it, and then told to whoever judges."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from threading import Condition, Lock
from typing import Any, NamedTuple

from atoll.core.events import Evaluated
from atoll.core.flat_tree import Tree
from atoll.engines.ray.hub_state import Desk
from atoll.engines.ray.messages import arrays_of
from atoll.engines.ray.outbox import Tidings
from atoll.engines.ray.weight_publisher import Publisher

_MOST_TO_JUDGE = 4  # that wait: whoever judges is slower than the run, and each holds weights


class _Claim(NamedTuple):
    """Weights on their way to whoever judges. No buffer of those in `held` is reused meanwhile."""

    due: Evaluated
    params: Tree
    buffers: Mapping[str, Any]
    held: Sequence[Tree]


class Judging:
    """Has weights judged. All but `publish` is for whoever is alone at the desk.

    Args:
        desk: of the hub.
        tidings: tell whoever judges.
        publisher: puts weights into the object store.
        changed: who holds it is alone at the desk.
    """

    def __init__(self, desk: Desk, tidings: Tidings, publisher: Publisher, changed: Condition) -> None:
        self._desk, self._tidings, self._publisher, self._changed = desk, tidings, publisher, changed
        self._claims: deque[_Claim] = deque()
        self._publishing = Lock()

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be judged any more."""
        return self._waiting == 0

    @property
    def _waiting(self) -> int:
        return len(self._claims) + self._tidings.waiting

    def claim(self) -> None:
        """The present weights are to be judged, if it is time, unless too many wait. The last are always judged."""
        due, self._desk.due = self._desk.due, None
        if due is not None and (self._desk.done or self._waiting < _MOST_TO_JUDGE):
            self._claims.append(_Claim(due, self._desk.params, arrays_of(self._desk.buffers), self._desk.hub.hold()))

    def publish(self) -> None:
        """Put what was claimed into the store, in order: the next update may be applied meanwhile. Not to be called at the desk."""
        with self._publishing:
            while self._claims:
                claim = self._claims[0]  # and there it stays until it is told: else nothing would seem to be left to judge
                reference = self._publisher.publish(claim.params)
                with self._changed:
                    self._tidings.file(claim.due, reference, claim.buffers)
                    self._claims.popleft()
                    self._desk.hub.let_go(claim.held)
                    self._changed.notify_all()

    def judged(self, number: int, metrics: Mapping[str, float]) -> None:
        """Somebody has judged what was told under this number."""
        due = self._tidings.take_back(number)
        if due is not None:
            self._desk.judged(due, metrics)

    def leave_out(self, number: int) -> None:
        """Nobody can judge what was told under this number: it is lost. The present weights are claimed again."""
        due = self._tidings.take_back(number)
        if due is not None and due.round == self._desk.accounting.totals.round:
            self._desk.due = due
            self.claim()
