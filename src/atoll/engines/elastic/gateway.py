"""The gateway of an elastic run: its one public port, where machines prove by certificate that they belong to the run.

A client opens a TLS connection, sends one line of JSON that says where the connection is to lead, and is answered by one line. From
then on the gateway forwards bytes both ways. A connection leads to the registry or the lighthouse, which listen on loopback beside
the gateway, or to an island. Islands accept no connections from other machines: each keeps a few connections to the gateway open,
and the gateway hands one of them a stream. So an island behind NAT or a firewall needs no open port.
"""

from __future__ import annotations

import json
import re
import resource
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.elastic.run_identity import MACHINE, Credentials, JoinFile, RunSecrets
from atoll.engines.elastic.snapshot_server import DirectNetwork
from atoll.engines.elastic.spec import NAME, JoinInfo
from atoll.engines.socket_transport import splice

PROTOCOL = 1
LOOPBACK = "127.0.0.1"
MAX_UNAUTHENTICATED = 64
"""Connections that have not shown a certificate and said where to. A further one closes the oldest of them."""
HANDSHAKE_S = 10.0
"""The longest that a connection may remain so."""
MAX_CONNECTIONS, MAX_PER_IDENTITY = 2048, 512
_LINE_BYTES = 4096
_LONGEST_WAIT_S = 60.0
_CHECK_S = 0.5
"""How often the gateway looks for revoked identities and late handshakes."""
_WAITING = 4
"""Connections that an island keeps open for streams to it."""
_MAX_FORWARDED = 128
"""Connections of one machine to one service of the run."""
_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Routers forget silent connections, and a machine without power closes none."""
_LOG_S, _GENTLE_S = 10.0, 1.0
_STREAM = b"\x01"
_PLANNED = re.compile(r"island-\d")
Stream: TypeAlias = socket.socket  # plain or TLS


class GatewayRefused(ConfigError):
    """The run's gateway refuses this island for good: it was revoked, or is of another version."""


class WrongGateway(ConfigError):
    """The address belongs to another run, or to the same run with other certificates."""


# ----------------------------------------------------------------------------------------------------------------- streams


def _keep_alive(connection: Stream) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send_line(stream: Stream, **record: Any) -> None:
    stream.sendall(json.dumps(record).encode() + b"\n")


def _read_line(stream: Stream) -> dict[str, Any]:
    """One JSON object, and not a byte behind its line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = stream.recv(1)
        if not byte:
            raise ConnectionError("the other end closed the connection")
        line += byte
        if len(line) > _LINE_BYTES:
            raise ValueError(f"a line has more than {_LINE_BYTES} bytes")
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("a line is no JSON object")
    return record


# ----------------------------------------------------------------------------------------------------------------- gateway


class _Refusal(Exception):
    """Answered to a client. `final`: it need not try again."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Gateway:
    """Serves one run at this address. `services` are ports on loopback, by name. The folder has the run's secrets."""

    def __init__(self, folder: Path, address: str, services: Mapping[str, int], log: Callable[[str], object]) -> None:
        self._folder, self._services, self._log = folder, services, log
        self._lock = threading.Condition()
        self._unauthenticated: dict[ssl.SSLSocket, float] = {}
        """Connections that have shown no certificate yet, the oldest first, and their deadlines."""
        self._connections: dict[ssl.SSLSocket, str] = {}
        """All others, and their identities."""
        self._islands: dict[str, tuple[str, deque[ssl.SSLSocket]]] = {}
        """By island: its identity, and its connections that wait for a stream."""
        self._refused: Counter[str] = Counter()
        self._logged_s = 0.0
        self._secrets = RunSecrets.read(folder)
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
            with suppress(OSError):  # it has been closed already
                _keep_alive(accepted)
                accepted.settimeout(HANDSHAKE_S)
                connection = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._unauthenticated[connection] = time.monotonic() + HANDSHAKE_S
                    oldest = [*self._unauthenticated][: len(self._unauthenticated) - MAX_UNAUTHENTICATED]
                    self._drop(oldest)
                threading.Thread(target=self._serve, args=(connection,), name="gateway stream", daemon=True).start()

    def _check(self) -> None:
        """Ends connections of revoked identities, of an authority that was replaced, and late handshakes."""
        while not self._closed.wait(_CHECK_S):
            with suppress(ConfigError, OSError):  # a file that cannot be read now changes nothing
                stored = RunSecrets.read(self._folder)
                if stored.credentials != self._secrets.credentials:
                    self._log("the run's authority was replaced: all connections end, and new join files are needed")
                    context = stored.credentials.server_context()
                    with self._lock:
                        self._context = context
                        self._drop([*self._connections])
                self._secrets = stored
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
            self._log_refusals()

    def _log_refusals(self) -> None:
        """One line for all refusals of a while: strangers must not fill the disk."""
        if self._refused and time.monotonic() - self._logged_s > _LOG_S:
            refused, self._refused = self._refused, Counter()
            self._logged_s = time.monotonic()
            self._log("; ".join(f"refused {count} connection(s): {why}" for why, count in refused.most_common(3)))

    def _forget(self, connection: ssl.SSLSocket) -> None:
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._connections.pop(connection, None)
        connection.close()

    # ------------------------------------------------------------------------------------------------------------- one connection

    def _serve(self, connection: ssl.SSLSocket) -> None:
        try:
            try:
                connection.do_handshake()
                asked = _read_line(connection)
                identity = _common_name(connection)
                self._admit(connection, identity, asked)
                if asked.get("to") == "serve":
                    self._wait_for_stream(connection, identity, asked)
                    return  # it stays open
                other = self._connect(asked)
                _send_line(connection, ok=True)
            except _Refusal as refusal:
                self._refused[str(refusal)] += 1
                _send_line(connection, error=str(refusal), final=refusal.final)
                raise ConnectionError from refusal
        except (OSError, ValueError) as error:
            if not isinstance(error.__cause__, _Refusal):
                self._refused[f"{type(error).__name__}: {getattr(error, 'reason', '') or error}"[:120]] += 1
            _end_gently(connection)
            self._forget(connection)
            return
        try:
            splice(connection, other)
        finally:
            self._forget(connection)
            if isinstance(other, ssl.SSLSocket):
                self._forget(other)

    def _admit(self, connection: ssl.SSLSocket, identity: str, asked: Mapping[str, Any]) -> None:
        credentials, revoked = self._secrets.credentials, self._secrets.revoked
        with suppress(ConfigError):  # a file that cannot be read now changes nothing
            revoked = RunSecrets.read(self._folder).revoked if identity != MACHINE else ()
        if identity in revoked:
            raise _Refusal(f"the join file {identity} was revoked. Ask for a new one", final=True)
        if asked.get("run") != credentials.run_id:
            raise _Refusal(f"this is {credentials.run_id}, and not {_shown(asked.get('run'))}", final=True)
        if asked.get("protocol") != PROTOCOL or asked.get("atoll") != version("atoll"):
            ours, theirs = version("atoll"), _shown(asked.get("atoll"))
            raise _Refusal(f"the run is of atoll {ours}, and this island is of atoll {theirs}", final=True)
        if not isinstance(asked.get("name"), str) or not NAME.fullmatch(asked["name"]):
            raise _Refusal("an island's name consists of letters, digits, dots and dashes", final=True)
        if identity != MACHINE and _PLANNED.match(asked["name"]):
            raise _Refusal(f"{asked['name'][:40]} is a name of the islands that the run starts itself", final=True)
        with self._lock:
            own = sum(one == identity for one in self._connections.values())
            if len(self._connections) >= self._most or (own >= MAX_PER_IDENTITY and identity != MACHINE):
                raise _Refusal(f"too many connections: {own} of {identity}, {len(self._connections)} in all")
            if self._unauthenticated.pop(connection, None) is None or connection.context is not self._context:
                raise ConnectionError("it was closed")
            self._connections[connection] = identity

    def _wait_for_stream(self, connection: ssl.SSLSocket, identity: str, asked: Mapping[str, Any]) -> None:
        """Keep an island's connection until a stream to the island is asked for."""
        with self._lock:
            owner, waiting = self._islands.setdefault(asked["name"], (identity, deque()))
        if owner != identity:
            raise _Refusal(f"{asked['name']} is the name of another island")
        _send_line(connection, ok=True)
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the gateway is closed")
            self._islands.setdefault(asked["name"], (owner, waiting))
            waiting.append(connection)
            self._lock.notify_all()

    def _connect(self, asked: Mapping[str, Any]) -> Stream:
        """The other end of the stream that a client asks for."""
        service, limit_s = str(asked.get("to")), asked.get("limit_s")
        if not isinstance(limit_s, int | float) or not 0 < limit_s <= _LONGEST_WAIT_S:
            raise _Refusal(f"limit_s is a number of seconds, up to {_LONGEST_WAIT_S:.0f}", final=True)
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
                found.sendall(_STREAM)
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
        while socket.socket.recv(connection, _LINE_BYTES) and time.monotonic() < deadline_s:
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


# ------------------------------------------------------------------------------------------------------------------ clients


@dataclass(frozen=True)
class GatewayClient:
    """Opens streams through a run's gateway, as the island of this name. The credentials may be replaced while it exists."""

    credentials: Callable[[], Credentials]
    addresses: Sequence[str]
    name: str

    def open(self, service: str, limit_s: float) -> ssl.SSLSocket:
        """A stream to this service of the run, or to `island:NAME`.

        Raises:
            GatewayRefused: the run's gateway refuses this island for good.
            WrongGateway: at no address is the run's gateway.
            OSError: no gateway answers within the limit, or what was asked for does not.
        """
        errors: list[Exception] = []
        for address in self.addresses:
            try:
                return self._open(address, service, time.monotonic() + limit_s)
            except ssl.SSLCertVerificationError as error:
                why = f"{address} shows a certificate that is not of {self.credentials().run_id} ({error.verify_message})"
                errors.append(WrongGateway(f"{why}: another run has this port, or the run's certificates were rotated."))
            except ssl.SSLError as error:
                rejected = "ALERT" in (error.reason or "")
                why = f"the gateway at {address} does not accept this machine's certificate ({error.reason})"
                errors.append(WrongGateway(f"{why}. Get a new join file: atoll invite DIR.") if rejected else error)
            except (OSError, ValueError) as error:
                errors.append(error)
        # An address that does not answer now may be the run's, once it is back.
        first = next((error for error in errors if not isinstance(error, WrongGateway)), errors[0])
        raise ConnectionError(str(first)) if isinstance(first, ValueError) else first

    def _open(self, address: str, service: str, deadline_s: float) -> ssl.SSLSocket:
        host, _, port = address.rpartition(":")
        credentials = self.credentials()
        stream: Stream = socket.create_connection((host, int(port)), timeout=_left_s(deadline_s))
        try:
            _keep_alive(stream)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(_left_s(deadline_s))
            tls = stream = credentials.client_context().wrap_socket(stream, server_hostname=credentials.run_id)
            about = {"run": credentials.run_id, "atoll": version("atoll"), "protocol": PROTOCOL, "name": self.name}
            with suppress(OSError):  # if the gateway refuses the certificate, the reason can still be read
                # The gateway is to give up, and to say so, before this end does.
                _send_line(tls, **about, to=service, limit_s=min(0.8 * _left_s(deadline_s), _LONGEST_WAIT_S))
            tls.settimeout(_left_s(deadline_s))
            answer = _read_line(tls)
            if answer.get("ok") is not True:
                why = str(answer.get("error"))[:300]
                if answer.get("final") is True:
                    raise GatewayRefused(f"the gateway at {address} refuses {self.name}: {why}.")
                raise ConnectionRefusedError(f"the gateway at {address} answers: {why}")
            return tls
        except BaseException:
            stream.close()
            raise


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 1e-3)


class GatewayNetwork(DirectNetwork):
    """The network of an island whose run has a gateway. With the folder, the island is on the gateway's machine, and reaches other
    islands of that machine over loopback; all others it reaches through the gateway.

    Args:
        refused: called once if the gateway refuses this island for good.
    """

    def __init__(
        self,
        client: GatewayClient,
        run_id: str,
        *,
        registry: str = "",
        lighthouse: str = "",
        refused: Callable[[Exception], object],
    ) -> None:
        self._client, self._refused, self._is_local = client, refused, bool(registry)
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._to_close: set[socket.socket] = set()
        """Listeners, and streams that wait to be used."""
        if not self._is_local:
            registry, lighthouse = (self._forward(service) for service in ("registry", "lighthouse"))
        super().__init__(LOOPBACK, registry, lighthouse, run_id)

    def check(self) -> None:
        """Raises ExchangeFailed if no gateway answers, and ConfigError if it refuses this island."""
        try:
            self._client.open("registry", HANDSHAKE_S).close()
        except OSError as error:
            where = ", ".join(self._client.addresses)
            raise ExchangeFailed(f"no gateway answers at {where}: {error}. Is the run's first machine up?") from error

    def address_of(self, port: int) -> str:
        return f"island:{self._client.name}" + (f":{port}" if self._is_local else "")

    def is_trusted(self, address: str) -> bool:
        return self._is_local and address.count(":") == 2

    def refuses(self, address: str) -> bool:
        return self.is_trusted(address) and super().refuses(f"{LOOPBACK}:{address.rpartition(':')[2]}")

    def dial(self, address: str, limit_s: float) -> socket.socket:
        kind, _, rest = address.partition(":")
        name, _, port = rest.partition(":")
        if kind != "island" or not NAME.fullmatch(name):
            raise ConnectionError(f"{address[:80]} is no address of an island of this run")
        if self.is_trusted(address):
            return super().dial(f"{LOOPBACK}:{port}", limit_s)
        return self._client.open(f"island:{name}", limit_s)

    def serve(self, adopt: Callable[[socket.socket], object]) -> None:
        """Accept streams from the gateway until `close`."""
        for _ in range(_WAITING):
            threading.Thread(target=self._serve, args=(adopt,), name="gateway streams", daemon=True).start()

    def _serve(self, adopt: Callable[[socket.socket], object]) -> None:
        pause_s = _RETRY_S
        while not self._closed.is_set():
            try:
                stream = self._client.open("serve", HANDSHAKE_S)
                pause_s = _RETRY_S
                if self._is_used(stream):
                    adopt(stream)
                else:
                    stream.close()
                continue
            except GatewayRefused as error:
                if not self._closed.is_set():
                    self._refused(error)
                return
            except (OSError, ConfigError):  # it may be away, or its port be another run's for a while
                pass
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _is_used(self, stream: ssl.SSLSocket) -> bool:
        """Wait until the gateway hands this stream out. Keepalive finds a gateway that is gone."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._to_close.add(stream)
        try:
            stream.settimeout(None)
            return stream.recv(1) == _STREAM
        except OSError:
            return False
        finally:
            with self._lock:
                self._to_close.discard(stream)

    def _forward(self, service: str) -> str:
        """A port on loopback that leads to this service, for libraries that open connections themselves."""
        listener, free = socket.create_server((LOOPBACK, 0), backlog=64), threading.BoundedSemaphore(_MAX_FORWARDED)

        self._to_close.add(listener)

        def serve(accepted: socket.socket) -> None:
            with free:
                try:
                    stream = self._client.open(service, HANDSHAKE_S)
                except (OSError, ConfigError):
                    accepted.close()
                    return
                splice(accepted, stream)

        def accept() -> None:
            with listener:
                while not self._closed.is_set():
                    with suppress(OSError):
                        with free:  # waits while there are too many
                            accepted, _ = listener.accept()
                        threading.Thread(target=serve, args=(accepted,), name=f"to {service}", daemon=True).start()

        threading.Thread(target=accept, name=f"forwards to {service}", daemon=True).start()
        return f"{LOOPBACK}:{listener.getsockname()[1]}"

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            for one in self._to_close:
                with suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # its thread wakes, and closes it


def local_network(info: JoinInfo, folder: Path, name: str, refused: Callable[[Exception], object]) -> GatewayNetwork:
    """The network of an island on the machine with the run's folder."""
    host, _, port = info.spec.listen.rpartition(":")
    client = GatewayClient(lambda: RunSecrets.read(folder).credentials, [f"{LOOPBACK if host == '0.0.0.0' else host}:{port}"], name)
    return GatewayNetwork(client, info.run_id, registry=info.registry, lighthouse=info.lighthouse, refused=refused)


def joiner_network(join: JoinFile, name: str, refused: Callable[[Exception], object]) -> GatewayNetwork:
    """The network of an island with a join file."""
    client = GatewayClient(lambda: join.credentials, join.addresses, name)
    return GatewayNetwork(client, join.credentials.run_id, refused=refused)
