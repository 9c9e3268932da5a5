"""One island of an elastic run: it trains, meets whoever is there, and commits with them.

All that a run is lies in a state that every island holds alike: the algorithm's shared fields, the account of data, the books,
and who is known. A commit moves all of it at once. So any island can take over what another did, an island that comes is given
the state by any other, and when all have died the newest checkpoint has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Event
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Algorithm, Batches, Work
from atoll.core.pytree import recycle
from atoll.engines.accounting import MAX_SKIPPED, RunAccounting
from atoll.engines.elastic.accounting import Chronicle
from atoll.engines.elastic.commit import APART, LeftBehind, Meetings, Met, Unvouched
from atoll.engines.elastic.data_leases import Leases, Settled, Unit
from atoll.engines.elastic.observer_replica import IdleReplica
from atoll.engines.elastic.peers import Agreed, ElasticPeers
from atoll.engines.elastic.state_digest import check_elastic, digest_of
from atoll.engines.elastic.state_version import NOTHING, Generation
from atoll.engines.elastic.update_validation import Judge
from atoll.engines.processes.communication_thread import CommunicationThread
from atoll.engines.processes.replica import ProcessReplica
from atoll.engines.replicated_state import shared_fields, trees_to_device, with_shared
from atoll.engines.round_record import ComputeRecord, RoundRecord
from atoll.engines.wall_clock import WallClock
from atoll.replica.local_replica import LocalReplica

_ANEW = 1 << 20
"""Epochs: where nothing fails a commit takes at most 256, so that 4,096 commits after a checkpoint do not take more."""


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
        committed: called after each commit, with this engine. It says when others find the state: see `published`.
        heal: brings this engine up to date from another island, or from a checkpoint. It is told what the others hold.
        confirm: finds out whether anybody went on from the state that this engine was given.
        written: tells up to which generation this island has written the run's log.
        pause_s: so long this process sleeps for each batch besides computing it.
        busy: whether somebody reads the state that was committed last: then its buffers are not used again.
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
        written: Callable[[], Generation] = lambda: NOTHING,
        pause_s: float = 0.0,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pier = pier
        self.name, self.algorithm, self._planned, self._pause_s = name, algorithm, islands, pause_s
        self._meetings, self._batches, self._make_replica = meetings, batches, make_replica
        self._alive, self._committed, self._heal, self._confirm, self._busy = alive, committed, heal, confirm, busy
        self.clock = WallClock()
        self.generation = Generation(0, 0)
        self._chronicle = Chronicle()
        self._judge = Judge(most)
        self.per_round = algorithm.steps_per_round * getattr(algorithm, "accumulation", 1)
        rounds = -(-steps // algorithm.steps_per_round)
        self.leases = Leases(shards=batches.num_shards, batches=self.per_round, units=rounds * islands)
        self.replica = make_replica()
        self._line = CommunicationThread(self.replica.device)
        self.peers = ElasticPeers(meetings, self._line, self._judge, self.clock, home=home, pier=pier, written=written)
        self.state = algorithm.init(params.copy(), self.peers)
        check_elastic(algorithm, self.state)
        self._diary = RoundRecord()
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
    def accounting(self) -> RunAccounting:
        return self._chronicle.accounting

    @property
    def was_given(self) -> bool:
        """Whether it was given the state that it holds, and has not committed since."""
        return not self._meetings.vouched

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
        """What is said to whoever asks: whether a commit may follow at any moment, whether this island has committed the state that
        it holds, and whom it could not do with."""
        meetings = self._meetings
        return {"exchanging": meetings.exchanging, "vouched": meetings.vouched, "blames": sorted(meetings.blames)}

    def close(self, *, wait: bool = True) -> None:
        self._line.close(wait=wait)

    def expect(self, fellows: Mapping[str, str]) -> None:
        """These are here too, at these piers, and are waited for if they are alive."""
        self._meetings.fellows = {name: pier for name, pier in fellows.items() if name != self.name}

    @property
    def fellows(self) -> Mapping[str, str]:
        """Who took part in the last commit, and where each can be asked."""
        return self._meetings.fellows

    def published(self) -> None:
        """The state that was committed last is where others find it: whoever waits for it need not wait until it is written too."""
        self._meetings.exchanging = False

    def begin_anew(self) -> None:
        """Nobody is at work: what a checkpoint says is leased comes back.

        What was committed after it, and died with those who had it, must never be taken for what is committed from now on: so
        epochs go on far from theirs.
        """
        self._listens = False
        self.generation = Generation(self.generation.round, self.generation.epoch + _ANEW)
        self.leases.settle(())
        self._meetings.fellows, self._meetings.vouched = {}, True
        self._digest = self._digested()

    def _open(self) -> None:
        """Those who are here begin together."""
        self.peers.begin(self.generation, self._digest, None, self._work, RoundRecord())
        met = self.peers.assemble()
        self.generation = Generation(self.generation.round, met.epoch)
        self.clock.set(met.result.now_s)
        self._chronicle.begin(met.result.now_s)
        self._gather(met)
        self.leases.lease(met.names)
        self._digest = self._digested()
        self._report(met, opening=True)

    # ---------------------------------------------------------------------------------------------------------------- a round

    def _play_round(self) -> None:
        before, unit = self.state, None if self._listens else self.leases.out.get(self.name)
        self._diary = RoundRecord()
        self.peers.begin(self.generation, self._digest, unit, self._work, self._diary)
        coroutine = self.algorithm.round(before, self._replica_for(unit), self.peers)
        after = self._line.run(coroutine)
        met = self.peers.met
        if met is None:
            raise ConfigError(f"{type(self.algorithm).__name__} ended a round without a mean, and so without a commit.")
        self._settle(after, met)
        if not self._busy():
            recycle([before, met.result.value], [after])

    def _replica_for(self, unit: Unit | None) -> Any:
        if unit is None:
            return IdleReplica(self.params)
        return ProcessReplica(
            self.replica, clock=self.clock, on_computed=self._computed, pause_s=self._pause_s, allow_nonfinite=True
        )

    def _computed(self, stretch: ComputeRecord) -> None:
        self._diary.computed.append(stretch)

    def _work(self, unit: Unit | None) -> Work:
        unit = unit or Unit(0, 0, self.per_round)
        return Work(unit.shard, unit.start, self.steps_taken, self._batches.examples(unit.shard))

    def _settle(self, after: Any, met: Met[Agreed]) -> None:
        """The commit: from here on this is the state."""
        agreed, number = met.result, self.generation.round + 1
        if self.name in met.apart:  # its work counts, and what it makes of all of it does not
            self._meetings.exchanging = False
            raise LeftBehind(Generation(number, met.epoch), APART)
        self.state = after
        self.generation = Generation(number, met.epoch)
        self._judge.remember(agreed.brought, agreed.refused)
        self._gather(met)
        settled = self.leases.settle(agreed.delivered(met.names), [met.names[rank] for rank in agreed.refused])
        self._chronicle.enter(met, settled, self.steps_taken, number)
        self.leases.lease(met.names)
        self.leases.check()
        self._digest = self._digested()
        self._chronicle.attend(met, settled, number, alive=self._alive(), digest=self.digest)
        if self.name in [met.names[rank] for rank in agreed.refused]:
            self.replica = self._make_replica()  # its moments are as unusable as what it brought
        self._check(after, settled)
        self._report(met)

    def _gather(self, met: Met[Agreed]) -> None:
        """These are here now, and this island is one of them."""
        self._chronicle.gather(met, self.generation.round)
        self.expect({name: told.pier for name, told in zip(met.names, met.result.told, strict=True)})
        self._listens = False
        self.peers.given(None, 0)

    def _check(self, after: Any, settled: Settled) -> None:
        self._fruitless = 0 if settled.delivered else self._fruitless + 1
        if self._fruitless == MAX_SKIPPED:
            raise TrainingDiverged(f"{MAX_SKIPPED} rounds in a row brought nothing that could be taken. Lower the learning rate.")
        if not after.params.is_finite():
            raise TrainingDiverged(
                f"the global weights are no longer finite after round {self.generation.round}, though every delta was. Lower the "
                f"outer learning rate, or set train.clip_norm."
            )

    def _report(self, met: Met[Agreed], *, opening: bool = False) -> None:
        self._committed(self, Commit(met, self._chronicle.take(), opening))

    # ---------------------------------------------------------------------------------------------------------------- saving

    def _digested(self) -> int:
        return digest_of(self.shared(), self._alike())

    def _alike(self) -> dict[str, Any]:
        """All that islands hold alike, but for the algorithm's state. The books are drawn up from it, and follow."""
        return {"leases": self.leases.to_parts(), "judge": self._judge.to_parts(), **self._chronicle.to_parts()}

    def plain(self) -> dict[str, Any]:
        """All of the state but the algorithm's. Between two rounds only."""
        return {
            **self._alike(),
            "generation": list(self.generation),
            "wall_time_s": self.clock.now_s(),
            "fellows": {**self._meetings.fellows, self.name: self._pier},
            "fruitless": self._fruitless,
            "digest": self.digest,
        }

    def shared(self) -> dict[str, Any]:
        """What the algorithm shares."""
        return shared_fields(self.state)

    def restore(self, plain: Mapping[str, Any], shared: Mapping[str, Any], donor: str | None = None, nbytes: int = 0) -> None:
        """Go on from a state that was committed.

        Args:
            plain: as another engine has told it.
            shared: the algorithm's part of it.
            donor: the island that has given it, if one has.
            nbytes: that it sent.

        Raises:
            ExchangeFailed: this is not what was committed. Nothing has changed.
        """
        shared = trees_to_device(dict(shared), self.replica.device)
        if (found := f"{digest_of(shared, plain):08x}") != plain["digest"]:
            raise ExchangeFailed(
                f"the state that {donor or 'a checkpoint'} has of round {plain['generation'][0]} is damaged: it was committed as "
                f"{plain['digest']}, and is {found}. Use another's."
            )
        self._listens = True
        self.generation = Generation(*plain["generation"])
        self.clock.set(plain["wall_time_s"])
        self.leases.from_parts(plain["leases"])
        self._judge.from_parts(plain["judge"])
        self._chronicle.from_parts(plain, plain["wall_time_s"])
        self._fruitless = plain["fruitless"]
        self.expect(plain["fellows"])
        self.peers.given(donor, nbytes)
        self._meetings.vouched = False
        self.state = with_shared(self.algorithm.init(self.params, self.peers), shared)
        self._digest = self._digested()
