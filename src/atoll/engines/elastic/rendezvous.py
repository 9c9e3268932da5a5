"""The one address of an elastic run: torchft's lighthouse, which forms quorums, and the registry of islands beside it.

The registry is a TCPStore. Every island puts its status there twice a second and reads the others'. A joiner learns from it what
the run is and which islands can send a snapshot. No commit depends on it: while the registry is away, training goes on. When the
rendezvous process dies and comes back on the same ports, islands register again.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.liveness import FailureDetector, Heartbeat

HEARTBEAT_S = 0.5
SILENT_S = 3.0
"""An island without a heartbeat for so long counts as dead."""
FORGOTTEN_S = 60.0
"""An island without a heartbeat for so long is not read any more until it registers anew."""
LIGHTHOUSE_TICK_S = 0.02
_JOIN_INFO, _NAMES = "join_info", "names"
_REQUEST_LIMIT_S = 5.0


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address alone."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def free_port(host: str) -> int:
    with listen(host) as listener:
        return int(listener.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def open_store(host: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store in this process that listens on this address alone, and its port."""
    listener = listen(host, port)
    port = int(listener.getsockname()[1])
    limit = timedelta(seconds=_REQUEST_LIMIT_S)
    # The store takes over the socket, and closes it.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach())
    return store, port


class Rendezvous:
    """A lighthouse and a registry store, in this process. The registry's address is the run's.

    Args:
        join_info: what the registry tells joiners about the run.
        join_limit_s: how long the lighthouse waits for an island that is alive and does not ask for a quorum.
        silent_s: an island without a heartbeat for so long is left out of the next quorum.
    """

    def __init__(self, host: str, port: int, lighthouse_port: int, join_info: str, *, join_limit_s: float, silent_s: float) -> None:
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="elastic runs")
        self._lighthouse = coordination.LighthouseServer(
            bind=f"{f'[{host}]' if ':' in host else host}:{lighthouse_port}",
            min_replicas=1,
            join_timeout_ms=int(join_limit_s * 1000),
            quorum_tick_ms=int(LIGHTHOUSE_TICK_S * 1000),
            heartbeat_timeout_ms=int(silent_s * 1000),
        )
        # After the lighthouse: a store that chooses its own port must not choose the lighthouse's.
        self._store, port = open_store(host, port)
        self.address = f"{host}:{port}"
        RegistryClient(self.address, self._store).set_join_info(join_info)

    def close(self) -> None:
        self._lighthouse.shutdown()


class RegistryClient:
    """Reads and writes the registry. It connects to `address`, again if need be, unless it is given the store itself."""

    def __init__(self, address: str, store: TCPStore | None = None) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._store = int(port), store
        self._registered: set[str] = set()
        self.address = address

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
            raise ExchangeFailed(f"no registry answers at {self.address}: {error}. Is the run's first machine still up?") from error

    def set_join_info(self, text: str) -> None:
        with self._connected() as store:
            store.set(_JOIN_INFO, text)

    def join_info(self) -> str | None:
        """What the run is; None as long as its rendezvous has not stored it."""
        with self._connected() as store:
            return store.get(_JOIN_INFO).decode() if store.check([_JOIN_INFO]) else None

    def register(self, name: str, entry: Mapping[str, Any]) -> None:
        with self._connected() as store:
            new = name not in self._registered or not store.check([_key(name)])  # or the registry was restarted
            store.set(_key(name), json.dumps(entry))
            if new:  # after the entry, which a reader of the name asks for
                store.append(_NAMES, f"{name}\n")
                self._registered.add(name)

    def names(self) -> list[str]:
        """Every name that ever registered, once per registration."""
        with self._connected() as store:
            return store.get(_NAMES).decode().split() if store.check([_NAMES]) else []

    def entries(self, names: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """The last entries of these islands, or of all, in one request."""
        names = dict.fromkeys(self.names()) if names is None else names
        with self._connected() as store:
            found = store.multi_get([*map(_key, names)]) if names else []
            return {name: json.loads(entry) for name, entry in zip(names, found, strict=True)}


def _key(name: str) -> str:
    return f"island/{name}"


class Registry:
    """Registers one island's entry with each heartbeat, in a thread of its own, and knows which other islands are alive."""

    def __init__(self, address: str, name: str, entry: Callable[[], Mapping[str, Any]]) -> None:
        self._client, self._name, self._entry = RegistryClient(address), name, entry
        self._refreshing = threading.Lock()
        self._heartbeats = 0
        self._detector: FailureDetector[str] = FailureDetector(SILENT_S)
        self._entries: dict[str, dict[str, Any]] = {}
        self._forgotten: dict[str, int] = {}
        """Islands that were silent for too long, and how often each had registered by then."""
        self.reachable_since_s = math.inf
        """Since when every request to the registry has succeeded; infinity if the last one failed."""
        self.refresh()
        self._heartbeat = Heartbeat(lambda number: self.refresh(), interval_s=HEARTBEAT_S)

    def refresh(self) -> None:
        """Send a heartbeat and read the others'. Threads take turns: a store has one connection and answers in order."""
        with self._refreshing:
            self._heartbeats += 1
            try:
                self._client.register(self._name, {**self._entry(), "heartbeat": self._heartbeats})
                registered = Counter(self._client.names())
                self._entries = self._client.entries([n for n in registered if self._forgotten.get(n) != registered[n]])
                self._note_heartbeats(registered)
            except ExchangeFailed:
                self.reachable_since_s = math.inf
            else:
                self.reachable_since_s = min(self.reachable_since_s, time.monotonic())

    def _note_heartbeats(self, registered: Mapping[str, int]) -> None:
        now_s = time.monotonic()
        for name, entry in self._entries.items():
            self._detector.observe(name, entry["heartbeat"], now_s)
            if now_s - self._detector.heard_s(name) > FORGOTTEN_S:
                self._forgotten[name] = registered[name]
                self._detector.forget(name)

    def alive(self) -> dict[str, dict[str, Any]]:
        """The entries of all islands with a recent heartbeat, this one included."""
        now_s = time.monotonic()
        return {name: e for name, e in list(self._entries.items()) if self._detector.is_alive(name, now_s)}

    def stateless_since_s(self) -> float:
        """Since when no other live island reports a state. Minus infinity if none has since this island registered; a time in the
        future if one does."""
        holders = [name for name, e in list(self._entries.items()) if name != self._name and e["version"] >= 0]
        return max((self._detector.heard_s(name) + SILENT_S for name in holders), default=-math.inf)

    def close(self) -> None:
        self._heartbeat.close(wait=True)
