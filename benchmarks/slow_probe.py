"""Bandwidth and latency of a link, measured with plain sockets: the simulator's inputs. And the bytes that a device sends."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from slow_island import IslandGroup

HEADER_BYTES = 66
"""Ethernet, IP and TCP headers with time stamps, per packet."""
PINGS = 20
_CHUNK_BYTES = 1 << 18
_PING_BYTES = 8


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that a network device has sent."""

    sent_bytes: int
    sent_packets: int

    @staticmethod
    def read(device: str) -> Counters:
        """Of a device in this process's namespace."""
        folder = Path("/sys/class/net") / device / "statistics"
        return Counters(*(int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")))

    def payload_since(self, before: Counters) -> int:
        """Bytes without headers. A packet that a network card would segment counts as one packet with one header."""
        sent, packets = self.sent_bytes - before.sent_bytes, self.sent_packets - before.sent_packets
        return sent - HEADER_BYTES * packets


def probe(group: IslandGroup, num_bytes: int) -> dict[str, float]:
    """Payload in Mbit/s per direction while both islands send this many bytes, and the one-way latency in seconds."""
    with _connected(group) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(group.spec.limit_s)
        _both_ways(group, connection, max(1, num_bytes // 8))  # TCP's slow start
        latency_s = statistics.median(_ping_s(group, connection) for _ in range(PINGS)) / 2
        taken_s = _both_ways(group, connection, num_bytes)
    return {"mbit_per_s": num_bytes * 8 / 1e6 / taken_s, "latency_s": latency_s}


def _connected(group: IslandGroup) -> socket.socket:
    if group.rank == 0:
        with socket.create_server((group.spec.address, 0)) as server:
            server.settimeout(group.spec.limit_s)
            group.store.set("probe", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection((group.spec.addresses[0], int(group.store.get("probe"))), timeout=group.spec.limit_s)


def _both_ways(group: IslandGroup, connection: socket.socket, num_bytes: int) -> float:
    """Seconds until this end has received as many bytes as it sends."""
    dist.barrier()
    start_s = time.perf_counter()
    sending = threading.Thread(target=_send, args=(connection, num_bytes))
    sending.start()
    _receive(connection, num_bytes)
    taken_s = time.perf_counter() - start_s
    sending.join()
    return taken_s


def _ping_s(group: IslandGroup, connection: socket.socket) -> float:
    """The round-trip time, measured by the first island; the second answers."""
    start_s = time.perf_counter()
    if group.rank == 0:
        _send(connection, _PING_BYTES)
    _receive(connection, _PING_BYTES)
    if group.rank != 0:
        _send(connection, _PING_BYTES)
    return time.perf_counter() - start_s


def _send(connection: socket.socket, num_bytes: int) -> None:
    zeros = memoryview(bytes(_CHUNK_BYTES))
    for start in range(0, num_bytes, _CHUNK_BYTES):
        connection.sendall(zeros[: min(_CHUNK_BYTES, num_bytes - start)])


def _receive(connection: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while num_bytes > 0:
        got = connection.recv_into(buffer[: min(_CHUNK_BYTES, num_bytes)])
        if not got:
            raise ConnectionError("the other island closed the connection")
        num_bytes -= got
