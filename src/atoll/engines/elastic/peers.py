"""What an algorithm sees of an elastic run: its peers, whose only collective is a mean that the quorum commits, and a replica."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.elastic.aggregation import Agreement, IslandReport, Proposal
from atoll.engines.elastic.commit import Commit, CommitProtocol
from atoll.engines.elastic.data_leases import DataUnit
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.processes.communication_thread import BackgroundTask, CommunicationThread, Request
from atoll.engines.round_record import RoundRecord
from atoll.engines.wall_clock import WallClock

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class RoundContext:
    """What the peers need to know of one round.

    Attributes:
        version: that this island holds.
        digest: of it.
        unit: that the island trains on; None if it has no work in this round.
        work: the unit, as algorithms ask for it.
        record: of the round.
        report: of this island.
    """

    version: StateVersion
    digest: int
    unit: DataUnit | None
    work: Work
    record: RoundRecord
    report: IslandReport


class ElasticPeers:
    """Islands as equals, any of which may vanish at any moment. A protocols.Peers, for algorithms that take one mean per round and
    replicate all of their state."""

    def __init__(self, commits: CommitProtocol[Proposal, Agreement], thread: CommunicationThread, clock: WallClock) -> None:
        self._commits, self._thread, self._clock = commits, thread, clock
        self._context: RoundContext | None = None
        self.commit: Commit[Agreement] | None = None
        """Of this round."""
        self.rank, self.size = 0, 1

    def begin(self, context: RoundContext) -> None:
        """A round begins."""
        self._context, self.commit = context, None

    def open(self) -> Commit[Agreement]:
        """Commit without a delta: the islands begin together."""
        context = self._round
        return self._thread.call(lambda: self._commit(context, Proposal(context.report), opening=True))

    @property
    def _round(self) -> RoundContext:
        if self._context is None:
            raise ConfigError("an algorithm asked for work or for a mean before its first round began. Ask for it in round().")
        return self._context

    def _commit(self, context: RoundContext, proposal: Proposal, *, opening: bool = False) -> Commit[Agreement]:
        commit = self._commits.commit(context.version, context.digest, proposal, opening=opening)
        self.rank, self.size = commit.result.rank, len(commit.names)
        return commit

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        asked, unit = steps if batches is None else batches, self._round.unit
        if unit is not None and (asked != unit.batches or pieces != 1):
            raise ConfigError(
                f"a round asks for {asked} batches in {pieces} pieces, and a unit of data has {unit.batches} whole ones. "
                f"With --elastic an algorithm asks for as many every round."
            )
        return self._round.work

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        if self.commit is not None:
            raise ConfigError("a second mean in one round: with --elastic a round is committed by its only exchange.")
        context = self._round
        own_weight = weight if context.unit is not None else 0.0
        proposal = Proposal(context.report, tree, own_weight, compare, self._clock.now_s(), context.record)
        self.commit = await Request(lambda: self._commit(context, proposal))
        return Mean(self.commit.result.value, self.commit.result.weight, True, True)

    async def reduce_scatter(self, tree: Tree, weight: float = 1.0, *, wide: bool = False) -> Scattered:
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
        f"{what} with --elastic: an island that vanishes would take its slice along. Use DiLoCo or DDP, or --engine dist alone."
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
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        return onto if onto is not None else Gradient(self._params.zeros(), 0.0, 0)
