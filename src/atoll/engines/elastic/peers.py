"""The islands that are there, seen from one of them: a mean that is committed by all of them, or by none."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import shard_range
from atoll.core.protocols import Mean, Scattered, Work
from atoll.engines.elastic.checksum import checksum, combined
from atoll.engines.elastic.commit import Disagreed, Meetings, Met
from atoll.engines.elastic.data_leases import Unit
from atoll.engines.elastic.state_version import Generation
from atoll.engines.elastic.update_validation import Brought, Judge
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.communication_thread import BackgroundTask, CommunicationThread, Request
from atoll.engines.round_record import DeltaSimilarity, ExchangeRecord, RoundRecord
from atoll.engines.wall_clock import WallClock

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Told:
    """What an island tells of itself when it commits.

    Attributes:
        home: whether it has the run's folder.
        pier: where it can be asked.
        donor: who has given it the state since its last commit, if anybody has.
        given_bytes: by the donor.
        diary: of its round.
        written: the number of the last generation that it has written into the run's log.
        now_s: on its clock.
    """

    home: bool
    pier: str
    donor: str | None
    given_bytes: int
    diary: RoundRecord
    written: int
    now_s: float

    def to_text(self) -> str:
        line = self.diary.to_json()
        return json.dumps([self.home, self.pier, self.donor, self.given_bytes, line, self.written, self.now_s])

    @staticmethod
    def from_text(text: str) -> Told:
        home, pier, donor, given_bytes, line, written, now_s = json.loads(text)
        return Told(home, pier, donor, given_bytes, RoundRecord.from_json(line), written, now_s)


@dataclass(frozen=True)
class Agreed:
    """What islands agreed on.

    Attributes:
        value: the mean.
        brought: by each, in rank order.
        refused: whose was not taken, by rank, and why.
        weight: of all that was.
        told: by each.
        now_s: on the clock that is furthest: whoever has just come may not know how long it took to come.
    """

    value: Tree
    brought: Sequence[Brought]
    refused: dict[int, str]
    weight: float
    told: Sequence[Told]
    now_s: float

    def delivered(self, names: Sequence[str]) -> list[str]:
        """Whose work is in it."""
        return [name for rank, name in enumerate(names) if self.brought[rank].weight and rank not in self.refused]


class ElasticPeers:
    """Islands as equals, of whom some may vanish at any moment. A protocols.Peers, for algorithms that take one mean a round and
    share all that they remember.

    Args:
        meetings: of this island.
        line: the thread that exchanges.
        judge: says whose delta is refused.
        clock: of the run.
        home: whether this island has the run's folder.
        pier: where this island can be asked.
        written: tells how far this island has written the run's log.
    """

    def __init__(
        self,
        meetings: Meetings,
        line: CommunicationThread,
        judge: Judge,
        clock: WallClock,
        *,
        home: bool,
        pier: str,
        written: Callable[[], Generation],
    ) -> None:
        self._meetings, self._line, self._judge, self._clock = meetings, line, judge, clock
        self._home, self._pier, self._written = home, pier, written
        self._donor: str | None = None
        self._given_bytes = 0
        self._voted_bytes = 0
        """That the last vote took. It is about what was counted before it, so they are counted with the next."""
        self._generation, self._digest = Generation(0, 0), 0
        self._unit: Unit | None = None
        self._work: Callable[[Unit | None], Work] = _no_work
        self._diary = RoundRecord()
        self.met: Met[Agreed] | None = None
        """What this round's meeting came to."""
        self.rank, self.size = 0, 1

    def begin(
        self, generation: Generation, digest: int, unit: Unit | None, work: Callable[[Unit | None], Work], diary: RoundRecord
    ) -> None:
        """A round begins.

        Args:
            generation: that this island holds.
            digest: of it.
            unit: that it is to train on; none if it has no work in this round.
            work: turns a unit into work.
            diary: of the round.
        """
        self._generation, self._digest, self._unit, self._work, self._diary = generation, digest, unit, work, diary
        self.met = None

    def given(self, donor: str | None, nbytes: int) -> None:
        """The state that this island holds was given to it: it is told at its next commit. None: it has committed it itself."""
        self._donor, self._given_bytes = donor, nbytes

    def work(self, steps: int, batches: int | None = None, *, pieces: int = 1) -> Work:
        asked = steps if batches is None else batches
        if self._unit is not None and (asked != self._unit.batches or pieces != 1):
            raise ConfigError(
                f"a round asks for {asked} batches in {pieces} pieces, and a unit of data has {self._unit.batches} whole ones. "
                f"With --elastic an algorithm asks for as many every round."
            )
        return self._work(self._unit)

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False) -> Mean:
        if self.met is not None:
            raise ConfigError("a second mean in one round: with --elastic a round is committed by its only exchange.")
        arrived_s = self._clock.now_s()
        mine = weight if self._unit is not None else 0.0
        met = await Request(
            lambda: self._meetings.hold(
                self._generation, self._digest, lambda wire, names: self._agree(wire, names, tree, mine, compare, arrived_s)
            )
        )
        self.met = met
        return Mean(met.result.value, met.result.weight, True, True)

    def assemble(self) -> Met[Agreed]:
        """Meet without anything to bring: those who are here begin together."""
        nothing = Tree.of({"nothing": torch.zeros(0)})
        return self._line.call(
            lambda: self._meetings.hold(
                self._generation,
                self._digest,
                lambda wire, names: self._vote(wire, names, nothing, [], {}, 0.0, RoundRecord()),
                opening=True,
            )
        )

    # -------------------------------------------------------------------------------------------------------------- agreeing

    def _agree(
        self, wire: GroupCollectives, names: Sequence[str], tree: Tree, weight: float, compare: bool, arrived_s: float
    ) -> Agreed:
        rows = self._tell(wire, tree, weight)
        brought = [_brought(row) for row in rows]
        refused = self._judge.refused(brought)
        weights = [0.0 if rank in refused else one.weight for rank, one in enumerate(brought)]
        total = float(sum(weights))
        diary = RoundRecord(list(self._diary.computed))
        diary.tokens = sum(stretch.tokens for stretch in diary.computed) if weights[wire.rank] else 0
        whole = tree.copy() if total else tree.zeros()
        if total:
            self._average(wire, names, whole, weights, [row[3 + wire.rank] for row in rows], diary if compare else None)
        end_s = self._clock.now_s()
        sent = wire.sent_bytes + self._meetings.wasted_bytes
        control = wire.control_bytes + self._meetings.wasted_control_bytes + self._voted_bytes
        diary.exchanges = [ExchangeRecord("mean", arrived_s, end_s, sent, control, total, False, tuple(refused), total == 0)]
        return self._vote(wire, names, whole, rows, refused, total, diary)

    def _tell(self, wire: GroupCollectives, tree: Tree, weight: float) -> list[list[float]]:
        """What everybody brings, and the checksums of the slices that it sends, by rank."""
        finite = tree.is_finite() if weight else True
        norm = tree.norm() if weight and finite else 0.0
        return wire.all_gather_numbers(weight, finite, norm, *(_slice_sums(tree, wire.size) if weight else [0] * wire.size))

    def _average(
        self,
        wire: GroupCollectives,
        names: Sequence[str],
        whole: Tree,
        weights: Sequence[float],
        sums: Sequence[float],
        diary: RoundRecord | None,
    ) -> None:
        heard = [0] * wire.size
        products = torch.zeros(wire.size, wire.size, dtype=torch.float64) if diary is not None else None

        def hear(rank: int, piece: torch.Tensor) -> None:
            heard[rank] = checksum(piece, heard[rank])

        wire.reduce_scatter(whole.flat, weights, inner_products=products, on_received=hear, divide_by=float(sum(weights)))
        damaged = [name for rank, name in enumerate(names) if weights[rank] and rank != wire.rank and heard[rank] != sums[rank]]
        if damaged:
            raise Disagreed(f"what {', '.join(damaged)} sent is not what was told of it: it was damaged on the way", damaged)
        wire.all_gather(whole.flat)
        if diary is not None and products is not None:
            diary.similarities = [DeltaSimilarity(tuple(map(tuple, products.tolist())), tuple(weights))]

    def _vote(
        self,
        wire: GroupCollectives,
        names: Sequence[str],
        value: Tree,
        rows: Sequence[Sequence[float]],
        refused: dict[int, str],
        weight: float,
        diary: RoundRecord,
    ) -> Agreed:
        """Everybody has heard from everybody that all came to the same, and of the same: nothing else tells whether what an island
        said of itself is what the others heard."""
        now_s, before_bytes = self._clock.now_s(), wire.control_bytes
        mine = Told(self._home, self._pier, self._donor, self._given_bytes, diary, self._written().number, now_s)
        try:
            texts = wire.all_gather_text(mine.to_text())
        except (ValueError, OverflowError, RuntimeError) as error:  # no text, or of no possible length
            raise Disagreed(f"what an island told of itself was damaged on the way: {error}") from error
        heard = zip(_slice_sums(value, wire.size), self._meetings.told, rows or [()] * wire.size, texts, strict=True)
        came_to = wire.all_gather_numbers(*(combined([total], f"{[*held]}{[*row]}{text}") for total, held, row, text in heard))
        if any(one != came_to[0] for one in came_to):
            who = [
                names[rank] for rank in range(wire.size) if _differ(came_to, rank, wire.rank) or _differ(came_to, wire.rank, rank)
            ]
            raise Disagreed(f"islands came to different means, or heard different things ({came_to})", who)
        self.rank, self.size, self._voted_bytes = wire.rank, wire.size, wire.control_bytes - before_bytes
        told = [*map(Told.from_text, texts)]
        return Agreed(value, [*map(_brought, rows)], refused, weight, told, max(one.now_s for one in told))

    # ------------------------------------------------------------------------------------------------------- what there is not

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
        """Whoever is behind is given the state before it goes on."""
        return state


def _slice_sums(tree: Tree, size: int) -> list[int]:
    """The checksum of each rank's slice."""
    return [checksum(tree.flat[slice(*shard_range(tree.numel, rank, size))]) for rank in range(size)]


def _brought(row: Sequence[float]) -> Brought:
    return Brought(row[0], bool(row[1]), row[2])


def _differ(came_to: Sequence[Sequence[float]], one: int, owner: int) -> bool:
    """Whether one rank has something else of another than that one has sent: its slice of the mean, or what it told."""
    return came_to[one][owner] != came_to[owner][owner]


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} with --elastic: an island that vanishes would take its slice along. Use DiLoCo or DDP, or --engine dist alone."
    )


def _no_work(unit: Unit | None) -> Work:
    raise ConfigError("work is asked for before a round has begun.")
