"""Who is here: islands sign a roll, again and again, and read what others have signed.

The roll is a TCPStore beside the lighthouse. It tells a newcomer what the run is and where it can fetch the state, and everybody
how many islands are alive. No commit depends on it: if it is gone, training goes on, and when it is back, everybody signs again.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from atoll.errors import ExchangeFailed

BEAT_S = 0.5
"""Between two signatures."""
SILENT_S = 3.0
"""Whoever has not signed for so long is not alive."""
_ORDER, _COUNT = "order", "count"
_LIMIT_S = 5.0  # of one question


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address and no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
    found.listen(128)
    return found


def open_store(host: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store that is kept here and listens on this address alone, and its port."""
    door = listening(host, port)
    port = int(door.getsockname()[1])
    limit = timedelta(seconds=_LIMIT_S)
    # The store takes the socket over, and closes it.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=door.detach())
    return store, port


class Board:
    """What is written on the roll.

    Args:
        address: of the roll.
        store: if it is kept here; else it is connected to, again if need be.
    """

    def __init__(self, address: str, store: TCPStore | None = None) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._store = int(port), store
        self.address = address

    @contextmanager
    def _connected(self) -> Iterator[TCPStore]:
        try:
            if self._store is None:
                # A store that is not there is waited for; a socket says at once that nobody listens.
                socket.create_connection((self._host, self._port), timeout=_LIMIT_S).close()
                limit = timedelta(seconds=_LIMIT_S)
                self._store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)
            yield self._store
        except (RuntimeError, OSError) as error:
            self._store = None
            raise ExchangeFailed(f"nobody answers at {self.address}: {error}. Is the run's first machine still there?") from error

    def give_order(self, text: str) -> None:
        with self._connected() as store:
            store.set(_ORDER, text)

    def order(self) -> str | None:
        """What is to be done; none if nobody has said so yet."""
        with self._connected() as store:
            return store.get(_ORDER).decode() if store.check([_ORDER]) else None

    def sign(self, name: str, entry: Mapping[str, Any]) -> None:
        with self._connected() as store:
            if not store.check([f"island/{name}"]):  # new here, or the roll is
                store.set(f"name/{store.add(_COUNT, 1)}", name)
            store.set(f"island/{name}", json.dumps(entry))

    def entries(self) -> dict[str, dict[str, Any]]:
        """What everybody signed last, by name."""
        with self._connected() as store:
            keys = [f"name/{number}" for number in range(1, store.add(_COUNT, 0) + 1)]
            names = [store.get(key).decode() for key in keys if store.check([key])]
            return {name: json.loads(store.get(f"island/{name}")) for name in names if store.check([f"island/{name}"])}


class Roll:
    """Signs for one island, in a thread of its own, and knows who else is alive.

    Args:
        address: of the roll.
        name: of the island.
        entry: what it signs with: asked every time.
    """

    def __init__(self, address: str, name: str, entry: Callable[[], Mapping[str, Any]]) -> None:
        self._board, self._name, self._entry = Board(address), name, entry
        self._over = threading.Event()
        self._beats = 0
        self._seen: dict[str, tuple[int, float]] = {}
        """Everybody's last count, and when it was first seen."""
        self._entries: dict[str, dict[str, Any]] = {}
        self.reached = False
        """Whether the roll could be reached when it was last asked."""
        self.look()
        self._thread = threading.Thread(target=self._go_on, name="roll", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._over.wait(BEAT_S):
            self.look()

    def look(self) -> None:
        """Sign, and read."""
        self._beats += 1
        self.reached = False
        with suppress(ExchangeFailed):
            self._board.sign(self._name, {**self._entry(), "beat": self._beats})
            self._entries = self._board.entries()
            self.reached = True
        now_s = time.monotonic()
        for name, entry in self._entries.items():
            if name not in self._seen or self._seen[name][0] != entry["beat"]:
                self._seen[name] = (entry["beat"], now_s)

    def alive(self) -> dict[str, dict[str, Any]]:
        """Whoever has signed lately, and what."""
        now_s = time.monotonic()
        return {name: e for name, e in list(self._entries.items()) if now_s - self._seen.get(name, (0, 0.0))[1] < SILENT_S}

    def close(self) -> None:
        self._over.set()
        self._thread.join()
