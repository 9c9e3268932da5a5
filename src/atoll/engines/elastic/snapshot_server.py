"""An island's server for other islands: it answers status queries, and sends the last committed state while the island trains on.

A status query is answered by one line of JSON. A snapshot is one line of JSON that describes the tensors, the tensors as they lie
in memory, and their checksum. The receiver runs nothing that it receives. A snapshot that is being read keeps its buffers: the
island asks `has_readers` before it reuses them.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion

QUERY_S = 1.0
"""How long a status query may take."""
SILENT_S = 6.0
"""An island that answers no query for so long is taken for dead."""
_CHUNK_BYTES = 1 << 20
_HEADER_LIMIT_BYTES = 64 << 20


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
    exchanging: bool = False  # whether a newer state may be committed at any moment
    confirmed: bool = True  # whether it took part in the commit of the state that it holds, or knows it to be the newest
    suspects: frozenset[str] = frozenset()  # islands that it could not exchange with since its last commit
    heartbeat: int = 0  # counts its registrations
    process: str = ""  # its identity: a restarted island of the same name has another
    has_copy: bool = field(init=False, default_factory=bool)  # whether its folder is a copy of its own, which it alone writes
    standby: str = field(init=False, default_factory=str)  # the addresses of registry and lighthouse of a rendezvous that it runs
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
            converted = {"phase": IslandPhase(sent["phase"]), "version": StateVersion.of(sent["version"])}
        except ValueError:
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


class SnapshotServer:
    """Serves one island's status and its newest snapshot. A client that stops reading is dropped after `limit_s`."""

    def __init__(self, host: str, status: Callable[[], Mapping[str, Any]] = dict, limit_s: float = 120.0) -> None:
        self._snapshot: Snapshot | None = None
        self._published_s = 0.0
        self._lock = threading.Lock()
        self._readers = 0
        server = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = limit_s

            def handle(self) -> None:
                with suppress(OSError):  # the client has gone
                    query = self.rfile.readline(64).strip()
                    if query == b"snapshot":
                        server._send(self.wfile.write)
                    elif query == b"status":
                        self.wfile.write(json.dumps(status()).encode() + b"\n")

        self._server = _TcpServer((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="snapshot server", daemon=True).start()

    def publish(self, snapshot: Snapshot) -> None:
        """Send this snapshot to clients from now on."""
        with self._lock:
            self._snapshot, self._published_s = snapshot, time.monotonic()

    @property
    def has_readers(self) -> bool:
        return self._readers > 0

    def _send(self, write: Callable[[bytes | memoryview], Any]) -> None:
        with self._lock:
            snapshot, age_s = self._snapshot, time.monotonic() - self._published_s
            self._readers += 1
        try:
            if snapshot is None:
                write(b"{}\n")
                return
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in snapshot.tensors.items()}
            shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
            write(json.dumps({"header": snapshot.header, "tensors": shapes, "age_s": age_s}).encode() + b"\n")
            checksum = 0
            for tensor in tensors.values():
                for chunk in _chunks(tensor):
                    checksum = zlib.crc32(chunk, checksum)
                    write(chunk)
            write(f"{checksum}\n".encode())
        finally:
            with self._lock:
                self._readers -= 1

    def close(self) -> None:
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the serving thread at once
        self._server.shutdown()
        self._server.server_close()


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64


@contextmanager
def _request(address: str, query: bytes, limit_s: float) -> Iterator[Any]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=limit_s) as connection:
        connection.sendall(query)
        with connection.makefile("rb") as file:
            yield file


def query_status(name: str, address: str, limit_s: float) -> IslandStatus | None:
    """The status of the island of this name at this address; None if it does not answer within the limit, or another process that
    has taken over its port does."""
    try:
        with _request(address, b"status\n", limit_s) as file:
            status = IslandStatus.from_text(file.readline(_HEADER_LIMIT_BYTES))
    except OSError:
        return None
    return status if status is not None and status.name == name else None


def refuses(address: str) -> bool:
    """Whether no process listens at this address, and the machine says so."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=QUERY_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass
    return False


def query_islands(addresses: Mapping[str, str], limit_s: float) -> dict[str, IslandStatus]:
    """The status of each island that answers within the limit, by name. All are queried in parallel."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = pool.map(partial(query_status, limit_s=limit_s), addresses, addresses.values())
        return {name: status for name, status in zip(addresses, answers, strict=True) if status is not None}


def fetch_snapshot(address: str, limit_s: float) -> Snapshot | None:
    """The snapshot that the island at this address serves; None if it serves none. Raises ExchangeFailed if the island does not
    answer, or the snapshot is damaged."""
    try:
        with _request(address, b"snapshot\n", limit_s) as file:
            return _receive(file)
    except (OSError, EOFError, ValueError) as error:
        raise ExchangeFailed(f"no snapshot could be fetched from {address}: {error}. Another island may have it.") from error


def _receive(file: Any) -> Snapshot | None:
    line = file.readline(_HEADER_LIMIT_BYTES)
    if not line.endswith(b"\n"):
        raise EOFError("it ended in its first line")
    description = json.loads(line)
    if not isinstance(description, dict):
        raise ValueError("its first line is no JSON object")
    if "header" not in description:
        return None
    tensors, checksum = {}, 0
    for name, (dtype, shape) in description["tensors"].items():
        tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        for chunk in _chunks(tensor):
            if file.readinto(chunk) < len(chunk):
                raise EOFError("it ended in the middle")
            checksum = zlib.crc32(chunk, checksum)
    if file.readline(32).strip() != str(checksum).encode():
        raise ValueError("its checksum does not match")
    return Snapshot(description["header"], tensors, description["age_s"])


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's memory in chunks."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    memory = memoryview(flat)
    return (memory[at : at + _CHUNK_BYTES] for at in range(0, len(memory), _CHUNK_BYTES))
