"""The address of an elastic run: torchft's lighthouse, which forms quorums, and the registry of islands beside it.

The registry is a TCPStore. Every island puts its status there twice a second and reads the others'. A joiner learns from it what
the run is and which islands can send a snapshot. No commit depends on it: while the registry is away, training goes on. When the
rendezvous process dies and comes back on the same ports, islands register again. When it is lost for good, islands change to a
standby rendezvous, which a joiner that keeps a copy of the run's folder may run.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.spec import JoinInfo, check_address
from atoll.engines.elastic.state_version import NO_VERSION
from atoll.engines.liveness import FailureDetector, Heartbeat

HEARTBEAT_S = 0.5
UNREGISTERED_S = 3.0
"""An island without a heartbeat for so long counts as dead."""
FORGOTTEN_S = 60.0
"""An island without a heartbeat for so long is not read any more until it registers anew."""
LIGHTHOUSE_TICK_S = 0.02
PROBE_S, SWITCH_S = 1.0, 5.0
"""How often islands probe the run's rendezvous where there are several, and how long a silent one is waited for."""
_MOST_STANDBYS = 16
_JOIN_INFO, _NAMES, _ENDED = "join_info", "names", "ended"
_REQUEST_LIMIT_S = 5.0


def free_port(host: str, wanted: int = 0) -> int:
    """The port that is wanted, if it is free; else another."""
    try:
        with socket.create_server((host, wanted)) as listener:
            return int(listener.getsockname()[1])
    except OSError:
        if not wanted:
            raise
        return free_port(host)


def open_store(host: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store in this process that listens on this address alone, and its port."""
    listener = socket.create_server((host, port), backlog=128)
    port = int(listener.getsockname()[1])
    limit = timedelta(seconds=_REQUEST_LIMIT_S)
    # The store takes over the socket, and closes it.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach())
    return store, port


class Rendezvous:
    """A lighthouse and a registry store, in this process. The registry is at the run's address, and has the `info` for joiners."""

    def __init__(self, info: JoinInfo, address: str) -> None:
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="elastic runs")
        self._lighthouse = coordination.LighthouseServer(
            bind=info.lighthouse,
            min_replicas=1,
            join_timeout_ms=int(info.spec.quorum_timeout_s * 1000),
            quorum_tick_ms=int(LIGHTHOUSE_TICK_S * 1000),
            heartbeat_timeout_ms=int(info.spec.heartbeat_timeout_s * 1000),
        )
        host, _, wanted = address.rpartition(":")
        # After the lighthouse: a store that chooses its own port must not choose the lighthouse's.
        self._store, port = open_store(host, int(wanted))
        self.address, self.lighthouse = f"{host}:{port}", info.lighthouse
        self._store.set(_JOIN_INFO, info.to_text())

    def close(self) -> None:
        self._lighthouse.shutdown()


class RegistryClient:
    """Reads and writes the registry at this address. It connects again if need be."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._store: TCPStore | None = None
        self._registered: set[str] = set()

    @contextmanager
    def _connected(self) -> Iterator[Any]:  # torch's stubs lack some of a store's methods
        try:
            if self._store is None:
                # A TCPStore client waits for a missing server; a plain socket fails at once.
                socket.create_connection((self._host, self._port), timeout=_REQUEST_LIMIT_S).close()
                limit = timedelta(seconds=_REQUEST_LIMIT_S)
                self._store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)
            yield self._store
        except (RuntimeError, OSError) as error:
            self._store = None
            where = f"{self._host}:{self._port}"
            raise ExchangeFailed(f"no registry answers at {where}: {error}. Is the run's first machine still up?") from error

    def join_info(self) -> str | None:
        """What the run is; None as long as its rendezvous has not stored it."""
        with self._connected() as store:
            return store.get(_JOIN_INFO).decode() if store.check([_JOIN_INFO]) else None

    def register(self, status: IslandStatus) -> None:
        key, name = _key(status.name), status.name
        with self._connected() as store:
            new = name not in self._registered or not store.check([key])  # or the registry was restarted
            store.set(key, json.dumps(status.to_json()))
            if new:  # after the status, which a reader of the name asks for
                store.append(_NAMES, f"{name}\n")
                self._registered.add(name)

    def report_ended(self, processes: Iterable[str]) -> None:
        """Report that these processes have ended: islands do not take them for the other side of a partition."""
        with self._connected() as store:
            known = {*self.ended()}
            if new := [process for process in processes if process not in known]:
                store.append(_ENDED, "".join(f"{process}\n" for process in new))

    def ended(self) -> list[str]:
        """The processes that were reported to have ended."""
        with self._connected() as store:
            return store.get(_ENDED).decode().split() if store.check([_ENDED]) else []

    def names(self) -> list[str]:
        """Every name that ever registered, once per registration."""
        with self._connected() as store:
            return store.get(_NAMES).decode().split() if store.check([_NAMES]) else []

    def statuses(self, names: Collection[str]) -> dict[str, IslandStatus]:
        """What these islands registered last, in one request."""
        with self._connected() as store:
            found = map(IslandStatus.from_text, store.multi_get([*map(_key, names)]) if names else [])
            return {name: status for name, status in zip(names, found, strict=True) if status is not None and status.name == name}


def _key(name: str) -> str:
    return f"island/{name}"


class Registry:
    """Registers one island's status with each heartbeat, in a thread of its own, and knows which other islands are alive.

    Islands may run a standby rendezvous, and report it in their status. All islands use the first rendezvous that answers: those in
    `first`, which are pairs of registry and lighthouse, and then the standbys by address. If two groups of islands use two of them,
    since a network partition separates them, the rule of the last quorum lets at most one group commit.
    """

    def __init__(self, address: str, status: IslandStatus, first: Sequence[tuple[str, str]] = ()) -> None:
        self._client, self._status = RegistryClient(address), status
        self._first, self._at = dict(first or [(address, "")]), address
        self._standbys: dict[str, str] = {}
        self._probes: dict[str, tuple[RegistryClient, float, float]] = {}
        """By address: a client, since when each probe was answered, and when the last was."""
        self.on_move: Callable[[str], object] = bool
        """Called with the address of the lighthouse when this island changes to another rendezvous."""
        self._refreshing = threading.Lock()
        self._detector: FailureDetector[str] = FailureDetector(UNREGISTERED_S)
        self._statuses: dict[str, IslandStatus] = {}
        self._forgotten: dict[str, int] = {}
        """Islands that were silent for too long, and how often each had registered by then."""
        self._ended: frozenset[str] = frozenset()
        self.reachable_since_s = math.inf
        """Since when every request to the registry has succeeded; infinity if the last one failed."""
        self.refresh()
        self._heartbeat = Heartbeat(lambda number: self.refresh(), interval_s=HEARTBEAT_S)
        self._prober = Heartbeat(lambda number: self._choose_rendezvous(), interval_s=PROBE_S)

    def refresh(self) -> None:
        """Send a heartbeat and read the others'. Threads take turns: a store has one connection and answers in order."""
        with self._refreshing:
            self._status.heartbeat += 1
            try:
                self._client.register(self._status)
                registered = Counter(self._client.names())
                self._statuses = self._client.statuses([n for n in registered if self._forgotten.get(n) != registered[n]])
                self._note_heartbeats(registered)
            except ExchangeFailed:
                self.reachable_since_s = math.inf
            else:
                self.reachable_since_s = min(self.reachable_since_s, time.monotonic())

    def _choose_rendezvous(self) -> None:
        """Change to the first rendezvous that answers: at once if the present one has been silent for `SWITCH_S`, and if an earlier
        one answers again, after as long."""
        places = {**self._first, **{one: self._standbys[one] for one in sorted(self._standbys) if one not in self._first}}
        if len(places) == 1:
            return
        for address in places:
            client, since_s, answered_s = self._probes.get(address, (RegistryClient(address), math.inf, time.monotonic()))
            try:
                answers = client.join_info() is not None
            except ExchangeFailed:
                answers = False
            now_s = time.monotonic()
            self._probes[address] = (client, min(since_s, now_s), now_s) if answers else (client, math.inf, answered_s)
        now_s, order = time.monotonic(), [*places]
        silent = now_s - self._probes[self._at][2] > SWITCH_S
        for address in order:
            since_s = self._probes[address][1]
            if address != self._at and since_s <= now_s and (silent or now_s - since_s > SWITCH_S):
                with self._refreshing:
                    self._client, self._at = RegistryClient(address), address
                self.on_move(places[address])
                return
            if address == self._at and not silent:
                return

    def _note_heartbeats(self, registered: Mapping[str, int]) -> None:
        now_s = time.monotonic()
        for name, status in self._statuses.items():
            self._detector.observe(name, status.heartbeat, now_s)
            with suppress(ConfigError):  # of what is no pair of addresses
                check_address(status.standby.replace(" ", ",", 1))
                address, _, lighthouse = status.standby.partition(" ")
                if lighthouse and len(self._standbys) < _MOST_STANDBYS:
                    self._standbys[address] = lighthouse
            if now_s - self._detector.heard_s(name) > FORGOTTEN_S:
                self._forgotten[name] = registered[name]
                self._detector.forget(name)

    def alive(self) -> dict[str, IslandStatus]:
        """The statuses of all islands with a recent heartbeat, this one included."""
        now_s = time.monotonic()
        return {name: status for name, status in self._statuses.items() if self._detector.is_alive(name, now_s)}

    def ended(self) -> frozenset[str]:
        """The processes that were reported to have ended, as far as this island knows: a restarted registry has no reports yet."""
        with self._refreshing, suppress(ExchangeFailed):
            self._ended |= {*self._client.ended()}
        return self._ended

    def report_own_end(self, process: str) -> None:
        """Report that this process ends, or that it gives this place in quorums up."""
        with self._refreshing, suppress(ExchangeFailed):
            self._client.report_ended([process])

    def stateless_since_s(self) -> float:
        """Since when no other live island reports a state. Minus infinity if none has since this island registered; a time in the
        future if one does."""
        others = [one for one in self._statuses.values() if one.name != self._status.name and one.version != NO_VERSION]
        return max((self._detector.heard_s(one.name) + UNREGISTERED_S for one in others), default=-math.inf)

    def close(self) -> None:
        self._prober.close()
        self._heartbeat.close(wait=True)
