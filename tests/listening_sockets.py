"""The sockets on which a process and its descendants listen, from /proc. Linux only."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = {"tcp": "0A", "udp": "07"}
"""The state of a socket to which every other process may send: a TCP socket that listens, a UDP socket without a peer."""
_POLL_S = 0.02


class ListeningSocket(NamedTuple):
    protocol: str
    address: str
    port: int
    command: str  # of the process that has it

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def process_tree(root: int) -> list[int]:
    """The ids of this process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the command, in parentheses, may contain spaces and parentheses.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(path.parent.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def listening_sockets(root: int) -> set[ListeningSocket]:
    """The sockets on which this process and its descendants listen now."""
    return {one for pid in process_tree(root) for one in sockets_of(pid)}


def sockets_of(pid: int) -> set[ListeningSocket]:
    """The sockets on which this process listens now; none if it has ended."""
    found = set()
    with suppress(OSError):
        inodes = {inode for path in Path(f"/proc/{pid}/fd").iterdir() if (inode := _inode(path)) is not None}
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        for protocol in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if inode in inodes and state == _LISTENS[protocol[:3]]:
                    found.add(ListeningSocket(protocol, *_address(local), command))
    return found


def _inode(descriptor: Path) -> str | None:
    """The number of an open socket; None if it is a file, or has just been closed."""
    with suppress(OSError):
        kind, _, number = os.readlink(descriptor).partition(":")
        return number.strip("[]") if kind == "socket" else None
    return None


def sockets_until(root: int, condition: Callable[[], object], limit_s: float = 60.0) -> set[ListeningSocket]:
    """All sockets on which the processes listened at some time until the condition holds."""
    deadline_s, found = time.monotonic() + limit_s, set()
    while True:
        over = condition()
        found |= listening_sockets(root)
        if over:
            return found
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(_POLL_S)


def _address(text: str) -> tuple[str, int]:
    """An address as the kernel writes it: words of four bytes in the byte order of the machine, in hexadecimal digits."""
    digits, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(word)[::-1] for word in re.findall("." * 8, digits))
    found = ipaddress.ip_address(packed)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), int(port, 16)
