"""What an algorithm sees of an elastic run: its peers, whose only collective is a mean that the quorum commits, and a replica."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.accounting import ComputeSpan
from atoll.engines.communication_thread import BackgroundTask, CommunicationThread, Request
from atoll.engines.elastic.aggregation import Proposal
from atoll.engines.elastic.commit import Commit, CommitProtocol
from atoll.engines.elastic.data_leases import DataUnit
from atoll.engines.round_record import RoundRecord, WallClock
from atoll.engines.timed_replica import ProcessReplica
from atoll.replica.local_replica import ComputeResult

_LOOKS = 8
"""How often in a span of training the engine looks whether a waiting exchange can begin."""
S = TypeVar("S")
T = TypeVar("T")


class ElasticPeers:
    """Islands as equals, any of which may vanish at any moment. A protocols.Peers, for algorithms that replicate all of their state
    and take `means` means per round, each of which is committed.

    The engine offers a proposal for each commit, when it has moved its state to the commit before. Exchanges in the background wait
    for that.
    """

    def __init__(self, protocol: CommitProtocol, thread: CommunicationThread, clock: WallClock, means: int, batches: int) -> None:
        self._protocol, self._thread, self._clock, self._means, self._batches = protocol, thread, clock, means, batches
        self._offers: SimpleQueue[Proposal | None] = SimpleQueue()
        """Of this round; None ends it."""
        self._unit: DataUnit | None = None
        self._work: Work | None = None
        self._computed: list[ComputeSpan] = []
        self._called = self._offered = self._missed = 0
        """Means of this round: that the algorithm has asked for, that the engine has offered, and that were committed before this
        island took part."""
        self._launching = False
        self.committed: tuple[Commit, Mean] | None = None
        """The last commit of this round, until the engine takes it, and what the algorithm gets of it."""
        self.rank, self.size = 0, 1

    def begin(self, unit: DataUnit | None, work: Work, computed: list[ComputeSpan], missed: int = 0) -> None:
        """A round begins. `unit` is None if the island has no work in it. `computed` gets what its replica computes. The first
        `missed` means are over."""
        self.end()
        self._unit, self._work, self._computed = unit, work, computed
        self._offers, self._called, self._offered, self._missed, self.committed = SimpleQueue(), 0, missed, missed, None

    def offer(self, proposal: Proposal) -> None:
        """The next mean of this round completes this proposal."""
        self._offers.put(proposal)
        self._offered += 1

    def end(self) -> None:
        """No commit of this round follows: exchanges that wait for an offer fail."""
        self._offers.put(None)

    @property
    def queued(self) -> bool:
        """Whether an exchange waits for the commit of another."""
        return self._called - self._offered > 0

    def open(self, proposal: Proposal) -> Commit:
        """Commit without a delta: the islands begin together."""
        return self._thread.call(lambda: self._commit(proposal))

    def _commit(self, proposal: Proposal) -> Commit:
        commit = self._protocol.commit(proposal)
        self.rank, self.size = commit.result.rank, len(commit.names)
        return commit

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        if self._work is None:
            raise ConfigError("an algorithm asked for work before its first round began. Ask for it in round().")
        asked = steps if batches is None else batches
        if asked != self._batches or pieces != 1:
            raise ConfigError(
                f"a round asks for {asked} batches in {pieces} pieces, and a unit of data has {self._batches} whole ones. "
                f"With --engine elastic an algorithm asks for the same number in every round."
            )
        return self._work

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        number, self._called = self._called, self._called + 1
        if number >= self._means:
            raise ConfigError(
                f"mean number {number + 1} of a round: with --engine elastic a round of this algorithm has {self._means}, each of "
                f"which is committed."
            )
        if number < self._missed:
            return Mean(tree.zeros(), 0.0, False)
        computed = RoundRecord([*self._computed])
        self._computed.clear()
        brought: dict[str, Any] = {"tree": tree, "weight": weight if self._unit is not None else 0.0}
        how: dict[str, Any] = {"compare": compare, "encoding": encoding, "background": self._launching}
        arrived_s, offers = self._clock.now_s(), self._offers

        def exchange() -> Mean:
            offered = offers.get()
            if offered is None:
                offers.put(None)
                raise ExchangeFailed("the round has ended before this exchange began")
            report = replace(offered.report, record=computed)
            commit = self._commit(replace(offered, report=report, arrived_s=arrived_s, **brought, **how))
            tree.release()  # a failed attempt would have needed it again
            mean = Mean(commit.result.value, commit.result.weight, True, True, commit.result.unsent)
            self.committed = commit, mean
            return mean

        return await Request(exchange)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        _refuse("reduce_scatter")

    async def all_gather(self, shard: Tree) -> Tree:
        _refuse("all_gather")

    async def total(self, number: float) -> float:
        _refuse("total")

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> BackgroundTask[T]:
        if self._means == 1:
            coroutine.close()
            _refuse("background")
        self._launching = True
        try:
            return self._thread.launch(coroutine)
        finally:
            self._launching = False

    async def catch_up(self, state: S) -> S:
        """An island that is behind fetches the state before it takes part again."""
        return state


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} with --engine elastic: an island that dies would take what it has not committed with it. Use DiLoCo, Streaming or "
        f"DDP, or --engine processes."
    )


class LeasedReplica(ProcessReplica):
    """A replica that trains on the batches of its unit alone: where another island has delivered the first part of it, it waits for
    the others."""

    def __init__(self, replica: Any, unit: DataUnit, peers: ElasticPeers, **options: Any) -> None:
        super().__init__(replica, **options)
        self._unit, self._peers = unit, peers

    async def train(self, steps: int, work: Work) -> int:
        if work.start < self._unit.start:
            return 0
        # While an exchange waits for the commit of another, the engine is asked every so often whether it can offer the next.
        length, tokens = max(1, steps // _LOOKS) if self._peers.queued else steps, 0
        for done in range(0, steps, length):
            taken = min(length, steps - done)
            tokens += self.compute(partial(self._steps, done + taken, work, done), taken, float(taken))
            await Request(bool, waits=True)
        return tokens

    def _steps(self, steps: int, work: Work, after: int) -> tuple[int, ComputeResult]:
        result = self._replica.train(steps, work, after)
        return result.tokens, result


class ObserverReplica:
    """The replica of an island without work, such as a joiner in its first round: it holds weights and does not train. A
    protocols.Replica."""

    def __init__(self, params: Tree) -> None:
        self._params = params

    def load(self, params: Tree) -> None:
        whole = params.layout == self._params.layout
        self._params = params.copy().donate() if whole else self._params.overlaid(params)

    def params(self) -> Tree:
        return self._params.borrow()

    async def train(self, steps: int, work: Work) -> int:
        return 0

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        return onto if onto is not None else Gradient(self._params.zeros(), 0.0, 0)
