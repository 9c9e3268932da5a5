"""One island of an elastic run: it trains, meets whoever is there, and commits with them.

All that a run is lies in a state that every island holds alike: the algorithm's shared fields, the account of data, the books,
and who is known. A commit moves all of it at once. So any island can take over what another did, an island that comes is given
the state by any other, and when all have died the newest checkpoint has everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.engines.books import MOST_SKIPPED, Books, Ledger
from atoll.engines.dist.clerk import Clerk
from atoll.engines.dist.clock import WallClock
from atoll.engines.dist.diary import Diary, Stretch
from atoll.engines.dist.driving import Line
from atoll.engines.dist.replica import DistReplica
from atoll.engines.elastic.checksum import checksum, combined
from atoll.engines.elastic.generation import Generation
from atoll.engines.elastic.idle import IdleReplica
from atoll.engines.elastic.judging import Judge
from atoll.engines.elastic.leases import Leases, Settled, Unit
from atoll.engines.elastic.meetings import LeftBehind, Meetings, Met, Unvouched
from atoll.engines.elastic.peers import Agreed, ElasticPeers
from atoll.engines.local import LocalReplica
from atoll.engines.states import on_device, shared_fields, with_shared
from atoll.errors import ConfigError, TrainingDiverged
from atoll.events import Attended, Event, IslandJoined, IslandLeft, Leased, Refused
from atoll.leaves import recycle, trees
from atoll.protocols import Algorithm, Batches, Owner, Work, fields_owned
from atoll.tree import Tree


@dataclass(frozen=True)
class Commit:
    """What an island has just committed, together with others.

    Attributes:
        met: who they were, and what they agreed on.
        events: what happened.
        opening: whether it was before the first round.
    """

    met: Met[Agreed]
    events: Sequence[Event]
    opening: bool = False


class ElasticEngine:
    """One island.

    Args:
        name: of the island.
        algorithm: what each island does.
        meetings: with the others.
        params: the weights to begin with, the same everywhere.
        batches: the data.
        make_replica: makes this island's replica, with a fresh optimizer.
        islands: how many the run is planned for: so much work there is, however many do it.
        steps: inner steps of each of these.
        most: a delta is refused if it is so many times longer than deltas were lately.
        alive: tells how many islands are alive, as far as anybody knows.
        home: whether this island has the run's folder.
        pier: where this island can be asked.
        committed: called after each commit, with this engine.
        heal: brings this engine up to date from another island, or from a checkpoint. It is told what the others hold.
        confirm: finds out whether anybody went on from the state that this engine was given.
        pause_s: so long this process sleeps for each batch besides computing it.
    """

    def __init__(
        self,
        *,
        name: str,
        algorithm: Algorithm[Any],
        meetings: Meetings,
        params: Tree,
        batches: Batches,
        make_replica: Callable[[], LocalReplica],
        islands: int,
        steps: int,
        most: float,
        alive: Callable[[], int],
        home: bool,
        pier: str,
        committed: Callable[[ElasticEngine, Commit], None],
        heal: Callable[[ElasticEngine, Generation], None],
        confirm: Callable[[ElasticEngine], None],
        pause_s: float = 0.0,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name, self.algorithm, self._planned, self._pause_s = name, algorithm, islands, pause_s
        self._meetings, self._batches, self._make_replica = meetings, batches, make_replica
        self._alive, self._committed, self._heal, self._confirm, self._busy = alive, committed, heal, confirm, busy
        self.clock = WallClock()
        self.generation = Generation(0, 0)
        self.books = Books(0, real=True)
        self.known: list[str] = []
        """All that ever took part, in the order in which they came."""
        self._here: tuple[str, ...] = ()
        """Who took part in the last commit."""
        self._happened: list[Event] = []
        self._clerk = Clerk(self.books, 1, inside=False, sink=_Keeping(self._happened))
        self._judge = Judge(most)
        self.per_round = algorithm.steps_per_round * getattr(algorithm, "accumulation", 1)
        rounds = -(-steps // algorithm.steps_per_round)
        self.leases = Leases(shards=batches.num_shards, batches=self.per_round, units=rounds * islands)
        self.replica = make_replica()
        self._line = Line(self.replica.device)
        self.peers = ElasticPeers(meetings, self._line, self._judge, self.clock, home=home, pier=pier)
        self.state = algorithm.init(params.copy(), self.peers)
        check_elastic(algorithm, self.state)
        self._diary = Diary()
        self._fruitless = 0
        self._listens = False
        """Whether it was just given the state: a lease that it had before is old, and the others would wait for it."""
        self._digest = self._digested()

    # --------------------------------------------------------------------------------------------------------- the whole run

    def run(self) -> None:
        """Until all work is done."""
        while not self.over:
            try:
                self._open() if not self.leases.out else self._play_round()
            except LeftBehind as left:
                self._meetings.say(f"{self.name} was left behind: {left}")
                self._heal(self, left.ahead)
            except Unvouched:
                self._confirm(self)

    @property
    def over(self) -> bool:
        return self.leases.done

    @property
    def steps_taken(self) -> int:
        """Position on the schedule: as if the planned islands had shared the work evenly."""
        return self.leases.settled * self.algorithm.steps_per_round // self._planned

    @property
    def params(self) -> Tree:
        params: Tree = self.state.params
        return params

    @property
    def digest(self) -> str:
        """Of all that islands hold alike."""
        return f"{self._digest:08x}"

    @property
    def standing(self) -> dict[str, Any]:
        """What is said to whoever asks: whether a commit may follow at any moment, and whom this island could not do with."""
        return {"exchanging": self._meetings.exchanging, "blames": sorted(self._meetings.blames)}

    def close(self, *, wait: bool = True) -> None:
        self._line.close(wait=wait)

    def expect(self, fellows: Mapping[str, str]) -> None:
        """These are here too, at these piers, and are waited for if they are alive."""
        self._meetings.fellows = {name: pier for name, pier in fellows.items() if name != self.name}

    def begin_anew(self) -> None:
        """Nobody is at work: what a checkpoint says is leased comes back."""
        self._listens = False
        self.leases.settle(())
        self._meetings.fellows, self._meetings.vouched = {}, True
        self._digest = self._digested()

    def _open(self) -> None:
        """Those who are here begin together."""
        self.peers.begin(self.generation, self._digest, None, self._work, Diary())
        met = self.peers.assemble()
        self.generation = Generation(self.generation.round, met.epoch)
        self.clock.set(met.result.now_s)
        self._clerk.begin(met.result.now_s)
        self._tell_who_is_here(met)
        self._listens = False
        self.leases.lease(met.names)
        self._digest = self._digested()
        self._report(met, opening=True)

    # ---------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> None:
        before, unit = self.state, None if self._listens else self.leases.out.get(self.name)
        self._diary = Diary()
        self.peers.begin(self.generation, self._digest, unit, self._work, self._diary)
        coroutine = self.algorithm.round(before, self._replica_for(unit), self.peers)
        after = self._line.drive(coroutine)
        met = self.peers.met
        if met is None:
            raise ConfigError(f"{type(self.algorithm).__name__} ended a round without a mean, and so without a commit.")
        self._settle(after, met)
        if not self._busy():
            recycle([before, met.result.value], [after])

    def _replica_for(self, unit: Unit | None) -> Any:
        if unit is None:
            return IdleReplica(self.params)
        return DistReplica(self.replica, clock=self.clock, note=self._computed, pause_s=self._pause_s, tolerant=True)

    def _computed(self, stretch: Stretch) -> None:
        self._diary.stretches.append(stretch)

    def _work(self, unit: Unit | None) -> Work:
        unit = unit or Unit(0, 0, self.per_round)
        return Work(unit.shard, unit.start, self.steps_taken, self._batches.examples(unit.shard))

    def _settle(self, after: Any, met: Met[Agreed]) -> None:
        """The commit: from here on this is the state."""
        agreed = met.result
        self._listens = False
        self.state = after
        self.generation = Generation(self.generation.round + 1, met.epoch)
        self._judge.remember(agreed.brought, agreed.refused)
        self._tell_who_is_here(met)
        settled = self.leases.settle(agreed.delivered(met.names), [met.names[rank] for rank in agreed.refused])
        numbers = [self.known.index(name) for name in met.names]
        self._clerk.enter([told.diary for told in agreed.told], self.steps_taken, agreed.now_s, numbers)
        self.leases.lease(met.names)
        self.leases.check()
        self._digest = self._digested()
        self._account(met, settled)
        if self.name in [met.names[rank] for rank in agreed.refused]:
            self.replica = self._make_replica()  # its moments are as unusable as what it brought
        self._check(after, settled)
        self._report(met)

    def _check(self, after: Any, settled: Settled) -> None:
        self._fruitless = 0 if settled.delivered else self._fruitless + 1
        if self._fruitless == MOST_SKIPPED:
            raise TrainingDiverged(f"{MOST_SKIPPED} rounds in a row brought nothing that could be taken. Lower the learning rate.")
        if not after.params.is_finite():
            raise TrainingDiverged(
                f"the global weights are no longer finite after round {self.generation.round}, though every delta was. Lower the "
                f"outer learning rate, or set train.clip_norm."
            )

    # ------------------------------------------------------------------------------------------------------------- the books

    def _tell_who_is_here(self, met: Met[Agreed]) -> None:
        now_s, number = met.result.now_s, self.generation.round
        for name in met.names:
            if name not in self.known:
                self.known.append(name)
                self.books.ledgers.append(Ledger())
            if name not in self._here:
                self._tell(
                    IslandJoined(
                        island=self.known.index(name),
                        round=number,
                        virtual_time_s=None,
                        wall_time_s=now_s,
                        donor=None,
                        sent_bytes=0,
                    )
                )
        for name in self._here:
            if name not in met.names:
                self._tell(IslandLeft(island=self.known.index(name), round=number, virtual_time_s=None, wall_time_s=now_s))
        self._here = met.names
        self.expect({name: told.pier for name, told in zip(met.names, met.result.told, strict=True)})

    def _account(self, met: Met[Agreed], settled: Settled) -> None:
        """Who was there, what became of the data, and what was refused."""
        number, now_s, agreed = self.generation.round, met.result.now_s, met.result
        for rank, reason in agreed.refused.items():
            island = self.known.index(met.names[rank])
            self._tell(Refused(island=island, round=number, virtual_time_s=None, wall_time_s=now_s, reason=reason))
        self._tell(
            Leased(
                round=number,
                delivered=[[self.known.index(name), *unit] for name, unit in settled.delivered.items()],
                returned=[[self.known.index(name), *unit] for name, unit in settled.returned.items()],
                dropped=[[self.known.index(name), *unit] for name, unit in settled.dropped.items()],
                virtual_time_s=None,
                wall_time_s=now_s,
            )
        )
        self._tell(
            Attended(
                round=number,
                known=len(self.known),
                alive=max(self._alive(), len(met.names)),
                participating=len(settled.delivered),
                attempts=met.attempts,
                epoch=met.epoch,
                digest=self.digest,
                virtual_time_s=None,
                wall_time_s=now_s,
            )
        )

    def _tell(self, event: Event) -> None:
        self._happened.append(event)

    def _report(self, met: Met[Agreed], *, opening: bool = False) -> None:
        events = list(self._happened)
        self._happened.clear()
        self._committed(self, Commit(met, events, opening))
        self._meetings.exchanging = False

    # ---------------------------------------------------------------------------------------------------------------- saving

    def _digested(self) -> int:
        """Of all that islands hold alike."""
        sums = [checksum(tree.flat) for tree in trees(shared_fields(self.state))]
        return combined(sums, json.dumps([self.leases.to_parts(), self.known, self._here]))

    def plain(self) -> dict[str, Any]:
        """All of the state but the algorithm's. Between two rounds only."""
        return {
            "generation": list(self.generation),
            "wall_time_s": self.clock.now_s(),
            "leases": self.leases.to_parts(),
            "judge": self._judge.to_parts(),
            "books": self.books.to_parts(),
            "known": list(self.known),
            "here": list(self._here),
            "fellows": dict(self._meetings.fellows),
            "fruitless": self._fruitless,
        }

    def shared(self) -> dict[str, Any]:
        """What the algorithm shares."""
        return shared_fields(self.state)

    def restore(self, plain: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Go on from a state that was committed."""
        self._listens = True
        self.generation = Generation(*plain["generation"])
        self.clock.set(plain["wall_time_s"])
        self.leases.from_parts(plain["leases"])
        self._judge.from_parts(plain["judge"])
        self.books.from_parts(plain["books"])
        self.known, self._here, self._fruitless = list(plain["known"]), tuple(plain["here"]), plain["fruitless"]
        self.expect(plain["fellows"])
        self._clerk.begin(plain["wall_time_s"])
        self._meetings.vouched = False
        self._happened.clear()
        fresh = self.algorithm.init(self.params, self.peers)
        self.state = with_shared(fresh, on_device(dict(shared), self.replica.device))
        self._digest = self._digested()


class _Keeping:
    """A sink that keeps what it is given."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def emit(self, event: Event) -> None:
        self._events.append(event)


def check_elastic(algorithm: Any, state: Any) -> None:
    """Refuse what an island that vanishes would take along."""
    if fields_owned(state, Owner.SHARDED):
        raise ConfigError(
            f"{type(algorithm).__name__} with --elastic: each island holds a slice of its state, which is lost with it. Use "
            f"DiLoCo or DDP, or --engine dist alone, which goes on from checkpoints."
        )
    if getattr(algorithm, "missed", "global") != "global":
        raise ConfigError(
            "algorithm.missed=agreed with --elastic: who misses a meeting goes on from the others' weights. Use global."
        )
