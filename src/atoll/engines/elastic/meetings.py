"""A meeting: all islands that are there do something together, wholly or not at all.

They find each other, say which state they hold, and leave out those who hold an older one. What they do then is over when
everybody has heard from everybody that it came to the same. If somebody dies on the way, those who are left meet again and begin
anew; nothing that they hold has changed. An island that has died after it heard from everybody, and before the others did, has a
state that nobody will go on from: they meet again in a later epoch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from atoll.engines.dist.clock import Limit
from atoll.engines.dist.wire import Wire
from atoll.engines.elastic.generation import Generation
from atoll.engines.elastic.membership import Company
from atoll.engines.elastic.pier import ask
from atoll.errors import ExchangeFailed

T = TypeVar("T")
_ASK_S = 0.5
"""Whoever is alive says so within this."""
_AGAIN_S, _TELL_S = 0.1, 2.0


class LeftBehind(Exception):
    """The others hold a newer state than this island, or another one. It needs theirs before it can go on.

    Args:
        ahead: what they hold.
        mine: what this island holds.
    """

    def __init__(self, ahead: Generation, mine: Generation) -> None:
        super().__init__(f"the others hold {ahead}, and this island {mine}")
        self.ahead = ahead


class Unvouched(Exception):
    """Nobody here has committed the state that all hold: they were given it by islands that are gone, and perhaps went on."""


class Disagreed(Exception):
    """Islands have not come to the same: a message was damaged, or one of them computes wrongly. They meet again."""


@dataclass(frozen=True)
class Met(Generic[T]):
    """What a meeting came to.

    Attributes:
        names: of the islands that met, in rank order; left out are those that were behind.
        behind: those.
        epoch: of the meeting.
        attempts: it took.
        result: of what they did.
    """

    names: tuple[str, ...]
    behind: tuple[str, ...]
    epoch: int
    attempts: int
    result: T


class Finds(Protocol):
    """Finds the islands that are there, as a Membership does."""

    def meet(self, generation: Generation, failures: int) -> Company: ...

    def abort(self) -> None: ...


class Meetings:
    """All meetings of one island.

    Args:
        membership: finds the others.
        limit: of exchanges.
        say: takes what a person may want to know.
        patience_s: how long a fellow is waited for that is alive and does not come.
    """

    def __init__(self, membership: Finds, limit: Limit, say: Callable[[str], object], *, patience_s: float = 600.0) -> None:
        self.fellows: Mapping[str, str] = {}
        """Who took part in the last commit, and where each can be asked whether it is alive."""
        self._patience_s = patience_s
        self._membership, self._limit, self.say = membership, limit, say
        self.sent_bytes = self.control_bytes = 0
        """Since the beginning, attempts that failed included."""
        self.exchanging = False
        """Whether islands have met, and a new state may follow at any moment. After a meeting that succeeded it is so until whoever
        held it has put the new state where others find it, and says so here."""
        self._tried = 0
        """The last epoch that this island took part in."""
        self.vouched = True
        """Whether this island has committed the state that it holds, or knows that nobody has gone on from it."""

    def hold(
        self, generation: Generation, digest: int, act: Callable[[Wire, tuple[str, ...]], T], *, opening: bool = False
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
        """
        attempts, began_s = 0, time.monotonic()
        while True:
            attempts += 1
            try:
                return self._attempt(generation, digest, act, attempts, opening, began_s)
            except Absent as absent:
                failed, why = False, str(absent)
            except (ExchangeFailed, Disagreed) as error:
                failed, why = True, str(error)
            # Not while the error is handled: its trace holds the connections, which are closed when nobody holds them.
            self._membership.abort()
            if failed:
                self.say(f"attempt {attempts} of round {generation.round} has failed, and those who are left meet again: {why}")
                self._limit.go_on()
                continue
            attempts -= 1
            if time.monotonic() - began_s > _TELL_S:
                self.say(why)
            time.sleep(_AGAIN_S)

    def _attempt(
        self,
        generation: Generation,
        digest: int,
        act: Callable[[Wire, tuple[str, ...]], T],
        attempts: int,
        opening: bool,
        began_s: float,
    ) -> Met[T]:
        company = self._membership.meet(generation, attempts - 1)
        self._look_for_fellows(generation, company.names, began_s)
        wire = Wire(company.group, limit_s=self._limit.begin(), names=company.names)
        self.exchanging = True
        try:
            self._tried = max(self._tried, generation.epoch)
            told = wire.tell(generation.round, generation.epoch, not opening, self._tried + 1, digest, self.vouched)
            held = [(int(row[0]), int(row[1]), int(row[2])) for row in told]
            ahead = max(held)
            sound = _sound([int(row[4]) if one == ahead else None for one, row in zip(held, told, strict=True)])
            epoch = self._tried = int(max(told[rank][3] for rank in sound))
            behind = [rank for rank in range(wire.size) if rank not in sound]
            if company.rank in behind:
                raise LeftBehind(Generation(*ahead[:2]), generation)
            if not any(told[rank][5] for rank in sound):
                raise Unvouched
            wire.leave_out(behind)
            names = tuple(company.names[rank] for rank in sound)
            result = act(wire, names)
        except BaseException:
            self.exchanging = False
            raise
        finally:
            self.sent_bytes += wire.sent_bytes
            self.control_bytes += wire.control_bytes
        self._limit.end()
        self.vouched = True
        return Met(names, tuple(company.names[rank] for rank in behind), epoch, attempts, result)

    def _look_for_fellows(self, generation: Generation, here: Collection[str], began_s: float) -> None:
        """A lighthouse that was just started knows nobody, and may find one island a company of its own while another is alive and
        about to come: then both would go on alone. So whoever is missed is asked itself."""
        for name, address in self.fellows.items():
            if name in here or time.monotonic() - began_s > self._patience_s:
                continue
            said = ask(address, _ASK_S)
            if said is not None and said["name"] == name and said["generation"] == generation.number:
                raise Absent(f"{name} is alive and has not come to this meeting yet. It is waited for.")


class Absent(Exception):
    """Somebody is alive, and not in this meeting."""


def _sound(digests: Sequence[int | None]) -> list[int]:
    """Who holds what most of those hold who are ahead; of as many, what the first of them holds.

    >>> _sound([None, 5, 7, 5])
    [1, 3]
    """
    counted = Counter(digest for digest in digests if digest is not None)
    most = max(counted.values())
    chosen = next(digest for digest in digests if digest is not None and counted[digest] == most)
    return [rank for rank, digest in enumerate(digests) if digest == chosen]
