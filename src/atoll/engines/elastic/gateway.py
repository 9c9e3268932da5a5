"""The gateway of an elastic run: its one public port, where machines prove by certificate that they belong to the run.

A client opens a TLS connection, sends one line of JSON that says where the connection is to lead, and is answered by one line. From
then on the gateway forwards bytes both ways. A connection leads to the registry or the lighthouse, which listen on loopback beside
the gateway, or to an island. Islands accept no connections from other machines: each keeps a few connections to the gateway open,
and the gateway sends a stream over one of them. So an island behind NAT or a firewall needs no open port.
"""

from __future__ import annotations

import resource
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from atoll.core.errors import ConfigError, one_line
from atoll.engines.elastic.gateway_protocol import (
    HANDSHAKE_S,
    LINE_BYTES,
    LONGEST_WAIT_S,
    STREAM,
    Stream,
    keep_alive,
    send_line,
    wire_version,
)
from atoll.engines.elastic.run_identity import MACHINE, RunSecrets
from atoll.engines.elastic.spec import NAME, PLANNED
from atoll.engines.network_interfaces import LOOPBACK
from atoll.engines.socket_transport import receive_record, splice

MAX_UNAUTHENTICATED = 64
"""Connections that have not shown a certificate and said where to. A further one closes the oldest of them."""
MAX_CONNECTIONS = 8192
"""At most, and at most a third of the descriptors that this process may open. All islands connect with each other, so a join file
may have any number that leaves as many free: of k greedy ones each gets a share of 1 / (k + 1), and one share stays free."""
_CHECK_S = 0.5
"""How often the gateway looks for revoked identities and late handshakes."""
_LOG_S, _GENTLE_S = 10.0, 1.0


class _Refusal(Exception):
    """Answered to a client. `final`: it need not try again."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Gateway:
    """Serves one run at this address. `services` are ports on loopback, by name. `read_secrets` reads the certificates and the
    revoked identities, as they are now; a standby knows no authority's key."""

    def __init__(
        self, read_secrets: Callable[[], RunSecrets], address: str, services: Mapping[str, int], log: Callable[[str], object]
    ) -> None:
        self._read_secrets, self._services, self._log = read_secrets, services, log
        self._lock = threading.Condition()
        self._unauthenticated: dict[ssl.SSLSocket, float] = {}
        """Connections that have shown no certificate yet, the oldest first, and their deadlines."""
        self._connections: dict[ssl.SSLSocket, str] = {}
        """All others, and their identities."""
        self._islands: dict[str, tuple[str, deque[ssl.SSLSocket]]] = {}
        """By island: its identity, and its connections that wait for a stream."""
        self._refused: Counter[str] = Counter()
        self._logged_s = 0.0
        self._secrets = read_secrets()
        self._context = self._secrets.credentials.server_context()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._most = MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, most // 3)  # a stream has two
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server((host, int(port)), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        for work in (self._accept, self._check):
            threading.Thread(target=work, name="gateway", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._drop([*self._unauthenticated, *self._connections])
            for connection in [one for _, waiting in self._islands.values() for one in waiting]:
                self._forget(connection)  # it has no thread
            self._islands.clear()

    def _drop(self, connections: Sequence[ssl.SSLSocket]) -> None:
        """End these connections; their threads close them."""
        for connection in connections:
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would turn encryption off first

    # -------------------------------------------------------------------------------------------------- accepting and checking

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is free
                self._closed.wait(0.05)
                continue
            connection: Any = accepted
            try:
                keep_alive(accepted)
                accepted.settimeout(HANDSHAKE_S)
                connection = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._unauthenticated[connection] = time.monotonic() + HANDSHAKE_S
                    self._drop([*self._unauthenticated][: max(0, len(self._unauthenticated) - MAX_UNAUTHENTICATED)])
                threading.Thread(target=self._serve, args=(connection,), name="gateway stream", daemon=True).start()
            except (OSError, RuntimeError):  # it has been closed already, or this process has no thread left
                self._forget(connection)

    def _check(self) -> None:
        """Check again and again: an error of one check must not end those that follow, on which revocations depend."""
        shown = ""
        while not self._closed.wait(_CHECK_S):
            for check in (self._check_secrets, self._check_connections, self._log_refusals):
                try:
                    check()
                except Exception as error:
                    text = f"the gateway's checks: {one_line(error)}. They go on"
                    if text != shown:
                        self._log(text)
                    shown = text

    def _check_secrets(self) -> None:
        """Ends all connections if the run's authority was replaced."""
        with suppress(ConfigError, OSError):  # a file that cannot be read now changes nothing
            stored = self._read_secrets()
            if stored.credentials != self._secrets.credentials:
                context = stored.credentials.server_context()
                self._log("the run's authority was replaced: all connections end, and new join files are needed")
                with self._lock:
                    self._context = context
                    self._drop([*self._connections])
            self._secrets = stored

    def _check_connections(self) -> None:
        """Ends connections of revoked identities, late handshakes, and those that their islands have closed."""
        with self._lock:
            now_s = time.monotonic()
            self._drop([one for one, deadline_s in self._unauthenticated.items() if now_s > deadline_s])
            self._drop([one for one, identity in self._connections.items() if identity in self._secrets.revoked])
            for name, (_, waiting) in [*self._islands.items()]:
                for connection in [one for one in waiting if _has_ended(one)]:
                    waiting.remove(connection)
                    self._forget(connection)
                if not waiting:
                    del self._islands[name]

    def _count_refusal(self, why: str) -> None:
        with self._lock:
            self._refused[why] += 1

    def _log_refusals(self) -> None:
        """One line for all refusals of a while: connections without a certificate must not fill the disk."""
        if time.monotonic() - self._logged_s <= _LOG_S:
            return
        with self._lock:
            refused, self._refused = self._refused, Counter()
        if refused:
            self._logged_s = time.monotonic()
            self._log("; ".join(f"refused {count} connection(s): {why}" for why, count in refused.most_common(3)))

    def _forget(self, connection: Any) -> None:
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._connections.pop(connection, None)
        connection.close()

    # ------------------------------------------------------------------------------------------------------------- one connection

    def _serve(self, connection: ssl.SSLSocket) -> None:
        other: Stream | None = None
        try:
            try:
                connection.do_handshake()
                asked = receive_record(connection, LINE_BYTES, HANDSHAKE_S)
                identity = _common_name(connection)
                self._admit(connection, identity, asked)
                if asked.get("to") == "serve":
                    self._wait_for_stream(connection, identity, asked)
                    return  # it stays open
                other = self._connect(asked)
                send_line(connection, ok=True)
            except _Refusal as refusal:
                self._count_refusal(str(refusal))
                send_line(connection, error=str(refusal), final=refusal.final)
                raise ConnectionError from refusal
        except (OSError, ValueError) as error:
            if not isinstance(error.__cause__, _Refusal):
                self._count_refusal(f"{type(error).__name__}: {getattr(error, 'reason', '') or error}"[:120])
            _end_gently(connection)
            self._forget(connection)
            if other is not None:
                self._forget(other)
            return
        try:
            splice(connection, other)
        finally:
            self._forget(connection)
            self._forget(other)

    def _admit(self, connection: ssl.SSLSocket, identity: str, asked: Mapping[str, Any]) -> None:
        credentials, revoked = self._secrets.credentials, self._secrets.revoked
        with suppress(ConfigError):  # a file that cannot be read now changes nothing
            revoked = self._read_secrets().revoked if identity != MACHINE else ()
        if identity in revoked:
            raise _Refusal(f"the join file {identity} was revoked. Ask for a new one", final=True)
        if asked.get("run") != credentials.run_id:
            raise _Refusal(f"this is {credentials.run_id}, and not {_shown(asked.get('run'))}", final=True)
        if asked.get("atoll") != wire_version():
            ours, theirs = wire_version(), _shown(asked.get("atoll"))
            raise _Refusal(f"the run is of atoll {ours}, and this island is of atoll {theirs}", final=True)
        if not isinstance(asked.get("name"), str) or not NAME.fullmatch(asked["name"]):
            raise _Refusal("an island's name consists of letters, digits, dots and dashes", final=True)
        if identity != MACHINE and PLANNED.fullmatch(asked["name"]):
            raise _Refusal(f"{asked['name'][:40]} is a name of the islands that the run starts itself", final=True)
        with self._lock:
            own = sum(one == identity for one in self._connections.values())
            free = self._most - len(self._connections)
            if free <= 0 or (own >= free and identity != MACHINE):
                taken = f"{own} of {identity}, {len(self._connections)} of {self._most} in all"
                raise _Refusal(f"too many connections: {taken}. `ulimit -Hn` on the run's machine may allow more")
            if self._unauthenticated.pop(connection, None) is None or connection.context is not self._context:
                raise ConnectionError("it was closed")
            self._connections[connection] = identity

    def _wait_for_stream(self, connection: ssl.SSLSocket, identity: str, asked: Mapping[str, Any]) -> None:
        """Keep an island's connection until a stream to the island is asked for."""
        with self._lock:
            owner, waiting = self._islands.setdefault(asked["name"], (identity, deque()))
        if owner != identity:
            raise _Refusal(f"{asked['name']} is the name of another island")
        send_line(connection, ok=True)
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the gateway is closed")
            self._islands.setdefault(asked["name"], (owner, waiting))
            waiting.append(connection)
            self._lock.notify_all()

    def _connect(self, asked: Mapping[str, Any]) -> Stream:
        """The other end of the stream that a client asks for."""
        service, limit_s = str(asked.get("to")), asked.get("limit_s")
        if not isinstance(limit_s, int | float) or not 0 < limit_s <= LONGEST_WAIT_S:
            raise _Refusal(f"limit_s is a number of seconds, up to {LONGEST_WAIT_S:.0f}", final=True)
        if service in self._services:
            try:
                return socket.create_connection((LOOPBACK, self._services[service]), timeout=limit_s)
            except OSError as error:
                raise _Refusal(f"the {service} does not answer: {error}") from error
        kind, _, name = service.partition(":")
        if kind != "island" or not NAME.fullmatch(name):
            raise _Refusal(f"there is no service {service[:60]!r}", final=True)
        deadline_s = time.monotonic() + limit_s
        while (found := self._waiting_connection(name, deadline_s)) is not None:
            try:
                found.sendall(STREAM)
                return found
            except OSError:  # the island has died since
                self._forget(found)
        raise _Refusal(f"{name} is not connected to the gateway")

    def _waiting_connection(self, name: str, deadline_s: float) -> ssl.SSLSocket | None:
        """A connection of this island that waits for a stream."""
        with self._lock:
            while True:
                _, waiting = self._islands.get(name, ("", ()))
                while waiting:
                    connection = waiting.popleft()
                    if not _has_ended(connection):
                        connection.settimeout(HANDSHAKE_S)
                        return connection
                    self._forget(connection)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._lock.wait(left_s)


def _end_gently(connection: ssl.SSLSocket) -> None:
    """Wait a moment for the other end to close: if bytes of it were unread, the kernel would discard the answer on its way."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(_GENTLE_S)
        deadline_s = time.monotonic() + _GENTLE_S
        while socket.socket.recv(connection, LINE_BYTES) and time.monotonic() < deadline_s:
            pass


def _shown(given: Any) -> str:
    """A value that a client sent, for the log: in one short line."""
    return str(given)[:40].encode("unicode_escape").decode("ascii")


def _common_name(connection: ssl.SSLSocket) -> str:
    """The identity in the certificate that the client has shown."""
    subject: Any = (connection.getpeercert() or {}).get("subject", ())
    names = [value for group in subject for kind, value in group if kind == "commonName"]
    if len(names) != 1:
        raise ConnectionError("its certificate names no identity")
    return str(names[0])


def _has_ended(connection: ssl.SSLSocket) -> bool:
    """Whether the other end of a connection on which nothing is to be received has closed it."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return False
    except OSError:
        pass
    return True
