"""Which islands form a quorum: torchft's lighthouse finds them, a failure monitor drops dead ones, and a vote evicts faulty ones.

Of torchft this uses the servers that send heartbeats and form quorums. It does not use torchft's Manager class: that class
identifies states by a step number alone, so two islands that took one step in different quorums would both count as valid; and it
makes the quorum wait while one island recovers.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait as wait_for_any
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.elastic.snapshot_server import (
    QUERY_S,
    DirectNetwork,
    IslandStatus,
    SnapshotServer,
    query_islands,
    query_status,
)
from atoll.engines.elastic.spec import NAME
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.liveness import FailureDetector, Heartbeat
from atoll.engines.point_to_point import MessageGroup, first_sentence
from atoll.engines.rank_store import open_store
from atoll.engines.socket_transport import SocketGroup, connect_group

WAIT_LOG_S = 10.0
PROBE_S = 1.0
_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT_LIMIT = timedelta(seconds=10)
_RETRY_S, _MOVE_POLL_S = 0.2, 0.5
_QUORUM_RETRIES = 1000
"""Of torchft's manager while the lighthouse is away. Without retries it never answers a request that the lighthouse died over."""
_LOOPBACK, _UNREACHABLE = "127.0.0.1", "255.255.255.255"  # TCP refuses it at once, and no name server is asked
_PROCESS = re.compile(r"[\w.#-]{0,200}", re.ASCII)
"""What identifies a process: a name, a random number and a count."""
_UNUSED_TAG = 1  # messages have tag 0
_GlooOptions: Any = getattr(dist.ProcessGroupGloo, "_Options")  # noqa: B009 (torch's stubs lack it)
T = TypeVar("T")


class MembershipLost(ExchangeFailed):
    """This island cannot take part in any quorum again, and ends."""


class Evicted(MembershipLost):
    """A quorum that failed again and again goes on without this island, whose links to `unreachable` are faulty."""

    def __init__(self, why: str, unreachable: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.unreachable = tuple(unreachable)


@contextmanager
def log_while_waiting(log: Callable[[str], object], what: str, every_s: float = WAIT_LOG_S) -> Iterator[None]:
    """Log what the caller waits for, and for how long it has waited, every so many seconds."""
    repeated = Heartbeat(lambda number: log(f"{what} ({number * every_s:.0f} s)"), interval_s=every_s)
    try:
        yield
    finally:
        repeated.close(wait=True)


def retry(
    call: Callable[[], T],
    kind: type[Exception],
    limit_s: float,
    every_s: float,
    on_error: Callable[[Exception], object] = lambda error: None,
) -> T:
    """Repeat a call until it raises no error of this kind. After `limit_s` its error is raised."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except kind as error:
            if time.monotonic() > deadline_s:
                raise
            on_error(error)
        time.sleep(every_s)


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
        not cross a partition that the islands' own messages do not cross: the dead may have committed beyond it.

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
        return member if is_possible and member.to_replica_id() == text else None


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


class Membership:
    """One island's membership in the run, whose lighthouse and other islands it reaches by `network`. It waits `limit_s` for a
    lighthouse that does not answer.

    Args:
        server: accepts the connections of other members, and relays those of members that do not reach each other; None: members
            exchange over gloo only.
        ended: reads the processes that were reported to have ended.
        sockets: whether members exchange over sockets of their own. Else they do only where gloo cannot connect them, or may not.
    """

    def __init__(
        self,
        status: IslandStatus,
        network: DirectNetwork,
        limit_s: float,
        log: Callable[[str], object],
        server: SnapshotServer | None = None,
        ended: Callable[[], Collection[str]] = frozenset,
        *,
        sockets: bool = False,
    ) -> None:
        self._status, self.network, self._limit_s, self._log = status, network, limit_s, log
        self._host, self._lighthouse = network.host, network.lighthouse
        self._exchange_server, self._sockets = server, sockets
        self._relayed: frozenset[str] = frozenset()
        """Members that this island reaches only through another one."""
        self._failures = 0
        self._reported = ended
        self._moved = threading.Event()
        """Whether the manager sends its heartbeats to another lighthouse than this island's."""
        self._store: TCPStore
        self._store, self._store_port = open_store(self._host)
        self._own_id = ""
        self._ignored: set[str] = set()
        self._server: Any = None
        self._client: Any = None
        self._group: dist.ProcessGroupGloo | SocketGroup | None = None
        self._quorum_key: tuple[Any, ...] = ()
        self._connected_key: tuple[Any, ...] = ()
        """Identify the last quorum, and the quorum that the process group belongs to."""

    def ended(self, members: Collection[str]) -> set[str]:
        """Those of these members that are known to have ended: it was reported, or they were on this machine, whose kernel refuses
        connections to their address."""
        found = ended_among(members, self._reported())
        return found | {one for one in members if one not in found and self.network.refuses(one.rpartition("@")[2])}

    def join(self) -> None:
        """Send heartbeats from now on: other islands wait for this one."""
        if self._server is not None:
            return
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="elastic runs")
        with log_while_waiting(self._log, f"the lighthouse at {self._lighthouse} does not answer yet"):
            self._server = self._retry(lambda: self._manager_server(coordination))
        port = self._server.address().rpartition(":")[2]
        self._client = coordination.ManagerClient(f"http://{_LOOPBACK}:{port}", connect_timeout=_CONNECT_LIMIT)

    def _manager_server(self, coordination: Any) -> Any:
        status = self._status
        run_id, port = self.network.run_id, self._store_port
        member = Member(status.name, status.address, status.has_folder, time.time(), port, run_id, status.process)
        self._own_id = member.to_replica_id()
        return coordination.ManagerServer(
            replica_id=self._own_id,
            lighthouse_addr=f"http://{self._lighthouse}",
            # Only this island talks to its manager. The lighthouse's web page has a button that kills the island of a manager, so
            # the lighthouse gets no address that it could dial.
            hostname=_UNREACHABLE,
            bind=f"{_LOOPBACK}:0",
            store_addr="",
            world_size=1,
            heartbeat_interval=_HEARTBEAT,
            connect_timeout=min(_CONNECT_LIMIT, timedelta(seconds=self._limit_s)),
            quorum_retries=_QUORUM_RETRIES,
        )

    def move(self, lighthouse: str) -> None:
        """Use this lighthouse from now on. A request that waits for the former one is given up, and repeated."""
        self._log(
            f"this island uses the lighthouse at {lighthouse} from now on: the former does not answer, or an earlier one does"
        )
        self._lighthouse = lighthouse
        self._moved.set()

    def leave(self) -> None:
        """Stop the heartbeats: other islands do not wait for this one any more."""
        if self._server is not None:
            self._server.shutdown()
        self._server = self._client = None
        self.abort()

    def abort(self) -> None:
        """Close all connections after a failure, so that the other members notice it."""
        self._connected_key = ()
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(RuntimeError):
            group.abort()
        if isinstance(group, SocketGroup):
            return
        # gloo closes its connections when their last reference goes, and chained exceptions refer to each other: until they are
        # collected the other members would wait for this island, whichever island it was that died.
        del group
        gc.collect()

    def form_quorum(self, version: StateVersion, failures: int) -> Quorum:
        """Wait until all live islands ask for a quorum, including those that still train. After `failures` since the last commit
        the whole quorum connects under a new store prefix. Raises MembershipLost if the lighthouse does not answer."""
        with log_while_waiting(self._log, "waiting for the other islands to finish this round"):
            found = self._retry(lambda: self._request_quorum(version, failures))
        members, rank = self._members(found.replica_ids)
        # A restarted lighthouse counts quorums from the beginning: the members' version distinguishes its quorums from older ones.
        first = members[0]
        store = f"{first.address.rpartition(':')[0]}:{first.store_port}/{found.max_step}/{found.quorum_id}"
        self._quorum_key = (found.quorum_id, store.partition("/")[0], members)
        self._failures = failures
        if self._exchange_server is not None:
            self._exchange_server.routes = {member.name: member.address for member in members if member.name != self._status.name}
        return Quorum(members, rank, store, connected=self._connected_key == self._quorum_key)

    def _members(self, ids: Sequence[str]) -> tuple[tuple[Member, ...], int]:
        """The islands of this run among these ids, in the same order for all of them, and the rank of this one. Any process that
        reaches the lighthouse may have registered the other ids."""
        named = {one: Member.from_replica_id(one) for one in ids}
        members = {one: member for one, member in named.items() if member is not None and member.run == self.network.run_id}
        if new := {*named} - members.keys() - self._ignored:
            self._log(
                f"ignores members of the quorum that are no islands of this run: {', '.join(repr(i[:60]) for i in sorted(new)[:5])}"
            )
            self._ignored |= new
        if self._own_id not in members:
            raise ExchangeFailed(f"{self._status.name} is not in the quorum that it asked for")
        return tuple(members.values()), [*members].index(self._own_id)

    def _request_quorum(self, version: StateVersion, failures: int) -> Any:
        if self._moved.is_set():
            self._moved.clear()
            self.leave()
        self.join()
        client, answer = self._client, Future[Any]()

        def request() -> None:
            try:
                found = client._quorum(
                    group_rank=0,
                    step=version.number,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=timedelta(seconds=self._limit_s),
                    commit_failures=failures,
                    init_sync=False,
                )
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)

        # On a thread of its own: torchft's manager repeats a request to a lighthouse that is lost, and cannot be interrupted.
        threading.Thread(target=request, name="quorum request", daemon=True).start()
        while not wait_for_any([answer], _MOVE_POLL_S).done:
            if self._moved.is_set():
                raise ExchangeFailed(f"the island changed to the lighthouse at {self._lighthouse} while it waited for a quorum")
        return answer.result()

    def query_members(self, quorum: Quorum, limit_s: float) -> dict[str, IslandStatus]:
        """The status of the other members that answer: directly, or through a member that does."""
        answers, found = self._query({member.name: member.address for member in quorum.others.values()}, limit_s)
        if found.keys() != self._relayed and found:
            self._log(f"{', '.join(sorted(found))} cannot be reached from here, and is reached through another island")
        self._relayed = frozenset(found)
        return answers | found

    def query_islands(self, addresses: Mapping[str, str], limit_s: float) -> dict[str, IslandStatus]:
        """The status of the islands at these addresses that answer: directly, or through an island that does."""
        answers, found = self._query(addresses, limit_s)
        return answers | found

    def _query(self, addresses: Mapping[str, str], limit_s: float) -> tuple[dict[str, IslandStatus], dict[str, IslandStatus]]:
        """The status of islands that answer directly, and of others that answer through one of those."""
        answers, found = query_islands(addresses, limit_s, self.network), dict[str, IslandStatus]()
        for name in addresses.keys() - answers.keys() if self._exchange_server is not None else ():
            statuses = (query_status(name, addresses[relay], limit_s, self.network, relayed=True) for relay in answers)
            if (status := next((one for one in statuses if one is not None), None)) is not None:
                found[name] = status
        return answers, found

    def query(self, name: str, address: str, limit_s: float) -> IslandStatus | None:
        """The status of a member, by the way that reached it when the quorum connected."""
        if name not in self._relayed or self._exchange_server is None:
            return query_status(name, address, limit_s, self.network)
        relays = [relay for other, relay in self._exchange_server.routes.items() if other != name and other not in self._relayed]
        statuses = (query_status(name, relay, limit_s, self.network, relayed=True) for relay in relays)
        return next((one for one in statuses if one is not None), None)

    def connect(self, quorum: Quorum, limit_s: float) -> dist.ProcessGroupGloo | SocketGroup:
        """The process group of this quorum. Raises ExchangeFailed if a member cannot be reached within the limit."""
        if self._group is None or not quorum.connected:
            self.abort()
            try:
                self._group = self._new_group(quorum, limit_s)
            except Exception as error:  # torch and gloo raise errors of several kinds
                raise ExchangeFailed(
                    f"{self._status.name} could not connect to all of {', '.join(quorum.names)} within {limit_s:.1f} s: "
                    f"{first_sentence(str(error))}. One of them has died since the quorum was formed, or cannot be reached"
                ) from error
            self._connected_key = self._quorum_key
        return self._group

    def _new_group(self, quorum: Quorum, limit_s: float) -> dist.ProcessGroupGloo | SocketGroup:
        """gloo connects every pair directly. Where it cannot, or another member has found that it cannot, sockets do."""
        server, limit = self._exchange_server, timedelta(seconds=limit_s)
        if server is None:
            return self._gloo_group(quorum, limit)
        only_sockets = self._sockets or not all(self.network.is_trusted(member.address) for member in quorum.members)
        if not (only_sockets or self._relayed or server.accepted.has(quorum.key)):
            try:
                return self._gloo_group(quorum, limit)
            except Exception:
                if not (self._failures or server.accepted.has(quorum.key)):
                    raise
        addresses = {member.name: member.address for member in quorum.members}

        def dial(name: str, limit_s: float) -> socket.socket:
            try:
                return self.network.dial(addresses[name], limit_s)
            except ConfigError as error:  # the gateway refuses this island
                raise ConnectionError(str(error)) from error

        if only_sockets:
            return connect_group(quorum.names, quorum.rank, quorum.key, dial, server.accepted, limit_s, self._relayed)
        # Members that try gloo first find a connection of this quorum when they give it up: lower ranks dial none otherwise.
        notices = [self._notice(quorum, member) for rank, member in quorum.others.items() if rank > quorum.rank]
        try:
            return connect_group(quorum.names, quorum.rank, quorum.key, dial, server.accepted, 2 * limit_s, self._relayed)
        finally:
            for notice in notices:
                if notice is not None:
                    notice.close()

    def _notice(self, quorum: Quorum, member: Member) -> socket.socket | None:
        """A connection that tells a member that this one connects over sockets; None if the member cannot be reached directly."""
        if member.name in self._relayed:
            return None
        with suppress(OSError):
            notice = self.network.dial(member.address, QUERY_S)
            notice.sendall(f"exchange {quorum.key} {quorum.rank}\n".encode())
            return notice
        return None

    def _gloo_group(self, quorum: Quorum, limit: timedelta) -> dist.ProcessGroupGloo:
        address, _, prefix = quorum.store.partition("/")
        host, _, port = address.rpartition(":")
        host = _LOOPBACK if host.startswith("island:") else host  # all members are on the gateway's machine
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        options: Any = _GlooOptions()
        options._timeout = limit
        # It listens on this address, not on the one that the machine's name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=socket.gethostbyname(self._host))]
        return dist.ProcessGroupGloo(PrefixStore(prefix, store), quorum.rank, len(quorum.members), options)

    def _retry(self, call: Callable[[], Any]) -> Any:
        """Repeat a call until it succeeds: the lighthouse may be away for a while."""
        try:
            return retry(call, Exception, self._limit_s, _RETRY_S)  # the manager has errors of its own kinds
        except Exception as error:
            raise MembershipLost(
                f"{self._status.name} waited {self._limit_s:.0f} s for the lighthouse at {self._lighthouse}: "
                f"{first_sentence(str(error))}. Saved checkpoints stand. Is the run over, or its first machine down?"
            ) from error


class QuorumMonitor:
    """The failure detector of one exchange: it probes the members once a second, and aborts the process group when one of them is
    silent for `silent_s`.

    A stopped process, a machine without power and a cut link close no connection: a receiver would wait for as long as an exchange
    may take at all. A late answer counts as an answer, since a link that carries the exchange is slow.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        group: Any,
        silent_s: float,
        query: Callable[[str, str, float], IslandStatus | None] = query_status,
    ) -> None:
        self._members, self._group, self._query = members, group, query
        self._detector: FailureDetector[int] = FailureDetector(silent_s)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._ignored: set[int] = set()
        self.failed: str | None = None
        """The first participant that did not answer."""

    def __enter__(self) -> QuorumMonitor:
        for rank, member in self._members.items():
            threading.Thread(target=self._probe, args=(rank, member), name=f"probe {member.name}", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._over.set()

    def ignore(self, ranks: Collection[int]) -> None:
        """These ranks do not take part in the exchange any more."""
        with self._lock:
            self._ignored.update(ranks)

    def _probe(self, rank: int, member: Member) -> None:
        self._detector.observe(rank, None, time.monotonic())
        while not self._over.wait(PROBE_S):
            answered = self._query(member.name, member.address, self._detector.limit_s) is not None
            now_s = time.monotonic()
            if answered:
                self._detector.observe(rank, now_s, now_s)
            elif not self._detector.is_alive(rank, now_s):
                self._fail(rank, member)
                return

    def _fail(self, rank: int, member: Member) -> None:
        with self._lock:
            if not self._over.is_set() and rank not in self._ignored:
                self.failed = self.failed or member.name
                if isinstance(self._group, MessageGroup):
                    self._group.abort()
                    return
                # gloo's own `abort` wakes no receiver. But when one message times out, gloo gives up all of them: so this waits for
                # a message that no rank sends, from a rank whose connection stands. A receive from a closed connection would give
                # up nothing else.
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))
