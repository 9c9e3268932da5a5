"""An island's server for other islands: it answers status queries, and sends the last committed state while the island trains on.

A status query is answered by one line of JSON. A snapshot is one line of JSON that describes the tensors, the tensors as they lie
in memory, and their checksum. The receiver runs nothing that it receives, and takes memory only for tensors that it expects.
Every query ends with the run's id; those of another run get no answer. A snapshot that is being read keeps its buffers: the island
asks `has_readers` before it reuses them, and `withdraw` before it computes in them.

A connection that begins with `exchange KEY RANK RUN` is kept for the exchange of that key. With `relay NAME` before it, a status
query or an exchange is passed on to the member of that name: for islands that cannot reach each other.
"""

from __future__ import annotations

import io
import json
import math
import re
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.serialization import pack
from atoll.engines.elastic.direct_network import QUERY_S, DirectNetwork
from atoll.engines.elastic.spec import is_island_address
from atoll.engines.elastic.state_version import NO_VERSION, Checksum, StateVersion
from atoll.engines.socket_transport import AcceptedConnections, receive_line, splice

SILENT_S = 6.0
"""An island that answers no query for so long is taken for dead."""
MAX_CONNECTIONS, MAX_WITHOUT_QUERY = 512, 64
"""Of one server. A further connection is closed; a further one without a query closes the oldest of these."""
_FIRST_LINE_S = 5.0
_CHUNK_BYTES = 1 << 20
_HEADER_LIMIT_BYTES, _STATUS_LIMIT_BYTES = 64 << 20, 1 << 20
_QUERY_LIMIT_BYTES = 512
_LEAST_RATE = 10_000
"""Bytes a second. A donor that sends a snapshot more slowly is given up."""
_MOST_RELAYS = 64
_MOST_GROWTH, _MOST_TENSORS = 4, 16
"""A snapshot has at most so many times the bytes and tensors of a state before the first update. Of torch's optimizers none keeps
more than three moments of each weight and a few numbers."""
_EXCHANGE = re.compile(rb"exchange ([0-9a-f]{8,64}) ([0-9]{1,5})")
_RELAY = re.compile(rb"relay (\S+) (status|exchange [0-9a-f]{8,64} [0-9]{1,5})")


class IslandPhase(StrEnum):
    JOINING = "joining"  # it has no state yet, or sends no heartbeats
    JOINED = "joined"
    FINISHED = "finished"  # with the run


@dataclass
class IslandStatus:
    """What an island reports about itself. Its layers write it; the snapshot server and the registry send it."""

    name: str
    has_folder: bool  # whether this machine has the run's folder
    address: str = ""  # of the snapshot server
    phase: IslandPhase = IslandPhase.JOINING
    version: StateVersion = NO_VERSION  # of the published snapshot; set after it, so that a reported state can be fetched
    confirmed: bool = True  # whether it took part in the commit of the state that it holds, or knows it to be the newest
    suspects: frozenset[str] = frozenset()  # islands that it could not exchange with since its last commit
    heartbeat: int = 0  # counts its registrations
    run: str = ""  # the id of its run
    process: str = ""  # its identity: a restarted island of the same name has another
    member: str = field(init=False, default_factory=str)  # its id at the lighthouse; empty while it sends no heartbeats
    exchanging: bool = field(init=False, default_factory=bool)  # whether a newer state may be committed at any moment
    has_copy: bool = field(init=False, default_factory=bool)  # whether its folder is a copy of its own, which it alone writes
    standby: str = field(init=False, default_factory=str)  # a rendezvous that it runs: REGISTRY LIGHTHOUSE, or ID@GATEWAY
    waiting: str = field(init=False, default_factory=str)  # why it does not commit; shown on the console of its machine

    @property
    def identity(self) -> str:
        """In a LastQuorum."""
        return f"{self.process}@{self.address}"

    @property
    def folder(self) -> str:
        """Which folder it writes when it leads there: none, the run's own, or its copy."""
        return self.name if self.has_copy else "run" if self.has_folder else ""

    def to_json(self) -> dict[str, Any]:
        version = NO_VERSION if self.phase is IslandPhase.JOINING else self.version
        return {**vars(self), "version": version.number, "suspects": sorted(self.suspects)}

    @staticmethod
    def from_text(text: bytes) -> IslandStatus | None:
        """The status that another island sent as JSON; None if the text is no status."""
        try:
            sent = json.loads(text)
            if not isinstance(sent, dict) or {name: type(value) for name, value in sent.items()} != _STATUS_TYPES:
                return None
            if sent["address"] and not is_island_address(sent["address"], sent["name"]):
                return None
            converted = {"phase": IslandPhase(sent["phase"]), "version": StateVersion.of(sent["version"])}
        except (ValueError, RecursionError):
            return None
        status = IslandStatus(sent["name"], sent["has_folder"])
        vars(status).update(sent, **converted, suspects=frozenset(map(str, sent["suspects"])))
        return status


_STATUS_TYPES = {name: type(value) for name, value in json.loads(json.dumps(IslandStatus("", False).to_json())).items()}


@dataclass(frozen=True)
class Snapshot:
    """A committed state: JSON data and tensors by name. `age_s` is the time since it was published, when it was fetched."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    age_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


_DIRECT = DirectNetwork("")


class SnapshotServer:
    """Serves one island's status and its newest snapshot, to islands of the same run. A client that stops reading is dropped after
    `limit_s`."""

    def __init__(
        self,
        host: str,
        status: Callable[[], Mapping[str, Any]] = dict,
        limit_s: float = 120.0,
        network: DirectNetwork = _DIRECT,
    ) -> None:
        self._network, run = network, f" {network.run_id}".rstrip().encode()
        self._snapshot: Snapshot | None = None
        self._published_s = 0.0
        self._lock = threading.Condition()
        self._readers, self._withdrawn = 0, False
        self.accepted = AcceptedConnections()
        """Connections of other members, for exchanges of this island."""
        self._routes, self._routed = dict[str, str](), threading.Condition()
        """The addresses of the islands to which this one relays, by name."""
        self._relays, self._limit_s = threading.Semaphore(_MOST_RELAYS), limit_s
        server = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = limit_s

            def handle(self) -> None:
                with suppress(OSError, ConfigError):  # the client has gone, or no gateway relays
                    line = receive_line(self.request, _QUERY_LIMIT_BYTES, min(_FIRST_LINE_S, limit_s)).strip()
                    server._server.has_query(self.request)
                    query = line[: len(line) - len(run)] if line.endswith(run) else b""
                    if query == b"snapshot":
                        server._send(self.wfile.write)
                    elif query == b"status":
                        self.wfile.write(json.dumps(status()).encode() + b"\n")
                    elif exchange := _EXCHANGE.fullmatch(query):
                        if server.accepted.add(exchange[1].decode(), int(exchange[2]), self.request):
                            server._server.kept.add(self.request)
                    elif relay := _RELAY.fullmatch(query):
                        server._relay(self.request, relay[1].decode(errors="replace"), relay[2] + run)

        self._server = _TcpServer((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="snapshot server", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def adopt(self, connection: socket.socket) -> None:
        """Serve a client that is connected in another way than to this server's port."""
        self._server.process_request(connection, ("", 0))

    def publish(self, snapshot: Snapshot) -> None:
        """Send this snapshot to clients from now on."""
        with self._lock:
            self._snapshot, self._published_s, self._withdrawn = snapshot, time.monotonic(), False
            self._lock.notify_all()

    def withdraw(self) -> bool:
        """Let clients wait for the next snapshot, since this one's buffers will change. False if a client is reading it."""
        with self._lock:
            self._withdrawn = self._withdrawn or self._readers == 0
            return self._withdrawn

    @property
    def has_readers(self) -> bool:
        return self._readers > 0

    def _send(self, write: Callable[[bytes | memoryview], Any]) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not self._withdrawn, self._limit_s):
                return
            snapshot, age_s = self._snapshot, time.monotonic() - self._published_s
            self._readers += 1
        try:
            if snapshot is None:
                write(b"{}\n")
                return
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in snapshot.tensors.items()}
            shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
            write(json.dumps({"header": snapshot.header, "tensors": shapes, "age_s": age_s}).encode() + b"\n")
            checksum = Checksum()
            for tensor in tensors.values():
                for chunk in _chunks(tensor):
                    checksum.add(chunk)
                    write(chunk)
            write(f"{checksum.value}\n".encode())
        finally:
            with self._lock:
                self._readers -= 1

    @property
    def routes(self) -> Mapping[str, str]:
        """The addresses of the other members of the last quorum, by name."""
        return self._routes

    @routes.setter
    def routes(self, addresses: Mapping[str, str]) -> None:
        with self._routed:
            self._routes = dict(addresses)
            self._routed.notify_all()

    def _relay(self, client: socket.socket, name: str, line: bytes) -> None:
        """Pass a query, and all that follows it, on to the member of this name. Islands that are no members are not dialled. The
        island that asks may know a new quorum earlier than this one: then the query waits for it."""
        if not self._relays.acquire(blocking=False):
            return
        try:
            with self._routed:
                if not self._routed.wait_for(lambda: name in self._routes, QUERY_S / 2):
                    return
                address = self._routes[name]
            with self._network.dial(address, min(self._limit_s, QUERY_S)) as member:
                member.sendall(line + b"\n")
                splice(client, member)
        finally:
            self._relays.release()

    def close(self) -> None:
        self.accepted.close()
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the serving thread at once
        self._server.shutdown()
        self._server.server_close()


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counting, self._open = threading.Lock(), 0
        self._without_query: deque[Any] = deque()
        self.kept: set[Any] = set()
        """Requests whose sockets stay open after they were handled: they have another owner."""

    def shutdown_request(self, request: Any) -> None:
        if request in self.kept:
            self.kept.discard(request)
        else:
            super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._counting:
            full = self._open >= MAX_CONNECTIONS
            if not full:
                self._open += 1
                self._without_query.append(request)
            if len(self._without_query) > MAX_WITHOUT_QUERY:
                with suppress(OSError):
                    socket.socket.shutdown(self._without_query.popleft(), socket.SHUT_RDWR)  # its thread ends
        if full:
            request.close()
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # this process has no thread left
            self._ended(request)
            request.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:
        self.has_query(request)
        with self._counting:
            self._open -= 1

    def has_query(self, request: Any) -> None:
        """This connection has sent its query, or has ended."""
        with self._counting, suppress(ValueError):
            self._without_query.remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a query that is none needs no traceback in the island's log


@contextmanager
def _request(network: DirectNetwork, address: str, query: str, limit_s: float) -> Iterator[socket.socket]:
    with network.dial(address, limit_s) as connection:
        connection.sendall(f"{query} {network.run_id}".strip().encode() + b"\n")
        yield connection


def query_status(
    name: str, address: str, limit_s: float, network: DirectNetwork = _DIRECT, *, relayed: bool = False
) -> IslandStatus | None:
    """The status of the island of this name at this address; None if it does not answer within the limit, or another process that
    has taken over its port does. With `relayed`, the address is of an island that passes the query on."""
    try:
        with _request(network, address, f"relay {name} status" if relayed else "status", limit_s) as connection:
            status = IslandStatus.from_text(receive_line(connection, _STATUS_LIMIT_BYTES, limit_s, _STATUS_LIMIT_BYTES))
    except (OSError, ConfigError):  # the gateway may refuse this island
        return None
    return status if status is not None and (status.name, status.run) == (name, network.run_id) else None


def query_islands(addresses: Mapping[str, str], limit_s: float, network: DirectNetwork = _DIRECT) -> dict[str, IslandStatus]:
    """The status of each island that answers within the limit, by name. All are queried in parallel."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = pool.map(partial(query_status, limit_s=limit_s, network=network), addresses, addresses.values())
        return {name: status for name, status in zip(addresses, answers, strict=True) if status is not None}


def fetch_snapshot(
    address: str,
    limit_s: float,
    network: DirectNetwork = _DIRECT,
    expected: Mapping[str, Any] | None = None,
    moments_of: Sequence[Tensor] = (),
) -> Snapshot | None:
    """The snapshot that the island at this address serves; None if it serves none. Raises ExchangeFailed if the island does not
    answer, or the snapshot is damaged or has other tensors than the shared fields `expected` and moments of these weights."""
    try:
        with _request(network, address, "snapshot", limit_s) as connection:
            return _receive(io.BufferedReader(_Paced(connection, limit_s)), expected, moments_of)
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ConfigError) as error:
        # A RuntimeError is torch's, for a tensor that it cannot make, or Python's, for JSON that is nested too deeply.
        raise ExchangeFailed(f"no snapshot could be fetched from {address}: {error}. Another island may have it.") from error


class _Paced(io.RawIOBase):
    """What arrives over a connection, at `_LEAST_RATE` or more: a time-out of the socket's own would begin again with every byte. A
    connection may fall behind by what that rate sends in `limit_s`."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection, self._limit_s = connection, limit_s
        self._deadline_s = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(1e-3, self._deadline_s - time.monotonic()))
        count, now_s = self._connection.recv_into(buffer), time.monotonic()
        if now_s > self._deadline_s:
            raise TimeoutError(f"it sends less than {_LEAST_RATE} bytes a second")
        self._deadline_s = min(self._deadline_s + count / _LEAST_RATE, now_s + self._limit_s)
        return count


def _receive(file: Any, expected: Mapping[str, Any] | None, moments_of: Sequence[Tensor]) -> Snapshot | None:
    line = file.readline(_HEADER_LIMIT_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("it ended in its first line")
    description = json.loads(line)
    if not isinstance(description, dict):
        raise ValueError("its first line is no JSON object")
    if "header" not in description:
        return None
    kinds = {str(name): (_dtype(dtype), tuple(map(_length, shape))) for name, (dtype, shape) in description["tensors"].items()}
    if expected is not None:
        _check_kinds(kinds, expected, moments_of)
    tensors, checksum = {}, Checksum()
    for name, (dtype, shape) in kinds.items():
        tensor = tensors[name] = torch.empty(shape, dtype=dtype)
        for chunk in _chunks(tensor):
            if file.readinto(chunk) < len(chunk):
                raise EOFError("it ended in the middle")
            checksum.add(chunk)
    if file.readline(32).strip() != str(checksum.value).encode():
        raise ValueError("its checksum does not match")
    return Snapshot(description["header"], tensors, float(description["age_s"]))


_Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tuple(tensor.shape)


def _check_kinds(given: Mapping[str, _Kind], shared: Mapping[str, Any], moments_of: Sequence[Tensor]) -> None:
    """Refuse tensors that this run's model and algorithm do not have, before memory is taken for them. A rule's state may grow, by
    tensors within the shared fields; moments of the weights lie beside these. All together may have a few times the bytes of the
    fields as they are here and of one moment."""
    expected = pack(shared).tensors
    for name, tensor in expected.items():
        if given.get(name) != _kind(tensor):
            if name not in given:
                raise ValueError(f"it lacks {name}")
            raise ValueError(f"its tensor {name[:80]!r} is {_text(given[name])}, and this run has {_text(_kind(tensor))}")
    fields = {*shared, *(["moments"] if moments_of else [])}
    if others := [name for name in given if name not in expected and name.partition(".")[0] not in fields]:
        raise ValueError(f"no tensor of this run is called {others[0][:80]!r}")
    if len(given) > _MOST_TENSORS * (len(expected) + len(moments_of) + 1):
        raise ValueError(f"it has {len(given)} tensors, and this run {len(expected)}")
    own = sum(_num_bytes(_kind(tensor)) for tensor in expected.values()) + sum(4 * tensor.numel() for tensor in moments_of)
    total = sum(map(_num_bytes, given.values()))
    if total > _MOST_GROWTH * own:
        raise ValueError(f"its tensors have {total} bytes, and this run needs {_MOST_GROWTH * own} at most")


def _num_bytes(kind: _Kind) -> int:
    """A length of 0 counts as 1, so that this bounds each length."""
    dtype, shape = kind
    return dtype.itemsize * math.prod(max(1, length) for length in shape)


def _text(kind: _Kind) -> str:
    return f"{str(kind[0]).removeprefix('torch.')} of shape {kind[1]}"


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found in _INTEGERS):
        raise ValueError(f"{str(name)[:40]!r} is no dtype of a state")
    return found


def _length(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ValueError(f"{str(given)[:40]!r} is no length")
    return given


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's memory in chunks."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    memory = memoryview(flat)
    return (memory[at : at + _CHUNK_BYTES] for at in range(0, len(memory), _CHUNK_BYTES))
