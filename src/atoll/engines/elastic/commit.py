"""A meeting: all islands that are there do something together, wholly or not at all.

They find each other, say which state they hold, and leave out those who hold an older one. What they do then is over when
everybody has heard from everybody that it came to the same. If somebody dies on the way, those who are left meet again and begin
anew; nothing that they hold has changed. An island that has died after it heard from everybody, and before the others did, has a
state that nobody will go on from: they meet again in a later epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.eviction import call, double, who_leaves
from atoll.engines.elastic.failure_detector import Watch
from atoll.engines.elastic.membership import CutOff, Found, Member
from atoll.engines.elastic.state_version import MOST, Generation, Held, epoch_of, sound
from atoll.engines.processes.collectives import GroupCollectives
from atoll.engines.processes.transport import Group
from atoll.engines.wall_clock import ExchangeTimeout

T = TypeVar("T")
_CALL_S, _CONNECT_S, _SILENT_S, _MOST_S = 1.0, 2.0, 6.0, 60.0
"""Islands that were found, or are missed, answer within the first, have connected within the second, and answer within the third
while they exchange; each twice as long after every failure, since a line may be slow, up to the last."""
_VOTE_AFTER = 3
"""Failures of the same islands in a row, before one of them has to leave."""
_AGAIN_S, _MOST_AGAIN_S, _TELL_S = 0.1, 1.0, 10.0


class LeftBehind(Exception):
    """The others hold a newer state than this island, or another one. It needs theirs before it can go on.

    Args:
        ahead: what they hold.
        why: it is so, in words.
    """

    def __init__(self, ahead: Generation, why: str) -> None:
        super().__init__(why)
        self.ahead = ahead


APART = "it holds other bits than the others: they compute otherwise than it does, on another kind of machine"


class Unvouched(Exception):
    """Nobody here has committed the state that all hold: they were given it by islands that are gone, and perhaps went on."""


class Disagreed(Exception):
    """Islands have not come to the same: a message was damaged, or one of them computes wrongly. They meet again.

    Args:
        why: in words.
        who: the islands to or from which messages were damaged, as far as this one knows.
    """

    def __init__(self, why: str, who: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.who = who


class Absent(Exception):
    """Somebody is alive, and not in this meeting; or is in it, and about to leave."""


@dataclass(frozen=True)
class Met(Generic[T]):
    """What a meeting came to.

    Attributes:
        names: of the islands that met, in rank order.
        behind: those that were left out, since they hold an older state, or one that they were given with other bits.
        apart: of those that met, who hold other bits: each has to be given the others' state afterwards.
        epoch: of the meeting.
        attempts: it took.
        result: of what they did.
    """

    names: tuple[str, ...]
    behind: tuple[str, ...]
    apart: tuple[str, ...]
    epoch: int
    attempts: int
    result: T


class Finds(Protocol):
    """Finds the islands that are there, as a Membership does."""

    def find(self, generation: Generation, failures: int) -> Found: ...

    def connect(self, found: Found, limit_s: float) -> Group: ...

    def abort(self) -> None: ...


class Meetings:
    """All meetings of one island.

    Args:
        membership: finds the others.
        limit: of exchanges.
        say: takes what a person may want to know.
        patience_s: how long a fellow is waited for that is alive and does not come.
    """

    def __init__(
        self, membership: Finds, limit: ExchangeTimeout, say: Callable[[str], object], *, patience_s: float = 600.0
    ) -> None:
        self.fellows: Mapping[str, str] = {}
        """Who took part in the last commit, and where each can be asked whether it is alive."""
        self._patience_s = patience_s
        self._membership, self._limit, self.say = membership, limit, say
        self.wasted_bytes = self.wasted_control_bytes = 0
        """Sent in attempts of this meeting that have failed."""
        self.blames: frozenset[str] = frozenset()
        """Whom this island could not do with since the last commit."""
        self.exchanging = False
        """Whether islands have met, and a new state may follow at any moment. After a meeting that succeeded it is so until whoever
        held it has put the new state where others find it, and says so here."""
        self.told: Sequence[Sequence[float]] = ()
        """What each of those who act has told of the state that it holds: in the end they make sure that all heard the same."""
        self._tried = 0
        """The last epoch that this island took part in."""
        self.vouched = True
        """Whether this island has committed the state that it holds, or knows that nobody has gone on from it."""
        self._failures = 0
        """Since the last commit."""
        self._company: tuple[Member, ...] = ()
        self._in_a_row = 0
        """Who was found last, and how often they have failed in a row."""

    def hold(
        self, generation: Generation, digest: int, act: Callable[[GroupCollectives, tuple[str, ...]], T], *, opening: bool = False
    ) -> Met[T]:
        """Do something with all who are there and hold the same state.

        Args:
            generation: that this island holds.
            digest: of it: those who hold the same generation hold the same bits, or the fewer of them are left out.
            act: what is done, with a wire to those who do it, by their names. It begins anew whenever it is called. It ends when
                all have told each other that they came to the same.
            opening: it is no round, but what comes before one. Others who are in a round go on without this island.

        Raises:
            LeftBehind: the others go on without this island.
            Unvouched: nobody here can tell whether this is the newest state.
            CutOff: this island cannot take part any more.
        """
        self._failures = self._in_a_row = self.wasted_bytes = self.wasted_control_bytes = 0
        began_s = told_s = time.monotonic()
        pause_s = _AGAIN_S
        while True:
            try:
                return self._attempt(Holding(generation, digest, opening), act, began_s)
            except CutOff:
                raise
            except Absent as absent:
                failed, why = False, str(absent)
            except (ExchangeFailed, Disagreed) as error:
                failed, why = True, str(error)
            if failed:
                # Not while the error is handled: its trace holds the connections, which are closed when nobody holds them.
                self._membership.abort()
                self._failures, self._in_a_row = self._failures + 1, self._in_a_row + 1
                words = f"attempt {self._failures} of round {generation.round} has failed, and those who are left meet again"
                self.say(f"{words}: {why}")
                self._limit.restart()
                continue
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                self.say(why)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_AGAIN_S)

    def _attempt(self, mine: Holding, act: Callable[[GroupCollectives, tuple[str, ...]], T], began_s: float) -> Met[T]:
        found = self._membership.find(mine.generation, self._failures)
        _check_names(found)
        self._look_for_fellows(mine.generation, found.names, began_s)
        limit_s = _CONNECT_S if found.connected else self._call(found)
        group = self._membership.connect(found, limit_s)
        wire = GroupCollectives(group, timeout_s=self._limit.start(), names=found.names)
        self.exchanging = True
        others = {rank: member for rank, member in enumerate(found.members) if rank != found.rank}
        watch = Watch(others, group, self._tolerant(_SILENT_S))
        try:
            with watch:
                met = self._meet(wire, watch, found, mine, act)
        except BaseException as error:
            self.exchanging = False
            self.wasted_bytes += wire.sent_bytes
            self.wasted_control_bytes += wire.control_bytes
            self.blames |= {*(error.who if isinstance(error, Disagreed) else ()), *([watch.lost] if watch.lost else ())}
            if watch.lost and isinstance(error, ExchangeFailed):
                raise ExchangeFailed(f"{watch.lost} has not answered for {self._tolerant(_SILENT_S):.0f} s") from error
            raise
        self._limit.finish()
        self.blames = frozenset()
        self.vouched = True
        return met

    def _meet(
        self,
        wire: GroupCollectives,
        watch: Watch,
        found: Found,
        mine: Holding,
        act: Callable[[GroupCollectives, tuple[str, ...]], T],
    ) -> Met[T]:
        """All tell what they hold, and those who hold the same act."""
        generation = mine.generation
        self._tried = max(self._tried, generation.epoch)
        told = wire.all_gather_numbers(
            generation.round, generation.epoch, not mine.opening, self._tried + 1, mine.digest, self.vouched, found.me.home
        )
        damaged = [name for name, row in zip(found.names, told, strict=True) if not _is_a_state(row)]
        if damaged:
            raise Disagreed(f"what {', '.join(damaged)} told of its state is none: it was damaged on the way", damaged)
        held = [Held(tuple(map(int, row[:3])), int(row[4]), bool(row[5]), bool(row[6])) for row in told]
        these, apart = sound(held)
        first = int(max(told[rank][3] for rank in (*these, *apart)))
        # How far an island moved says as much where its bits are others, if they are of its own making.
        apart = [rank for rank in apart if held[rank].vouched]
        if found.rank not in (*these, *apart):
            ahead = Generation(*held[these[0]].state[:2])
            raise LeftBehind(ahead, APART if ahead == generation else f"the others hold {ahead}, and this island {generation}")
        if not any(held[rank].vouched for rank in these):
            raise Unvouched
        out = [rank for rank in range(wire.size) if rank not in (*these, *apart)]
        wire.remove(out)
        watch.leave_out(out)
        names = tuple(name for rank, name in enumerate(found.names) if rank not in out)
        self.told = [row for rank, row in enumerate(told) if rank not in out]
        epoch = self._tried = epoch_of(names, first)
        result = act(wire, names)
        behind, others = (tuple(found.names[rank] for rank in ranks) for ranks in (out, apart))
        return Met(names, behind, others, epoch, self._failures + 1, result)

    # ------------------------------------------------------------------------------------------------------------- who is here

    def _look_for_fellows(self, generation: Generation, here: Sequence[str], began_s: float) -> None:
        """A lighthouse that was just started knows nobody, and may find one island a company of its own while another is alive and
        about to come: then both would go on alone. So whoever is missed is asked itself. Of one that is ahead this island needs the
        state."""
        missed = [Member(name, pier, False, 0.0) for name, pier in self.fellows.items() if name not in here]
        for name, said in call(missed, self._tolerant(_CALL_S)).items():
            if said["generation"] > generation.number:
                theirs = Generation.of(said["generation"])
                raise LeftBehind(theirs, f"{name} holds {theirs}, and this island {generation}")
            if said["generation"] == generation.number and time.monotonic() - began_s < self._patience_s:
                raise Absent(f"{name} is alive and has not come to this meeting yet. It is waited for.")

    def _call(self, found: Found) -> float:
        """Before they connect, which needs all of them: whoever has died since it was found is missed here, at once.

        Returns how long it may take to connect.
        """
        if found.members != self._company:
            self._company, self._in_a_row = found.members, 0
        began_s = time.monotonic()
        answers = call(found.others, self._tolerant(_CALL_S))
        took_s = time.monotonic() - began_s
        silent = [member.name for member in found.others if member.name not in answers]
        self.blames |= set(silent)
        if self._in_a_row >= _VOTE_AFTER:
            self._in_a_row = 0
            self._vote(found, {found.me.name: self.blames, **{name: said.get("blames", ()) for name, said in answers.items()}})
        if silent:
            raise ExchangeFailed(f"{', '.join(silent)} came to this meeting, and cannot be asked whether it is there")
        return self._tolerant(_CONNECT_S + 10 * took_s)

    def _vote(self, found: Found, blames: Mapping[str, Collection[str]]) -> None:
        """One of those who cannot come to anything has to leave. All who can be asked find the same one."""
        leaves = who_leaves(found.members, blames)
        others = ", ".join(member.name for member in found.members if member is not leaves)
        if leaves is found.me:
            raise CutOff(
                f"{leaves.name} and {others} have failed {_VOTE_AFTER} times in a row, and {leaves.name} is the one most could "
                f"not do with, or else the last that came: they go on without it. See that all of them reach each other on any "
                f"port, {leaves.name} at {leaves.pier.rpartition(':')[0]}, and that its line changes no bits. Then start it again."
            )
        self.say(
            f"{leaves.name} is left out: all who are here have failed {_VOTE_AFTER} times in a row, and it is the one that most "
            f"could not do with, or else the last that came"
        )
        raise Absent(f"{leaves.name} was left out, and has not gone yet.")

    def _tolerant(self, seconds: float) -> float:
        return min(seconds * 2.0**self._failures, _MOST_S)


class Holding(NamedTuple):
    """What this island brings to a meeting."""

    generation: Generation
    digest: int
    opening: bool


def _check_names(found: Found) -> None:
    """Data are leased by names: of two islands of one name the later leaves."""
    later = double(found.members)
    if later is not None and later is found.me:
        raise CutOff(f"another island is called {later.name} too, and was here before. Give this one a name of its own.")
    if later is not None:
        raise Absent(f"there are two islands called {later.name}. The later one leaves.")


def _is_a_state(row: Sequence[float]) -> bool:
    """Whether an island can hold what is told here: rounds and epochs have no more bits. Else one that was damaged would be later
    than any other, and stay so; what is damaged less is found by the vote."""
    return all(map(math.isfinite, row)) and all(0 <= number < MOST for number in (row[0], row[1], row[3]))
