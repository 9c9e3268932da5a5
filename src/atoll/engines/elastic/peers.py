"""What an algorithm sees of an elastic run: its peers, whose only collective is a mean that the quorum commits, and a replica."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding, Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.communication_thread import BackgroundTask, CommunicationThread, Request
from atoll.engines.elastic.aggregation import Proposal
from atoll.engines.elastic.commit import Commit, CommitProtocol
from atoll.engines.elastic.data_leases import DataUnit
from atoll.engines.round_record import WallClock

S = TypeVar("S")
T = TypeVar("T")


class ElasticPeers:
    """Islands as equals, any of which may vanish at any moment. A protocols.Peers, for algorithms that take one mean per round and
    replicate all of their state."""

    def __init__(self, protocol: CommitProtocol, thread: CommunicationThread, clock: WallClock) -> None:
        self._protocol, self._thread, self._clock = protocol, thread, clock
        self._proposal: Proposal | None = None
        self._unit: DataUnit | None = None
        self._work: Work | None = None
        self.commit: Commit | None = None
        """Of this round."""
        self.rank, self.size = 0, 1

    def begin(self, proposal: Proposal, unit: DataUnit | None, work: Work) -> None:
        """A round begins. `unit` is None if the island has no work in it. The mean completes the proposal."""
        self._proposal, self._unit, self._work, self.commit = proposal, unit, work, None

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
        if self._unit is not None and (asked != self._unit.batches or pieces != 1):
            raise ConfigError(
                f"a round asks for {asked} batches in {pieces} pieces, and a unit of data has {self._unit.batches} whole ones. "
                f"With --engine elastic an algorithm asks for the same number in every round."
            )
        return self._work

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        if self._proposal is None or self.commit is not None:
            raise ConfigError("a second mean in one round: with --engine elastic a round has one exchange, which commits it.")
        if encoding is not None:
            _refuse("a codec")
        own_weight = weight if self._unit is not None else 0.0
        proposal = replace(self._proposal, tree=tree, weight=own_weight, compare=compare, arrived_s=self._clock.now_s())
        self.commit = await Request(lambda: self._commit(proposal))
        return Mean(self.commit.result.value, self.commit.result.weight, True, True)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        _refuse("reduce_scatter")

    async def all_gather(self, shard: Tree) -> Tree:
        _refuse("all_gather")

    async def total(self, number: float) -> float:
        _refuse("total")

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> BackgroundTask[T]:
        coroutine.close()
        _refuse("background")

    async def catch_up(self, state: S) -> S:
        """An island that is behind fetches the state before it takes part again."""
        return state


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} with --engine elastic: an island that dies would take its slice with it. Use DiLoCo or DDP, or --engine processes."
    )


class ObserverReplica:
    """The replica of an island without work, such as a joiner in its first round: it holds weights and does not train. A
    protocols.Replica."""

    def __init__(self, params: Tree) -> None:
        self._params = params

    def load(self, params: Tree) -> None:
        self._params = params

    def params(self) -> Tree:
        return self._params.copy()

    async def train(self, steps: int, work: Work) -> None:
        pass

    async def gradient(
        self, work: Work, *, at: Tree | None = None, onto: Gradient | None = None, weigh: Weigh = "batches", wide: bool = False
    ) -> Gradient:
        return onto if onto is not None else Gradient(self._params.zeros(), 0.0, 0)
