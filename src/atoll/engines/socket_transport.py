"""Messages between the ranks of a group over connected stream sockets, plain or TLS: for networks that gloo is not trusted with.

A message is a header (kind, sequence number, length, and a CRC-32 of these) and the payload. Payloads go from the sender's tensor
into the receiver's, without a copy of this module's own. The receiver compares the announced length with the posted tensor before
it reads the payload, so a peer cannot make it take memory. Payloads carry no checksum here: TLS authenticates every record, and
commits compare checksums of all that was exchanged.

`connect_group` connects the members of a group: each dials those of lower rank, directly, or through a member that reaches both.

Each connection has one thread, which alone reads and writes its socket, without blocking. OpenSSL forbids to read and to write one
connection from two threads at a time, and Python takes a lock for that only since 3.13.
"""

from __future__ import annotations

import mmap
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from atoll.core.verified_files import parse_json
from atoll.engines.point_to_point import PeerUnreachable, host_buffers

_MAGIC = 0x41544C4C
_FIELDS, _CHECK = struct.Struct("<IIQ"), struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECK.size
_JOINED_BYTES = 4096
"""A payload up to this size travels in one piece with its header."""
_TLS_PIECE_BYTES = 1 << 18
"""OpenSSL ends a write that it has begun before it reads. Shorter writes keep both directions going."""
_READS = _TLS_PIECE_BYTES >> 14
"""Before the next write is tried. A read returns one TLS record at most, of 16 KiB."""
_RELAY_BYTES, _IDLE_S, _HALF_OPEN_S = 1 << 18, 1.0, 60.0
"""A stream that one end has closed is forwarded for at most so long without a byte from the other."""
_SEND, _RECEIVE = 0, 1
_ACTIONS = "send to", "receive from"
_CLOSED = "connection closed by peer"
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_EVENTS: Mapping[type[Exception], int] = {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
"""TLS may have to read before it can write, and the reverse."""


class SocketGroup:
    """The ranks of a group that are connected pairwise. A `point_to_point.Transport`.

    Args:
        connections: a connected stream socket for each other rank, which the group owns from now on.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        if missing := {*range(size)} - {rank, *connections}:
            raise ValueError(f"rank {rank} of {size} has no connection to ranks {sorted(missing)}")
        self._rank, self._size = rank, size
        self._connections = {other: _Connection(other, connection) for other, connection in connections.items()}

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def abort(self, why: str = "the exchange was aborted") -> None:
        """End all messages with an error, and close the sockets. No tensor is read or written any more when it returns."""
        for connection in self._connections.values():
            connection.fail(why)
        for connection in self._connections.values():
            connection.join()

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[float], None]:
        """Start to send these tensors to these ranks, and to receive into those. Returns a function that waits for all of them, for
        at most the given seconds each, and raises PeerUnreachable. Messages from one rank to another arrive in order of posts."""
        outgoing, incoming = host_buffers(sends, receives)
        posted = [(rank, _RECEIVE, self._connections[rank].post(_RECEIVE, _memory(t))) for rank, t in incoming.items()]
        posted += [(rank, _SEND, self._connections[rank].post(_SEND, _memory(t))) for rank, t in outgoing.items()]

        def wait(timeout_s: float) -> None:
            for rank, direction, number in posted:
                self._connections[rank].wait(direction, number, timeout_s)
                if direction == _RECEIVE and receives[rank].is_cuda:
                    receives[rank].copy_(incoming[rank], non_blocking=True)

        return wait


class _Connection:
    """The messages to and from one rank, in the order of their posts."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank, self._socket, self._is_tls = rank, connection, isinstance(connection, ssl.SSLSocket)
        connection.setblocking(False)
        with suppress(OSError):  # a Unix socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._changed = threading.Condition()
        self._queues: tuple[deque[memoryview], deque[memoryview]] = deque(), deque()
        self._posted, self._done = [0, 0], [0, 0]
        self._error: str | None = None
        self._asleep = False
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._out: deque[memoryview] = deque()
        """Pieces of the message that is being sent."""
        self._header, self._header_bytes = bytearray(_HEADER_BYTES), 0
        self._payload: memoryview | None = None
        """What is missing of the payload that is being received; None before its header is complete."""
        self._poll, self._events = select.poll(), 0
        self._poll.register(self._wakes, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"socket to rank {rank}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------- the caller's thread

    def post(self, direction: int, memory: memoryview) -> int:
        """Returns the number of this message."""
        with self._changed:
            if self._error is not None:
                raise PeerUnreachable(self._rank, _ACTIONS[direction], self._error)
            self._queues[direction].append(memory)
            self._posted[direction] += 1
            self._awaken()
            return self._posted[direction]

    def wait(self, direction: int, number: int, timeout_s: float) -> None:
        with self._changed:
            over = self._changed.wait_for(lambda: self._done[direction] >= number or self._error is not None, timeout_s)
            if self._done[direction] >= number:
                return
            error = self._error
        if not over:
            self.fail(error := f"it timed out after {timeout_s:g} s")
            self.join()  # the thread would go on to read into the tensor, or write from it
        raise PeerUnreachable(self._rank, _ACTIONS[direction], error or "")

    def fail(self, why: str) -> None:
        """End all messages with this error; the thread closes the socket."""
        with self._changed:
            if self._error is None:
                self._error = why
                self._changed.notify_all()
                self._awaken()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _awaken(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake.send(b"w")

    # ---------------------------------------------------------------------------------------------------- the connection's thread

    def _run(self) -> None:
        works = (_SEND, self._send_some, select.POLLOUT), (_RECEIVE, self._receive_some, select.POLLIN)
        try:
            while self._error is None:
                wanted, idle, progressed = 0, [], False
                for direction, work, event in works:
                    try:
                        if work():
                            progressed = True
                        else:
                            idle.append(direction)
                    except _WOULD_BLOCK as blocked:
                        wanted |= _EVENTS.get(type(blocked), event)
                if not progressed:
                    self._sleep(wanted, idle)
        except (OSError, ValueError) as error:
            self._drain()
            self.fail(str(error) or type(error).__name__)
        finally:
            for one in (self._socket, self._wakes, self._wake):
                one.close()

    def _send_some(self) -> bool:
        """Send a piece. Returns False if there is nothing to send."""
        if not self._out:
            with self._changed:
                if not self._queues[_SEND]:
                    return False
                payload, number = self._queues[_SEND].popleft(), self._done[_SEND]
            fields = _FIELDS.pack(_MAGIC, number & 0xFFFFFFFF, len(payload))
            header = fields + _CHECK.pack(zlib.crc32(fields))
            if len(payload) <= _JOINED_BYTES:
                self._out.append(memoryview(header + bytes(payload)))
            else:
                length = _TLS_PIECE_BYTES if self._is_tls else len(payload)
                self._out.append(memoryview(header))
                self._out.extend(payload[at : at + length] for at in range(0, len(payload), length))
        sent = self._socket.send(self._out[0])
        if sent < len(self._out[0]):
            self._out[0] = self._out[0][sent:]
            return True
        self._out.popleft()
        if not self._out:
            self._finish(_SEND)
        return True

    def _receive_some(self) -> bool:
        """Receive a piece. Returns False if no message is expected."""
        queue = self._queues[_RECEIVE]
        if not queue:  # what arrives before it is expected stays in the socket
            return False
        if self._payload is None:
            self._header_bytes += self._read(memoryview(self._header)[self._header_bytes :])
            if self._header_bytes < _HEADER_BYTES:
                return True
            self._check_header(len(queue[0]))
            self._payload = queue[0]
        for _ in range(_READS):
            if self._payload:
                self._payload = self._payload[self._read(self._payload) :]
        if not self._payload:
            self._payload, self._header_bytes = None, 0
            queue.popleft()
            self._finish(_RECEIVE)
        return True

    def _read(self, into: memoryview) -> int:
        count = self._socket.recv_into(into)
        if count == 0:
            raise ConnectionResetError(_CLOSED)
        return count

    def _check_header(self, expected: int) -> None:
        fields = bytes(self._header[: _FIELDS.size])
        magic, number, length = _FIELDS.unpack(fields)
        if magic != _MAGIC or _CHECK.unpack(self._header[_FIELDS.size :])[0] != zlib.crc32(fields):
            raise ValueError("it sent what is no message header")
        if number != self._done[_RECEIVE] & 0xFFFFFFFF:
            raise ValueError(f"it announced message {number}, and message {self._done[_RECEIVE]} was expected")
        if length != expected:
            raise ValueError(f"it announced {length} bytes, and {expected} were expected")

    def _finish(self, direction: int) -> None:
        with self._changed:
            self._done[direction] += 1
            self._changed.notify_all()

    def _sleep(self, wanted: int, idle: Iterable[int]) -> None:
        """Wait until the socket is ready for the wanted events, or a message is posted, or the group is aborted."""
        with self._changed:
            if self._error is not None or any(self._queues[direction] for direction in idle):
                return
            self._asleep = True
        if wanted != self._events:
            # Without a wanted event it is not registered: a hang-up is always reported, and would be again and again.
            if not wanted:
                self._poll.unregister(self._socket)
            else:
                self._poll.register(self._socket, wanted)
            self._events = wanted
        ready = self._poll.poll()
        with self._changed:
            self._asleep = False
        if any(descriptor == self._wakes.fileno() for descriptor, _ in ready):
            self._wakes.recv(64)

    def _drain(self) -> None:
        """Receive what the peer sent before it closed its connection, which a send may notice first."""
        with suppress(OSError, ValueError):
            while self._error is None and self._receive_some():
                pass


# -------------------------------------------------------------------------------------------------------------------- connecting

Dial = Callable[[str, float], socket.socket]
"""Connects to a server, given its name or address, within so many seconds. Raises OSError."""
_CONNECTED = b"connected\n"


class AcceptedConnections:
    """Connections that other members dialled, until this member's side of their group takes them: members do not begin to connect
    at the same moment. The oldest are closed if there are more than `most`, and after `limit_s`."""

    def __init__(self, most: int = 128, limit_s: float = 60.0) -> None:
        self._most, self._limit_s = most, limit_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, str, int, socket.socket]] = deque()
        self._stale: deque[str] = deque(maxlen=64)
        """Keys of groups that are connected, or were given up."""

    def add(self, key: str, rank: int, connection: socket.socket) -> bool:
        """Returns False, and leaves the connection to the caller, if the group of this key needs no connection any more."""
        with self._changed:
            if key in self._stale:
                return False
            self._waiting.append((time.monotonic(), key, rank, connection))
            while self._waiting and (len(self._waiting) > self._most or self._waiting[0][0] < time.monotonic() - self._limit_s):
                self._waiting.popleft()[3].close()
            self._changed.notify_all()
            return True

    def has(self, key: str) -> bool:
        """Whether a member waits to be connected with under this key."""
        with self._changed:
            return any(waiting == key for _, waiting, _, _ in self._waiting)

    def take(self, key: str, ranks: Collection[int], limit_s: float) -> dict[int, socket.socket]:
        """The connections of these ranks, when all of them have arrived. Afterwards the key is stale. Raises TimeoutError."""
        found: dict[int, socket.socket] = {}

        def all_arrived() -> bool:
            found.update((rank, connection) for _, waiting, rank, connection in self._waiting if waiting == key)
            return found.keys() >= {*ranks}

        with self._changed:
            arrived = self._changed.wait_for(all_arrived, limit_s)
            self._stale.append(key)
            for entry in [entry for entry in self._waiting if entry[1] == key]:
                self._waiting.remove(entry)
                if not arrived or found[entry[2]] is not entry[3] or entry[2] not in ranks:
                    entry[3].close()
        if not arrived:
            raise TimeoutError(f"ranks {sorted({*ranks} - found.keys())} did not connect within {limit_s:.1f} s")
        return {rank: found[rank] for rank in ranks}

    def close(self) -> None:
        with self._changed:
            while self._waiting:
                self._waiting.popleft()[3].close()


def connect_group(
    names: Sequence[str],
    rank: int,
    key: str,
    dial: Dial,
    accepted: AcceptedConnections,
    limit_s: float,
    relayed: Collection[str] = (),
    run_id: str = "",
) -> SocketGroup:
    """Connect the members of a group, whose names are in rank order. `key` identifies this attempt to connect.

    Each member dials those of lower rank, sends the line `exchange KEY RANK RUN`, and waits until that member has received the
    connections of all ranks above its own. A member that cannot be dialled is dialled through another one, with the line
    `relay NAME exchange KEY RANK RUN`; those in `relayed` at once. Raises OSError if not all are connected within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    line = f"exchange {key} {rank} {run_id}".strip()

    def dialled(name: str) -> socket.socket:
        relays = [other for other in names if other not in (name, names[rank])]
        direct_s = deadline_s if not relays else (deadline_s + time.monotonic()) / 2
        ways = [(name, line, direct_s), *((relay, f"relay {name} {line}", deadline_s) for relay in relays)]
        error: OSError = TimeoutError("it did not answer")
        for target, sent, until_s in ways[1:] + ways[:1] if name in relayed else ways:
            try:
                return _request(dial, target, sent, until_s, deadline_s)
            except OSError as failed:
                error = failed if target == name else error
        raise type(error)(f"{name} cannot be reached{' directly, nor through another member' if relays else ''}: {error}")

    connections: dict[int, socket.socket] = {}
    with ThreadPoolExecutor(max(1, rank)) as pool:
        dialling = {other: pool.submit(dialled, names[other]) for other in range(rank)}
        errors: list[OSError] = []
        try:
            connections |= accepted.take(key, range(rank + 1, len(names)), limit_s)
            for connection in connections.values():
                connection.settimeout(max(0.01, deadline_s - time.monotonic()))
                connection.sendall(_CONNECTED)
        except OSError as error:
            errors.append(error)
        for other, one in dialling.items():
            try:
                connections[other] = one.result()
            except OSError as error:
                errors.append(error)
    if errors:
        for connection in connections.values():
            connection.close()
        raise errors[-1]
    return SocketGroup(rank, len(names), connections)


def receive_line(stream: socket.socket, most_bytes: int, limit_s: float, piece: int = 1) -> bytes:
    """A line, which must be complete within `limit_s`: a time-out of the socket's own would begin again with every byte. It is
    shorter if the other end closes the connection, or after `most_bytes`. Reads `piece` bytes at once: with 1 not a byte behind the
    line."""
    line, deadline_s, own_s = b"", time.monotonic() + limit_s, stream.gettimeout()
    try:
        while not line.endswith(b"\n") and len(line) < most_bytes:
            stream.settimeout(max(1e-3, deadline_s - time.monotonic()))
            received = stream.recv(min(piece, most_bytes - len(line)))
            if not received:
                break
            line += received
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no line arrived within {limit_s:g} s")
    finally:
        stream.settimeout(own_s)
    return line


def receive_record(stream: socket.socket, most_bytes: int, limit_s: float) -> dict[str, Any]:
    """A line with a JSON object, and not a byte behind it. ValueError if something else arrives."""
    line = receive_line(stream, most_bytes, limit_s)
    if not line.endswith(b"\n"):
        raise ValueError(f"the other end sent no line of at most {most_bytes} bytes")
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError("the other end sent a line that is no JSON") from error
    if not isinstance(record, dict):
        raise ValueError("the other end sent a line that is no JSON object")
    return record


def _request(dial: Dial, target: str, line: str, dial_until_s: float, until_s: float) -> socket.socket:
    """A connection to a member's server that has sent this line and received that it is connected."""
    connection = dial(target, max(0.01, dial_until_s - time.monotonic()))
    try:
        connection.sendall(f"{line}\n".encode())
        answer = b""
        while len(answer) < len(_CONNECTED):
            connection.settimeout(max(0.01, until_s - time.monotonic()))
            received = connection.recv(len(_CONNECTED) - len(answer))
            if not received:
                raise ConnectionResetError(f"{target} has closed the connection")
            answer += received
        if answer != _CONNECTED:
            raise ConnectionResetError(f"{target} answered {answer!r} in place of {_CONNECTED!r}")
    except OSError:
        connection.close()
        raise
    return connection


class _Flow:
    """Bytes from one stream on their way to another."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        # The system gives pages to such a buffer when bytes are written there, and takes them back from one that is idle.
        self._pages = mmap.mmap(-1, _RELAY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = memoryview(self._pages)
        self._start = self._stop = 0
        self._ended = False
        self.done = False

    def step(self, wanted: dict[int, int]) -> bool:
        """Forward what can be forwarded at once. Returns whether anything was; `wanted` gets the events to wait for."""
        moved = False
        if not self._ended and self._stop < len(self._memory):
            with _noting(wanted, self._source, select.POLLIN):
                while self._stop < len(self._memory):  # one call of TLS returns one record at most
                    read = self._source.recv_into(self._memory[self._stop :])
                    self._stop, moved = self._stop + read, True
                    if not read:
                        self._ended = True
                        break
        if self._start < self._stop:
            with _noting(wanted, self._sink, select.POLLOUT):
                self._start += self._sink.send(self._memory[self._start : self._stop])
                moved = True
        if self._start == self._stop:
            self._start = self._stop = 0
            if self._ended and not self.done:
                self.done = True
                with suppress(OSError):
                    socket.socket.shutdown(self._sink, socket.SHUT_WR)  # TLS's own would drop what is still to be read
        return moved

    def release(self) -> None:
        """Give the memory back if no byte waits there: a gateway keeps thousands of streams, and most are idle."""
        if self._start == self._stop:
            self._pages.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _noting(wanted: dict[int, int], stream: socket.socket, event: int) -> Iterator[None]:
    """Notes the event that a non-blocking call has to wait for. TLS may have to write in order to read, and the reverse."""
    try:
        yield
    except ssl.SSLWantReadError:
        event = select.POLLIN
    except ssl.SSLWantWriteError:
        event = select.POLLOUT
    except BlockingIOError:
        pass
    else:
        return
    wanted[stream.fileno()] = wanted.get(stream.fileno(), 0) | event


def splice(one: socket.socket, two: socket.socket) -> None:
    """Forward bytes both ways until both ends have closed, or one of them fails. Closes both."""
    with closing(one), closing(two), suppress(OSError, ValueError):  # ValueError: another thread has closed one of them
        for stream in (one, two):
            stream.setblocking(False)
            with suppress(OSError):  # a Unix socket
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        flows = _Flow(one, two), _Flow(two, one)
        while not all(flow.done for flow in flows):
            wanted: dict[int, int] = {}
            moved = [flow.step(wanted) for flow in flows]
            if any(moved):
                continue
            poll = select.poll()
            for descriptor, events in wanted.items():
                poll.register(descriptor, events)
            if poll.poll(_IDLE_S * 1000):
                continue
            for flow in flows:
                flow.release()
            half_open = any(flow.done for flow in flows)
            if not poll.poll(_HALF_OPEN_S * 1000 if half_open else None) and half_open:
                return


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, as they lie in memory."""
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
