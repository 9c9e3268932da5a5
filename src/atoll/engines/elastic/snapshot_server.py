"""Where an island hands out the state that was last committed, to whoever joins: while it trains on.

Two questions, each with one answer. Whether it is alive: a line of JSON. The state: a line of JSON that says what follows, then the
tensors as they lie in memory, then their checksum. Nothing that is received is ever run. What is being read keeps its buffers: the
owner asks whether anybody reads before it reuses them.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import ExchangeFailed

_CHUNK = 1 << 20
_MOST_HEADER = 64 << 20


@dataclass(frozen=True)
class Cargo:
    """What is handed out.

    Attributes:
        header: plain data.
        tensors: on the CPU or not, by name.
        age_s: how long ago it was put there, when it was asked for.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    age_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Pier:
    """A server for one kind of cargo.

    Args:
        host: the address to listen on.
        about: what is said of this island to whoever asks whether it is alive.
        limit_s: how long somebody is waited for who asks, and then does not read on.
    """

    def __init__(self, host: str, about: Callable[[], Mapping[str, Any]] = dict, limit_s: float = 120.0) -> None:
        self._cargo: Cargo | None = None
        self._put_s = 0.0
        self._changing = threading.Lock()
        self._readers = 0
        self.handed_out_bytes = 0
        """Since the beginning."""
        pier = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = limit_s

            def handle(self) -> None:
                with suppress(OSError):  # whoever asks has gone
                    asked = self.rfile.readline(64).strip()
                    if asked == b"state":
                        pier._hand_out(self.wfile.write)
                    elif asked == b"alive":
                        self.wfile.write(json.dumps(about()).encode() + b"\n")

        self._server = _server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="pier", daemon=True).start()

    @contextmanager
    def changing(self) -> Iterator[Callable[[Cargo], None]]:
        """Nobody begins to read meanwhile. Gives what puts new cargo there."""

        def put(cargo: Cargo) -> None:
            self._cargo, self._put_s = cargo, time.monotonic()

        with self._changing:
            yield put

    @property
    def busy(self) -> bool:
        """Whether somebody reads."""
        return self._readers > 0

    def _hand_out(self, write: Callable[[bytes | memoryview], Any]) -> None:
        with self._changing:
            cargo, age_s = self._cargo, time.monotonic() - self._put_s
            self._readers += 1
        try:
            if cargo is None:
                write(json.dumps({"nothing": True}).encode() + b"\n")
                return
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in cargo.tensors.items()}
            shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
            write(json.dumps({"header": cargo.header, "tensors": shapes, "age_s": age_s}).encode() + b"\n")
            checksum = 0
            for tensor in tensors.values():
                for chunk in _chunks(tensor):
                    checksum = zlib.crc32(chunk, checksum)
                    write(chunk)
            write(f"{checksum}\n".encode())
            self.handed_out_bytes += cargo.nbytes
        finally:
            with self._changing:
                self._readers -= 1

    def close(self) -> None:
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits there: it would look again a moment later only
        self._server.shutdown()
        self._server.server_close()


def ask(address: str, limit_s: float) -> dict[str, Any] | None:
    """What is said of the island there; none if nobody answers in time."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=limit_s) as connection:
            connection.sendall(b"alive\n")
            with connection.makefile("rb") as file:
                said: dict[str, Any] = json.loads(file.readline(_MOST_HEADER))
                return said
    except (OSError, ValueError):
        return None


def fetch(address: str, limit_s: float) -> Cargo | None:
    """What is handed out there; none if it has nothing.

    Raises:
        ExchangeFailed: nobody answers there, or what came is damaged.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=limit_s) as connection:
            connection.sendall(b"state\n")
            with connection.makefile("rb") as file:
                return _read(file)
    except (OSError, EOFError, ValueError) as error:
        raise ExchangeFailed(f"the state could not be fetched from {address}: {error}. Another island may have it.") from error


def _read(file: Any) -> Cargo | None:
    line = file.readline(_MOST_HEADER)
    if not line.endswith(b"\n"):
        raise EOFError("it ended in its first line")
    told = json.loads(line)
    if "header" not in told:
        return None
    tensors, checksum = {}, 0
    for name, (dtype, shape) in told["tensors"].items():
        tensor = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        for chunk in _chunks(tensor):
            _fill(file, chunk)
            checksum = zlib.crc32(chunk, checksum)
    if file.readline(32).strip() != str(checksum).encode():
        raise ValueError("its checksum is another")
    return Cargo(told["header"], tensors, told["age_s"])


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's memory, piece by piece."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    memory = memoryview(flat) if tensor.numel() else memoryview(b"")
    return (memory[at : at + _CHUNK] for at in range(0, len(memory), _CHUNK))


def _fill(file: Any, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        count = file.readinto(memory[at:])
        if not count:
            raise EOFError("it ended in the middle")
        at += count


class _server(socketserver.ThreadingTCPServer):  # noqa: N801
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
