"""Who meets: torchft's manager and lighthouse find the islands that are there, and its process group is made anew for them.

Of torchft's parts these are used: the servers that send heartbeats and find a quorum, and the process group that can be
reconfigured. Its Manager class is not: it tells states apart by a step number alone, so that two islands that took the same step in
different company both count as sound; and it heals an island while the others wait.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.elastic.registry import open_store
from atoll.engines.elastic.state_version import Generation
from atoll.engines.elastic.wait_log import reminding
from atoll.engines.processes.transport import first_sentence

_BEAT = timedelta(milliseconds=100)
_ANSWER = timedelta(seconds=10)
"""Of the lighthouse, when it is first connected to."""
_AGAIN_S = 0.2
_RETRIES = 1000
"""While the lighthouse is away. Without any, a question that it died over is never answered."""


class CutOff(ExchangeFailed):
    """This island cannot meet the others any more, and ends."""


@dataclass(frozen=True)
class Member:
    """An island, as all others know it before they have met: what it is called at the lighthouse says it.

    Attributes:
        name: of the island.
        pier: where it can be asked.
        home: whether it has the run's folder.
        came_s: when it joined, by its own clock.
    """

    name: str
    pier: str
    home: bool
    came_s: float

    def to_id(self) -> str:
        """Unlike any other: the pier is this process's alone, and the time tells its visits apart.

        >>> member = Member("b", "192.0.2.7:4711", True, 12.5)
        >>> member.to_id(), Member.of(member.to_id()) == member
        ('b:192.0.2.7:4711:home:12.5', True)
        """
        return f"{self.name}:{self.pier}:{'home' if self.home else 'away'}:{self.came_s!r}"

    @staticmethod
    def of(text: str) -> Member:
        name, _, rest = text.partition(":")
        pier, home, came_s = rest.rsplit(":", 2)
        return Member(name, pier, home == "home", float(came_s))


@dataclass(frozen=True)
class Found:
    """Islands that the lighthouse sends to one meeting.

    Attributes:
        members: in rank order.
        rank: of this one.
        place: where they connect, known to nobody else.
        connected: whether they still are, from the last meeting.
    """

    members: tuple[Member, ...]
    rank: int
    place: str
    connected: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def me(self) -> Member:
        return self.members[self.rank]

    @property
    def others(self) -> tuple[Member, ...]:
        return tuple(member for rank, member in enumerate(self.members) if rank != self.rank)


class Membership:
    """One island's membership.

    Args:
        name: of the island, unlike all others'.
        host: the address by which others reach this machine.
        lighthouse: its address.
        pier: where this island can be asked.
        home: whether it has the run's folder.
        limit_s: how long the lighthouse is waited for when it does not answer.
        say: takes what a person may want to know.
    """

    def __init__(
        self, name: str, host: str, lighthouse: str, *, pier: str, home: bool, limit_s: float, say: Callable[[str], object]
    ) -> None:
        self._name, self._host, self._lighthouse, self._limit_s, self._say = name, host, lighthouse, limit_s, say
        self._pier, self._home = pier, home
        self._store: TCPStore
        self._store, self._store_port = open_store(host)
        self._server: Any = None
        self._client: Any = None
        self._group: Any = None
        self._found: tuple[Any, ...] = ()
        self._connected: tuple[Any, ...] = ()
        """Which quorum was found last, and which one the group is of."""

    def join(self) -> None:
        """From now on this island is alive, and others wait for it."""
        if self._server is not None:
            return
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="islands that come and go")
        with reminding(self._say, f"the lighthouse at {self._lighthouse} does not answer yet"):
            self._server = self._trying(lambda: self._serve(coordination))
        self._client = coordination.ManagerClient(self._server.address(), connect_timeout=_ANSWER)

    def _serve(self, coordination: Any) -> Any:
        return coordination.ManagerServer(
            replica_id=Member(self._name, self._pier, self._home, time.time()).to_id(),
            lighthouse_addr=f"http://{self._lighthouse}",
            hostname=self._host,
            bind=f"{self._host}:0",
            store_addr=f"{self._host}:{self._store_port}",
            world_size=1,
            heartbeat_interval=_BEAT,
            connect_timeout=min(_ANSWER, timedelta(seconds=self._limit_s)),
            quorum_retries=_RETRIES,
        )

    def leave(self) -> None:
        """Others do not wait for this island any more."""
        if self._server is not None:
            self._server.shutdown()
        self._server = self._client = None
        self.abort()

    def abort(self) -> None:
        """What is under way has failed: end it, so that the others notice."""
        self._connected = ()
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(RuntimeError):
            group.abort()
        # gloo closes its connections when the last one who holds them lets go, and errors that were passed on hold each other:
        # until they are collected the others would wait for this island, whoever it was that died.
        del group
        gc.collect()

    def find(self, generation: Generation, failures: int) -> Found:
        """All who are there. It waits for those who are alive and still train.

        Args:
            generation: of this island.
            failures: attempts in a row that have failed since the last commit. Whoever has any is sent to another place
                than before, and all others with it.

        Raises:
            CutOff: the lighthouse does not answer.
        """
        with reminding(self._say, "waiting for the other islands to come to this round's meeting"):
            found = self._trying(lambda: self._quorum(generation, failures))
        # A lighthouse that was started anew counts from the beginning: the state that all are at tells its quorums apart.
        place = f"{found.store_address}/{found.max_step}/{found.quorum_id}"
        members = tuple(map(Member.of, found.replica_ids))
        self._found = (found.quorum_id, found.store_address, members)
        return Found(members, found.replica_rank, place, connected=self._connected == self._found)

    def _quorum(self, generation: Generation, failures: int) -> Any:
        return self._client._quorum(
            group_rank=0,
            step=generation.number,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=self._limit_s),
            commit_failures=failures,
            init_sync=False,
        )

    def connect(self, found: Found, limit_s: float) -> dist.ProcessGroupGloo:
        """What carries the messages of those who were found.

        Raises:
            ExchangeFailed: somebody could not be connected to within the limit. Meet again.
        """
        if not found.connected:
            self.abort()
            self._group = _group_class()(self._host, timedelta(seconds=limit_s))
            try:
                self._group.configure(found.place, self._name, found.rank, len(found.members))
            except Exception as error:  # torchft raises what it comes across
                self.abort()
                raise ExchangeFailed(
                    f"{self._name} could not connect to all of {', '.join(found.names)} within {limit_s:.1f} s: "
                    f"{first_sentence(str(error))}. One of them has died since they met, or cannot be reached"
                ) from error
            self._connected = self._found
        return self._backend()

    def _backend(self) -> dist.ProcessGroupGloo:
        backend: dist.ProcessGroupGloo = self._group.parent._get_backend(torch.device("cpu"))
        return backend

    def _trying(self, call: Callable[[], Any]) -> Any:
        """Until it succeeds: the lighthouse may be away for a while."""
        deadline_s = time.monotonic() + self._limit_s
        while True:
            try:
                return call()
            except Exception as error:  # of the manager's own kinds
                if time.monotonic() > deadline_s:
                    raise CutOff(
                        f"{self._name} waited {self._limit_s:.0f} s for the lighthouse at {self._lighthouse}: "
                        f"{first_sentence(str(error))}. What was saved stands. Is the run over, or its first machine gone?"
                    ) from error
                time.sleep(_AGAIN_S)


_GlooOptions: Any = getattr(dist.ProcessGroupGloo, "_Options")  # noqa: B009 (torch's stubs do not know it)


def _group_class() -> Any:
    torchft: Any = require("torchft.process_group", extra="torchft", purpose="islands that come and go")

    class Gloo(torchft.ProcessGroupGloo):  # type: ignore[misc]
        """torchft's own, but it listens where it is told to, and not where the machine's name points to."""

        def __init__(self, host: str, limit: timedelta) -> None:
            super().__init__(timeout=limit)
            self._host, self._limit = host, limit

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            options: Any = _GlooOptions()
            options._timeout = self._limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=socket.gethostbyname(self._host))]
            backend = dist.ProcessGroupGloo(store, rank, world_size, options)
            group = dist.ProcessGroup(store, rank, world_size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

    return Gloo
