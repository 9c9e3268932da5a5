"""The bandwidth and latency of a link, measured with plain sockets: the simulator's inputs."""

from __future__ import annotations

import socket
import statistics
import threading
import time

from slow_island import Meeting

PINGS = 20
_AT_ONCE = 1 << 18
_PING_BYTES = 8


def probe(meeting: Meeting, num_bytes: int) -> dict[str, float]:
    """Payload in Mbit/s each way while both send so many bytes at a time, and one way's latency in seconds."""
    with _connected(meeting) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(meeting.spec.limit_s)
        _both_ways(meeting, line, max(1, num_bytes // 8))  # a connection begins slowly
        latency_s = statistics.median(_ping_s(meeting, line) for _ in range(PINGS)) / 2
        taken_s = _both_ways(meeting, line, num_bytes)
    return {"mbit_per_s": num_bytes * 8 / 1e6 / taken_s, "latency_s": latency_s}


def _connected(meeting: Meeting) -> socket.socket:
    if meeting.rank == 0:
        with socket.create_server((meeting.spec.address, 0)) as server:
            server.settimeout(meeting.spec.limit_s)
            meeting.tell("probe", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection((meeting.spec.addresses[0], int(meeting.told("probe"))), timeout=meeting.spec.limit_s)


def _both_ways(meeting: Meeting, line: socket.socket, num_bytes: int) -> float:
    """Seconds until this end has received as much as it sends meanwhile."""
    meeting.together()
    start_s = time.perf_counter()
    sending = threading.Thread(target=_send, args=(line, num_bytes))
    sending.start()
    _receive(line, num_bytes)
    taken_s = time.perf_counter() - start_s
    sending.join()
    return taken_s


def _ping_s(meeting: Meeting, line: socket.socket) -> float:
    """There and back, seen from the first; the second answers."""
    start_s = time.perf_counter()
    if meeting.rank == 0:
        _send(line, _PING_BYTES)
    _receive(line, _PING_BYTES)
    if meeting.rank != 0:
        _send(line, _PING_BYTES)
    return time.perf_counter() - start_s


def _send(line: socket.socket, num_bytes: int) -> None:
    zeros = memoryview(bytes(_AT_ONCE))
    for start in range(0, num_bytes, _AT_ONCE):
        line.sendall(zeros[: min(_AT_ONCE, num_bytes - start)])


def _receive(line: socket.socket, num_bytes: int) -> None:
    room = memoryview(bytearray(_AT_ONCE))
    while num_bytes > 0:
        got = line.recv_into(room[: min(_AT_ONCE, num_bytes)])
        if not got:
            raise ConnectionError("the other island hung up")
        num_bytes -= got
