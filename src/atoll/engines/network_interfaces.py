"""Addresses, this machine's network interfaces, and which of them routes to another machine.

By default gloo listens on the address that this machine's name resolves to. Many systems resolve it to 127.0.0.1 in /etc/hosts,
where no other machine can connect. So atoll asks the kernel which interface it would send packets to the other machine on.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
"""An IPv4 address or a name. Whether it can be resolved is seen when it is used."""
_PORT = re.compile(r"[0-9]{1,5}")
_UP = 1
_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where a socket address of this family has the IP address, and its length."""

_SERVER_PORTS, _ATTEMPTS = 12_768, 64
"""Of how many ports below the kernel's a server gets one, and how many it tries."""


class NetworkInterface(NamedTuple):
    """An interface that is up, and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class _Entry(ctypes.Structure):
    """The beginning of C's `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def network_interfaces() -> list[NetworkInterface]:
    """The interfaces of this machine that are up, one entry per address, IPv4 first.

    >>> "127.0.0.1" in [found.address for found in network_interfaces()]
    True
    """
    library, first = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True), ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        return []
    try:
        found = list(_entries(first))
    finally:
        library.freeifaddrs(first)
    return sorted(found, key=lambda one: ":" in one.address)


def _entries(entry: ctypes._Pointer[_Entry]) -> Iterator[NetworkInterface]:
    while entry:
        here = entry.contents
        if here.address and here.flags & _UP:
            header = ctypes.string_at(here.address, 2)
            family = header[1] if sys.platform == "darwin" else int.from_bytes(header, sys.byteorder)
            if family in _ADDRESS_AT:
                start, length = _ADDRESS_AT[socket.AddressFamily(family)]
                packed = ctypes.string_at(here.address, start + length)[start:]
                yield NetworkInterface(here.name.decode(errors="replace"), str(ipaddress.ip_address(packed)))
        entry = here.next


def interface_of(address: str) -> NetworkInterface | None:
    """The interface that has this address; None if it is not this machine's."""
    return next((one for one in network_interfaces() if one.address == address), None)


def interface_named(name: str) -> NetworkInterface | None:
    """The interface of this name, with its first address; None if this machine has none that is up."""
    return next((one for one in network_interfaces() if one.name == name), None)


def route_to(host: str, port: int = 9) -> NetworkInterface | None:
    """The interface on which this machine sends to that host, and its address there. None if there is no route, or if the host's
    name is unknown or resolves to a loopback address. Sends nothing."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
                probe.connect(where)
                address = str(probe.getsockname()[0]).partition("%")[0]
                if not is_loopback(address):
                    return interface_of(address)
    return None


def is_dialled(address: str, least_port: int = 1) -> bool:
    """Whether this is HOST:PORT.

    >>> [is_dialled(one) for one in ("192.0.2.7:7000", "box.example:1", "box.example", "box:0", "::1:7000")]
    [True, True, False, False, False]
    """
    host, _, port = address.rpartition(":")
    return bool(_HOST.fullmatch(host)) and bool(_PORT.fullmatch(port)) and least_port <= int(port) < 1 << 16


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this address. A name other than localhost counts as another machine's.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("192.0.2.7"), is_loopback("box.example")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_interfaces() -> list[NetworkInterface]:
    """The interfaces that other machines may reach."""
    addresses = ((one, ipaddress.ip_address(one.address)) for one in network_interfaces())
    return [one for one, address in addresses if not (address.is_loopback or address.is_link_local)]


def beyond_loopback() -> str:
    """The interfaces that other machines may reach, for a message."""
    return ", ".join(map(str, reachable_interfaces())) or "none"


def refuse_loopback_name(setting: str, host: str, address: str) -> None:
    """Refuse to listen for other machines at a name that resolves to a loopback address here. An address, and localhost, say that
    they are for this machine alone."""
    if is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            f"{setting}: {host} is {address} here, which no other machine reaches. This machine has {beyond_loopback()}: give one "
            f"of these addresses, or correct the line of {host} in /etc/hosts."
        )


def free_port(host: str, wanted: int = 0) -> int:
    """The port that is wanted, if it is free; else another. It lies below those that the kernel gives to outgoing connections, so
    that none of them takes it before the server starts, or while it restarts."""
    limits, first = Path("/proc/sys/net/ipv4/ip_local_port_range"), 1 << 15
    if limits.exists():
        first = int(limits.read_text().split()[0])
    lowest = max(first - _SERVER_PORTS, 1 << 14)
    others = (lowest + secrets.randbelow(first - lowest) for _ in range(_ATTEMPTS if first > lowest else 0))
    for port in filter(None, [wanted, *others]):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as listener:  # the error tells why, if this machine cannot listen there
        return int(listener.getsockname()[1])
