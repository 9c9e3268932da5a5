"""What the gateway of a run and its clients send each other: one line of JSON each way, and then the bytes of a stream."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeAlias

from atoll.core.errors import ConfigError

PROTOCOL = 3
"""Of all that the islands of a run send each other. 3: a status has the id at the lighthouse; 2: checksums are XXH3; 1: CRC-32."""
HANDSHAKE_S = 10.0
"""The longest that a connection may remain without a certificate."""
LINE_BYTES = 4096
LONGEST_WAIT_S = 60.0
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Routers forget silent connections, and a machine without power closes none."""
STREAM = b"\x01"
Stream: TypeAlias = socket.socket  # plain or TLS


class GatewayRefused(ConfigError):
    """The run's gateway refuses this island for good: it was revoked, or is of another version."""


class WrongGateway(ConfigError):
    """The address belongs to another run, or to the same run with other certificates."""


def wire_version() -> str:
    """What all islands of a run have in common, in words: between two releases of atoll the protocol may change, too."""
    return f"{version('atoll')}, protocol {PROTOCOL}"


def keep_alive(connection: Stream) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(OSError, AttributeError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send_line(stream: Stream, **record: Any) -> None:
    stream.sendall(json.dumps(record).encode() + b"\n")
