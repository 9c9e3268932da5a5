"""The members of a quorum, and the last quorum: who may go on from a state after a network partition."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atoll.engines.elastic.spec import NAME, is_island_address

_PROCESS = re.compile(r"[\w.#-]{0,200}", re.ASCII)
"""What identifies a process: a name, a random number and a count."""


class LastQuorum(NamedTuple):
    """The processes that took part in the commit of a state, in rank order, and the one that led it. Every island replicates it."""

    processes: tuple[str, ...] = ()
    leader: str | None = None

    def allows(self, present: Collection[str], ended: Collection[str] = ()) -> bool:
        """Whether the processes that are present may commit the next round, where those in `ended` are known to have ended.

        A network partition divides the members, and only one side may go on. Members that have ended are on no side. Of the others
        the majority goes on, and of two equal halves the one with the leader; if the leader has ended, the one with the first
        member. Two sides may know of different ends, and still at most one of them may commit: each counts at least the members
        that are alive on both. If all members have ended, any island that fetched their state may go on. A report of an end must
        not cross a partition that the islands' own messages do not cross: the ended members may have committed on the other side.

        >>> last = LastQuorum(("a", "b", "c", "d"), leader="c")
        >>> [last.allows(side) for side in ("ab", "cd", "abd", "c")]
        [False, True, True, False]
        >>> last.allows("ab", ended="c"), last.allows("d", ended="abc"), last.allows("e", ended="abcd")
        (True, True, True)
        """
        live = [one for one in self.processes if one not in ended]
        count = sum(one in present for one in live)
        decides = self.leader if self.leader in live else next(iter(live), None)
        return not live or 2 * count > len(live) or (2 * count == len(live) and decides in present)

    def absent(self, present: Collection[str], ended: Collection[str]) -> list[str]:
        """The names of members that are neither present nor known to have ended."""
        return [process_name(one) for one in self.processes if one not in present and one not in ended]


def new_process(name: str) -> str:
    """The identity of a new process of the island of this name: a restarted island is no member of the quorum that it was in.

    >>> process_name(new_process("island-0000"))
    'island-0000'
    """
    return f"{name}#{secrets.token_hex(8)}"


def process_name(process: str) -> str:
    return process.rpartition("#")[0] or process


def numbered(process: str, number: int) -> str:
    """The process as a member of quorums. A process that is evicted gives its membership up, and returns with the next number."""
    return f"{process}.{number}"


def ended_among(members: Iterable[str], reported: Collection[str]) -> set[str]:
    """The members that have ended: the membership itself was given up, or its process was reported to have ended.

    >>> sorted(ended_among(["a#1.0@x:7", "a#1.1@x:7", "b#1.0@x:8", "c#1.0@x:9"], ["a#1.0", "b#1"]))
    ['a#1.0@x:7', 'b#1.0@x:8']
    """
    processes = {member: member.partition("@")[0] for member in members}
    return {member for member, one in processes.items() if one in reported or one.rpartition(".")[0] in reported}


@dataclass(frozen=True)
class Member:
    """An island as the lighthouse knows it: its replica id there carries all fields. `joined_s` is by the island's own clock."""

    name: str
    address: str
    has_folder: bool
    joined_s: float
    store_port: int = 0  # of the store under which a process group connects, if the island is its first member
    run: str = ""  # the id of the run
    process: str = ""

    @property
    def identity(self) -> str:
        """In a LastQuorum."""
        return f"{self.process}@{self.address}"

    def to_replica_id(self) -> str:
        """A unique id: the address belongs to one process, and the time distinguishes that process's joins.

        >>> member = Member("b", "192.0.2.7:4711", True, 12.5, 4712, "run-1", "b#1f")
        >>> member.to_replica_id(), Member.from_replica_id(member.to_replica_id()) == member
        ('b:192.0.2.7:4711:folder:12.5:4712:run-1:b#1f', True)
        """
        folder = "folder" if self.has_folder else "remote"
        return f"{self.name}:{self.address}:{folder}:{self.joined_s!r}:{self.store_port}:{self.run}:{self.process}"

    @staticmethod
    def from_replica_id(text: str) -> Member | None:
        """The member of this id; None if it is no id of an island.

        >>> Member.from_replica_id("x"), Member.from_replica_id("b:192.0.2.7:4711:folder:nan:4712:run-1:b#1f")
        (None, None)
        """
        try:
            name, _, rest = text.partition(":")
            address, folder, joined_s, store_port, run, process = rest.rsplit(":", 5)
            member = Member(name, address, folder == "folder", float(joined_s), int(store_port), run, process)
        except ValueError:
            return None
        is_possible = NAME.fullmatch(name) and _PROCESS.fullmatch(process) and math.isfinite(member.joined_s)
        is_reached = is_island_address(address, name) and 0 <= member.store_port < 1 << 16
        return member if is_possible and is_reached and member.to_replica_id() == text else None


@dataclass(frozen=True)
class Quorum:
    """Islands that the lighthouse sends to one commit attempt, in rank order. They connect under the prefix `store`, unless the
    process group of the last attempt is still theirs: `connected`."""

    members: tuple[Member, ...]
    rank: int
    store: str
    connected: bool = False

    @property
    def key(self) -> str:
        """Identifies this quorum among the connections of its members."""
        return hashlib.blake2b(f"{self.store} {self.members}".encode(), digest_size=16).hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def own(self) -> Member:
        return self.members[self.rank]

    @property
    def others(self) -> dict[int, Member]:
        return {rank: member for rank, member in enumerate(self.members) if rank != self.rank}

    def choose_eviction(self, suspects: Mapping[str, Collection[str]]) -> Member:
        """The member with most faulty links, which leaves by itself. A link is faulty if either end reports it.

        A link that is cut, that works one way only or that changes bits would stop a quorum for ever, since the lighthouse does not
        know of it and forms the same quorum again. All members that can be queried choose the same member. On a tie an island
        without the run's folder leaves, so that commits are still logged and saved; then the one that joined last.

        >>> a, b, c = Member("a", "", True, 1.0), Member("b", "", False, 2.0), Member("c", "", False, 3.0)
        >>> Quorum((a, b, c), 0, "").choose_eviction({"a": ["b"], "c": ["b"]}).name  # no island reaches b
        'b'
        >>> Quorum((a, b, c), 0, "").choose_eviction({"a": ["b", "c"]}).name  # a reaches no island
        'a'
        >>> Quorum((a, b), 0, "").choose_eviction({"a": ["b"], "b": ["a"]}).name
        'b'
        """
        links = {frozenset((one, other)) for one, others in suspects.items() for other in others if {one, other} <= {*self.names}}
        return max(self.members, key=lambda m: (sum(m.name in link for link in links), not m.has_folder, m.joined_s, m.name))

    def find_duplicate(self) -> Member | None:
        """A member that joined later than another of the same name; None if all names differ.

        >>> a, b, c = Member("a", "x:1", True, 1.0), Member("b", "x:2", True, 1.0), Member("a", "x:3", True, 2.0)
        >>> Quorum((a, b), 0, "").find_duplicate(), Quorum((b, a, c), 0, "").find_duplicate() is c
        (None, True)
        """
        by_age = sorted(self.members, key=lambda member: (member.joined_s, member.address))
        names = [member.name for member in by_age]
        return next((member for at, member in enumerate(by_age) if member.name in names[:at]), None)
