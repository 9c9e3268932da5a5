"""An algorithm's rounds, played as far as the user's steps allow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from atoll.core.protocols import Algorithm
from atoll.core.pytree import recycle
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.loop.nonfinite_guard import Soundness
from atoll.loop.peers import LoopPeers
from atoll.loop.replica import LoopReplica, Pause
from atoll.loop.uneven_inputs import Company


class Rounds:
    """Rounds, one after the other. The thread that calls computes; exchanges are the line's.

    Args:
        algorithm: whose rounds they are.
        replica: the user's module.
        peers: the other islands.
        line: the thread that communicates.
        company: says when this island's last exchange is over.
        soundness: looks at what a round led to.
        between: called between two rounds, with the number of those that changed the weights.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        replica: LoopReplica,
        peers: LoopPeers,
        line: CommunicationThread,
        company: Company,
        soundness: Soundness,
        between: Callable[[int], object],
    ) -> None:
        self._algorithm, self._replica, self._peers = algorithm, replica, peers
        self._line, self._company, self._soundness, self._between = line, company, soundness, between
        self._round: Coroutine[Any, Any, Any] | None = None
        self.state: Any = None
        """As it was when the present round began. It is not given away, so that it can be saved at any time."""
        self.number = 0
        """Rounds that changed the weights."""
        self.waits = False
        """Whether the round waits for the user, and for nobody else."""

    def begin(self, state: Any, number: int) -> None:
        """Go on from this State, up to where the user is waited for."""
        self.close()
        self.state, self.number = state, number
        self._start()
        self.go_on()

    def go_on(self) -> None:
        """A step is done, or there will be no more: go on until the user is waited for again, or all is over."""
        self.waits = False
        while self._came_to_its_end():
            self._between(self.number)
            if self._company.over:
                return
            self._start()
        self.waits = True

    def finish(self) -> None:
        """There will be no more steps: play to the end, together with the others."""
        self._replica.through = True
        self.go_on()

    def close(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    def _start(self) -> None:
        self._replica.begin_round()
        self._peers.begin_round()
        self._round = self._algorithm.round(self.state, self._replica, self._peers)

    def _came_to_its_end(self) -> bool:
        """Plays the round until it waits for the user, or is over."""
        assert self._round is not None, "no round has begun"
        value: Any = None
        try:
            while not isinstance(request := self._round.send(value), Pause):
                value = request.call() if request.waits else self._line.call(request.call)
        except StopIteration as end:
            self._round = None
            self._soundness.check(end.value)
            before, self.state = self.state, end.value
            self.number += self.state.params is not before.params
            recycle([before], [self.state, self._replica.loaded])
            return True
        return False
