"""How islands reach a run through its gateway: each dials out, and keeps connections open for streams to it."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway_protocol import (
    HANDSHAKE_S,
    LINE_BYTES,
    LONGEST_WAIT_S,
    STREAM,
    GatewayRefused,
    Stream,
    WrongGateway,
    keep_alive,
    send_line,
    wire_version,
)
from atoll.engines.elastic.run_identity import IDENTITY, Credentials, JoinFile, RunSecrets, server_name
from atoll.engines.elastic.spec import NAME, PLANNED, JoinInfo, island_name
from atoll.engines.network_interfaces import LOOPBACK, is_dialled
from atoll.engines.socket_transport import receive_record, splice

SERVICES = ("registry", "lighthouse")
"""Of a rendezvous, behind its gateway."""
_WAITING = 4
"""Connections that an island keeps open for streams to it."""
_MAX_FORWARDED = 128
"""Connections of one machine to one service of the run."""
_RETRY_S, _LONGEST_RETRY_S, _PROBE_S = 0.2, 5.0, 2.0
_LONGEST_PAUSE_S = 2.0
"""Between two attempts to open a stream to a service of the run: an island that registers late counts as dead."""
_REPEAT_S = 60.0
"""That a gateway cannot be used is logged again after this time."""
_WRONG_S = 60.0
"""An island elsewhere ends after this time in which all gateways that it knows are of another run, or have other certificates."""


class _Outage:
    """Limits how often this machine dials a gateway that failed, and remembers since when it has been another run's."""

    def __init__(self) -> None:
        self.wrong_since_s = math.inf
        self._lock, self._error = threading.Lock(), ""
        self._retry_s, self._pause_s = 0.0, _RETRY_S

    def check(self) -> None:
        """Raises the last error, unless the caller is to dial the gateway now: one thread does, every so often."""
        with self._lock:
            if self._error and time.monotonic() < self._retry_s:
                raise ConnectionError(self._error)
            self._retry_s = time.monotonic() + HANDSHAKE_S

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._error, self._retry_s = str(error), time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def ended(self) -> None:
        with self._lock:
            self._error, self._pause_s, self.wrong_since_s = "", _RETRY_S, math.inf


@dataclass(frozen=True)
class GatewayClient:
    """Opens streams through a run's gateway, as the island of this name. The credentials may be replaced while it exists, and more
    identities be revoked. The address of a standby's gateway has the form ID@HOST:PORT."""

    credentials: Callable[[], Credentials]
    addresses: Sequence[str]
    name: str
    revoked: set[str] = field(default_factory=set)
    forgotten: threading.Event = field(default_factory=threading.Event)
    outage: _Outage = field(default_factory=_Outage, compare=False)

    @property
    def revoked_addresses(self) -> list[str]:
        """Those of standbys that were revoked."""
        return [address for address in self.addresses if address.partition("@")[0] in self.revoked]

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
                if address in self.revoked_addresses:
                    raise WrongGateway(f"the join file of the standby {address} was revoked.")
                return self._open(address, service, time.monotonic() + limit_s)
            except ssl.SSLCertVerificationError as error:
                why = f"{address} shows a certificate that is not of {self.credentials().run_id} ({error.verify_message})"
                asks = "another run has this port, or the run's certificates were rotated: ask for a new join file"
                errors.append(WrongGateway(f"the gateway at {why}: {asks}."))
            except ssl.SSLError as error:
                rejected = "ALERT" in (error.reason or "")
                why = f"the gateway at {address} does not accept this machine's certificate ({error.reason})"
                errors.append(WrongGateway(f"{why}. Get a new join file: atoll invite DIR.") if rejected else error)
            except (OSError, ValueError, WrongGateway) as error:
                errors.append(error)
        # An address that does not answer now may be the run's, once it is back.
        first = next((error for error in errors if not isinstance(error, WrongGateway)), errors[0])
        raise ConnectionError(str(first)) if isinstance(first, ValueError) else first

    def _open(self, address: str, service: str, deadline_s: float) -> ssl.SSLSocket:
        identity, _, where = address.rpartition("@")
        host, _, port = where.rpartition(":")
        credentials = self.credentials()
        stream: Stream = socket.create_connection((host, int(port)), timeout=_left_s(deadline_s))
        try:
            keep_alive(stream)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(_left_s(deadline_s))
            tls = stream = credentials.client_context().wrap_socket(
                stream, server_hostname=server_name(credentials.run_id, identity)
            )
            about = {"run": credentials.run_id, "atoll": wire_version(), "name": self.name}
            with suppress(OSError):  # if the gateway refuses the certificate, the reason can still be read
                # The gateway is to give up, and to say so, before this end does.
                send_line(tls, **about, to=service, limit_s=min(0.8 * _left_s(deadline_s), LONGEST_WAIT_S))
            answer = receive_record(tls, LINE_BYTES, _left_s(deadline_s))
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

    An island elsewhere may reach the run through several gateways: the run's own, and standbys. It waits for streams at all of
    them, and opens streams through the one whose rendezvous it uses, else through the others.

    Args:
        registry, lighthouse: their addresses on the gateway's machine.
        islands: that the run starts on the gateway's machine.
        standbys: ID@HOST:PORT of each that the join file names.
        refused: called once if the run's gateway refuses this island for good; or with a WrongGateway if an island elsewhere has
            found no gateway of the run for `_WRONG_S`, but of others.
    """

    def __init__(
        self,
        client: GatewayClient,
        run_id: str,
        *,
        registry: str = "",
        lighthouse: str = "",
        islands: int = 0,
        standbys: Sequence[str] = (),
        refused: Callable[[Exception], object],
    ) -> None:
        self._client, self._refused, self._is_local = client, refused, bool(registry)
        self._planned = {island_name(number) for number in range(islands)}
        self._closed, self._lock, self._noting, self._is_over = threading.Event(), threading.Lock(), threading.Lock(), False
        self._to_close: dict[socket.socket, GatewayClient] = {}
        """Listeners, and streams that wait to be used, with the gateways that they lead to."""
        self._adopt: Callable[[socket.socket], object] | None = None
        self._log: Callable[[str], object] = bool
        self._logged_s: dict[bool, float] = {}
        """When it was logged last that the present gateway does not answer, or, for True, that it is another run's."""
        self._places: dict[str, tuple[str, str]] = {}
        """The registry and the lighthouse of each standby, as this machine reaches them."""
        if not self._is_local:
            registry, lighthouse = (self._forward(client, service) for service in SERVICES)
        self._clients = {registry: client}
        """By registry; the present one is `registry`."""
        super().__init__(LOOPBACK, registry, lighthouse, run_id)
        self._first = registry, lighthouse
        self._own_standby: dict[str, str] = {}
        self.standbys = tuple(standbys)

    def places(self, info: JoinInfo) -> Sequence[tuple[str, str]] | None:
        return None if self._is_local else [self._first]

    def place(self, standby: str) -> tuple[str, str]:
        identity, _, where = standby.partition("@")
        if not IDENTITY.fullmatch(identity) or not is_dialled(where):
            raise ConfigError(f"{standby[:80]} is no standby of this run: it is ID@HOST:PORT, as `atoll invite` prints it.")
        with self._lock:
            if standby not in self._places:
                addresses = [self._own_standby.get(standby, standby)]
                client = replace(self._client, addresses=addresses, forgotten=threading.Event(), outage=_Outage())
                registry, lighthouse = (self._forward(client, one) for one in SERVICES)
                self._places[standby], self._clients[registry] = (registry, lighthouse), client
                self._serve_through(client)
            return self._places[standby]

    def forget(self, standby: str) -> None:
        with self._lock:
            registry, _ = self._places.get(standby, ("", ""))
            if not registry or registry == self.registry:
                return
            del self._places[standby]
            client = self._clients.pop(registry)
            client.forgotten.set()
            for one in [one for one, leads_to in self._to_close.items() if leads_to is client]:
                del self._to_close[one]
                _end(one)

    def runs_standby(self, standby: str, address: str) -> None:
        """This process runs the gateway of that standby, and reaches it at this address."""
        self._own_standby[standby] = f"{standby.partition('@')[0]}@{address}"

    def reaches(self, registry: str) -> bool:
        try:
            self._clients[registry].open("registry", _PROBE_S).close()
        except (OSError, ConfigError, KeyError):  # it may just have been forgotten
            return False
        return True

    def check_reaches(self, registry: str, limit_s: float) -> None:
        if self._is_local:
            return
        client = self._clients.get(registry)
        if client is None:
            raise ExchangeFailed("the standby of this registry was forgotten.")
        try:
            self._open(client, "registry", limit_s).close()
        except (OSError, ConfigError) as error:
            raise ExchangeFailed(self._text(client, error)) from error

    def use(self, registry: str) -> None:
        if registry in self._clients:
            self.registry, self.lighthouse = next(one for one in (self._first, *self._places.values()) if one[0] == registry)

    def revoke(self, identities: Collection[str]) -> None:
        if {*identities} <= self._client.revoked:
            return
        with self._lock:
            self._client.revoked.update(identities)  # all clients share it
            waiting = [one for one in self._to_close if isinstance(one, ssl.SSLSocket)]
            for stream in [one for one in waiting if self._to_close[one].revoked_addresses]:
                _end(stream)

    def check(self) -> None:
        """Raises ExchangeFailed if no gateway answers, and ConfigError if the run's own refuses this island."""
        errors: list[Exception] = []
        for client in [*self._clients.values()]:
            try:
                client.open("registry", HANDSHAKE_S).close()
                return
            except OSError as error:
                errors.append(error)
            except ConfigError as error:
                if client is self._client:
                    raise
                errors.append(error)
        first = errors[0]
        raise ExchangeFailed(f"no gateway answers at {self.run_address}: {first}. Is the run's first machine up?") from first

    @property
    def run_address(self) -> str:
        return ", ".join(address for client in [*self._clients.values()] for address in client.addresses)

    @property
    def registries(self) -> str:
        """Of all gateways that this island knows, with commas between them."""
        return ",".join(self._clients)

    def address_of(self, port: int) -> str:
        return f"island:{self._client.name}" + (f":{port}" if self._is_local else "")

    def accepts_folder(self, name: str, folder: str) -> bool:
        """The run's own folder is that of the islands that the run starts: the gateway gives their names to its own machine."""
        return PLANNED.fullmatch(name) is not None if folder == "run" else folder == name

    def is_trusted(self, address: str) -> bool:
        """Only an island that the run starts is on the gateway's machine, whatever an address says."""
        kind, _, rest = address.partition(":")
        name, colon, _ = rest.partition(":")
        return self._is_local and kind == "island" and bool(colon) and name in self._planned

    def refuses(self, address: str) -> bool:
        return self.is_trusted(address) and super().refuses(f"{LOOPBACK}:{address.rpartition(':')[2]}")

    def dial(self, address: str, limit_s: float) -> socket.socket:
        kind, _, rest = address.partition(":")
        name, _, port = rest.partition(":")
        if kind != "island" or not NAME.fullmatch(name):
            raise ConnectionError(f"{address[:80]} is no address of an island of this run")
        if self.is_trusted(address):
            return super().dial(f"{LOOPBACK}:{port}", limit_s)
        present, errors = self._clients[self.registry], list[Exception]()
        for client in (present, *(one for one in [*self._clients.values()] if one is not present)):
            try:
                return client.open(f"island:{name}", limit_s)
            except (OSError, ConfigError) as error:
                errors.append(error)
        raise errors[0]

    def serve(self, adopt: Callable[[socket.socket], object], log: Callable[[str], object] = bool) -> None:
        """Accept streams from the gateways until `close`."""
        with self._lock:
            self._adopt, self._log = adopt, log
            for client in self._clients.values():
                self._serve_through(client)

    def _serve_through(self, client: GatewayClient) -> None:
        if self._adopt is not None:
            for _ in range(_WAITING):
                threading.Thread(target=self._serve, args=(client, self._adopt), name="gateway streams", daemon=True).start()

    def _serve(self, client: GatewayClient, adopt: Callable[[socket.socket], object]) -> None:
        pause_s = _RETRY_S
        while not self._ends(client):
            try:
                stream = client.open("serve", HANDSHAKE_S)
                client.outage.ended()
                pause_s = _RETRY_S
                if self._is_used(stream, client):
                    adopt(stream)
                else:
                    stream.close()
                continue
            except GatewayRefused as error:
                if client is self._client and not self._closed.is_set():
                    self._refused(error)
                return
            except (OSError, ConfigError) as error:  # it may be away, or its port be another run's for a while
                self._failed(client, error)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _open(self, client: GatewayClient, service: str, limit_s: float) -> ssl.SSLSocket:
        """A stream to a service of the run. Libraries ask several times a second: while the gateway cannot be used, most requests
        fail with its last error."""
        client.outage.check()
        try:
            stream = client.open(service, limit_s)
        except (OSError, ConfigError) as error:
            client.outage.failed(error)
            self._failed(client, error)
            raise
        client.outage.ended()
        return stream

    def _text(self, client: GatewayClient, error: Exception) -> str:
        text = str(error)
        if isinstance(error, ConfigError) or "the gateway at " in text:
            return text
        return f"the gateway at {', '.join(client.addresses)} does not answer ({text})"

    def _failed(self, client: GatewayClient, error: Exception) -> None:
        """Log why a gateway cannot be used, and end an island for which there is none."""
        text, wrong = self._text(client, error), isinstance(error, WrongGateway)
        with self._noting:
            client.outage.wrong_since_s = min(client.outage.wrong_since_s, time.monotonic()) if wrong else math.inf
            is_logged, ends = self._is_logged_now(client, wrong), self._ends_now()
        if self._closed.is_set():
            return
        if is_logged:
            self._log(text)
        if ends:
            self._refused(WrongGateway(f"{text} This island has found no gateway of its run for {_WRONG_S:.0f} s, and ends."))

    def _is_logged_now(self, client: GatewayClient, wrong: bool) -> bool:
        """Whether to log that this gateway cannot be used: if it is the present one, at once and then once a minute."""
        now_s = time.monotonic()
        if client is not self._clients[self.registry] or now_s - self._logged_s.get(wrong, -math.inf) < _REPEAT_S:
            return False
        self._logged_s[wrong] = now_s
        return True

    def _ends_now(self) -> bool:
        """Whether this island is to end, since all gateways that it knows have been others' for `_WRONG_S`. True once."""
        if self._is_local or self._is_over:
            return False
        now_s = time.monotonic()
        self._is_over = all(now_s - one.outage.wrong_since_s >= _WRONG_S for one in [*self._clients.values()])
        return self._is_over

    def _ends(self, client: GatewayClient) -> bool:
        return self._closed.is_set() or client.forgotten.is_set()

    def _is_used(self, stream: ssl.SSLSocket, client: GatewayClient) -> bool:
        """Wait until the gateway hands this stream out. Keepalive finds a gateway that is gone."""
        with self._lock:
            if self._ends(client) or client.revoked_addresses:
                return False
            self._to_close[stream] = client
        try:
            stream.settimeout(None)
            return stream.recv(1) == STREAM
        except OSError:
            return False
        finally:
            with self._lock:
                self._to_close.pop(stream, None)

    def _forward(self, client: GatewayClient, service: str) -> str:
        """A port on loopback that leads to this service, for libraries that open connections themselves."""
        listener, free = socket.create_server((LOOPBACK, 0), backlog=64), threading.BoundedSemaphore(_MAX_FORWARDED)
        self._to_close[listener] = client

        def serve(accepted: socket.socket) -> None:
            with free:
                try:
                    stream = self._open(client, service, HANDSHAKE_S)
                except (OSError, ConfigError):
                    accepted.close()
                    return
                splice(accepted, stream)

        def accept() -> None:
            with listener:
                while not self._ends(client):
                    with suppress(OSError):
                        with free:  # waits while there are too many
                            accepted, _ = listener.accept()
                        try:
                            threading.Thread(target=serve, args=(accepted,), name=f"to {service}", daemon=True).start()
                        except RuntimeError:  # this process has no thread left
                            accepted.close()

        threading.Thread(target=accept, name=f"forwards to {service}", daemon=True).start()
        return f"{LOOPBACK}:{listener.getsockname()[1]}"

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            for one in self._to_close:
                _end(one)


def _end(stream: socket.socket) -> None:
    """Shut a connection down: its thread returns from its call, and closes it."""
    with suppress(OSError):
        socket.socket.shutdown(stream, socket.SHUT_RDWR)


def machine_client(folder: Path, listen: str, name: str) -> GatewayClient:
    """The client of a process of this name on the machine with the run's folder, whose gateway listens there. It reads the
    credentials from the folder, and keeps the last that it could read, since the folder may be lost while the run goes on."""
    last: list[Credentials] = []

    def credentials() -> Credentials:
        try:
            last[:] = [RunSecrets.read(folder).credentials]
        except (ConfigError, OSError):
            if not last:
                raise
        return last[0]

    return GatewayClient(credentials, [own_address(listen)], name)


def local_network(info: JoinInfo, folder: Path, name: str, refused: Callable[[Exception], object]) -> GatewayNetwork:
    """The network of an island on the machine with the run's folder."""
    client = machine_client(folder, info.spec.listen, name)
    islands = info.spec.processes or info.run.effective_cluster.islands
    services = dict(zip(SERVICES, (info.registry, info.lighthouse), strict=True))
    return GatewayNetwork(client, info.run_id, **services, islands=islands, refused=refused)


def joiner_network(join: JoinFile, name: str, refused: Callable[[Exception], object]) -> GatewayNetwork:
    """The network of an island with a join file."""
    standbys = [one for one in join.addresses if "@" in one]
    client = GatewayClient(lambda: join.credentials, [one for one in join.addresses if one not in standbys], name)
    network = GatewayNetwork(client, join.credentials.run_id, standbys=standbys, refused=refused)
    for standby in standbys:
        network.place(standby)
    return network


def own_address(listen: str) -> str:
    """Where this machine reaches what listens there."""
    host, _, port = listen.rpartition(":")
    return f"{LOOPBACK if host == '0.0.0.0' else host}:{port}"
