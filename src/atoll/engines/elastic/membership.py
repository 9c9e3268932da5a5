"""Which islands form a quorum: torchft's lighthouse finds them, a failure monitor drops dead ones, and a vote evicts faulty ones.

Of torchft this uses the servers that send heartbeats and form quorums. It does not use torchft's Manager class: that class
identifies states by a step number alone, so two islands that took one step in different quorums would both count as valid; and it
makes the quorum wait while one island recovers.
"""

from __future__ import annotations

import gc
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for_any
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.elastic.direct_network import QUERY_S, DirectNetwork
from atoll.engines.elastic.quorum import Member, Quorum, ended_among
from atoll.engines.elastic.retry import retry
from atoll.engines.elastic.snapshot_server import IslandStatus, SnapshotServer, query_islands, query_status
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.liveness import log_while_waiting
from atoll.engines.network_interfaces import LOOPBACK
from atoll.engines.point_to_point import first_sentence
from atoll.engines.rank_store import open_store
from atoll.engines.socket_transport import SocketGroup, connect_group

_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT_LIMIT = timedelta(seconds=10)
_RETRY_S, _MOVE_POLL_S = 0.2, 0.5
_QUERIES = 64
"""Status queries at once, of members with one name."""
_QUORUM_RETRIES = 1000
"""Of torchft's manager while the lighthouse is away. Without retries it never answers a request that the lighthouse died over."""
_UNREACHABLE = "255.255.255.255"  # TCP refuses it at once, and no name server is asked
_GlooOptions: Any = getattr(dist.ProcessGroupGloo, "_Options")  # noqa: B009 (torch's stubs lack it)


def _random_loopback() -> str:
    """One of the 2^24 loopback addresses. Linux has all of them, and elastic runs need Linux."""
    return f"127.{secrets.randbelow(256)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"


class MembershipLost(ExchangeFailed):
    """This island cannot take part in any quorum again, and ends."""


class Evicted(MembershipLost):
    """A quorum that failed again and again goes on without this island, whose links to `unreachable` are faulty."""

    def __init__(self, why: str, unreachable: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.unreachable = tuple(unreachable)


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
        self._manager_host = _random_loopback()
        self._ignored: set[str] = set()
        self._server: Any = None
        self._client: Any = None
        self._group: dist.ProcessGroupGloo | SocketGroup | None = None
        self._quorum_key: tuple[Any, ...] = ()
        self._connected_key: tuple[Any, ...] = ()
        """Identify the last quorum, and the quorum that the process group belongs to."""

    def ended(self, members: Collection[str]) -> set[str]:
        """Those of these members that are known to have ended: it was reported, or they were on this machine and
        connections to their address are refused."""
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
        self._client = coordination.ManagerClient(f"http://{self._manager_host}:{port}", connect_timeout=_CONNECT_LIMIT)

    def _manager_server(self, coordination: Any) -> Any:
        status = self._status
        run_id, port = self.network.run_id, self._store_port
        member = Member(status.name, status.address, status.has_folder, time.time(), port, run_id, status.process)
        self._own_id = self._status.member = member.to_replica_id()
        return coordination.ManagerServer(
            replica_id=self._own_id,
            lighthouse_addr=f"http://{self._lighthouse}",
            # Only this island talks to its manager. The lighthouse's web page has a button that kills the island of a manager, so
            # the lighthouse gets no address that it could dial. It also dials what other members register as theirs: they would
            # have to guess this address.
            hostname=_UNREACHABLE,
            bind=f"{self._manager_host}:0",
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
        self._status.member = ""
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
        members = self._without_impostors(members)
        if new := {*named} - members.keys() - self._ignored:
            self._log(
                f"ignores members of the quorum that are no islands of this run: {', '.join(repr(i[:60]) for i in sorted(new)[:5])}"
            )
            self._ignored |= new
        if self._own_id not in members:
            raise ExchangeFailed(f"{self._status.name} is not in the quorum that it asked for")
        return tuple(members.values()), [*members].index(self._own_id)

    def _without_impostors(self, members: dict[str, Member]) -> dict[str, Member]:
        """Leave out members with the name of another one that do not answer at their address, or answer there with another id. Each
        island knows its own id, so no member that claims its name can have it leave the run."""
        counts = Counter(member.name for member in members.values())
        asked = [one for one, member in members.items() if counts[member.name] > 1 and one != self._own_id]
        if not asked:
            return members

        def answer(one: str) -> str | None:
            status = query_status(members[one].name, members[one].address, QUERY_S, self.network)
            return None if status is None else status.member

        with ThreadPoolExecutor(min(len(asked), _QUERIES)) as pool:
            answers = {**dict(zip(asked, pool.map(answer, asked), strict=True)), self._own_id: self._own_id}
        proven = {member.name for one, member in members.items() if answers.get(one) == one}
        # One that has just left its quorum answers with an empty id: the other members may have asked it before.
        return {one: member for one, member in members.items() if member.name not in proven or answers.get(one, one) in (one, "")}

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
        addresses, run = {member.name: member.address for member in quorum.members}, self.network.run_id

        def dial(name: str, limit_s: float) -> socket.socket:
            try:
                return self.network.dial(addresses[name], limit_s)
            except ConfigError as error:  # the gateway refuses this island
                raise ConnectionError(str(error)) from error

        if only_sockets:
            return connect_group(quorum.names, quorum.rank, quorum.key, dial, server.accepted, limit_s, self._relayed, run)
        # Members that try gloo first find a connection of this quorum when they give it up: lower ranks dial none otherwise.
        notices = [self._notice(quorum, member) for rank, member in quorum.others.items() if rank > quorum.rank]
        try:
            return connect_group(quorum.names, quorum.rank, quorum.key, dial, server.accepted, 2 * limit_s, self._relayed, run)
        finally:
            for notice in notices:
                if notice is not None:
                    notice.close()

    def _notice(self, quorum: Quorum, member: Member) -> socket.socket | None:
        """A connection that notifies a member of an exchange over sockets; None if the member cannot be reached directly."""
        if member.name in self._relayed:
            return None
        with suppress(OSError):
            notice = self.network.dial(member.address, QUERY_S)
            notice.sendall(f"exchange {quorum.key} {quorum.rank} {self.network.run_id}".strip().encode() + b"\n")
            return notice
        return None

    def _gloo_group(self, quorum: Quorum, limit: timedelta) -> dist.ProcessGroupGloo:
        address, _, prefix = quorum.store.partition("/")
        host, _, port = address.rpartition(":")
        host = LOOPBACK if host.startswith("island:") else host  # all members are on the gateway's machine
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
