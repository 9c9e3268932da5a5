"""Who is here: islands sign a roll, again and again, and read what others have signed.

The roll is a TCPStore beside the lighthouse. It tells a newcomer what the run is and where it can fetch the state, and everybody
how many islands are alive. No commit depends on it: if it is gone, training goes on, and when it is back, everybody signs again.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ExchangeFailed

BEAT_S = 0.5
"""Between two signatures."""
SILENT_S = 3.0
"""Whoever has not signed for so long is not alive."""
FORGOTTEN_S = 60.0
"""And whoever has not for so long is not asked for any more, until it signs anew."""
_ORDER, _NAMES = "order", "names"
_LIMIT_S = 5.0  # of one question


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address and no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except OSError:
        found.close()
        raise
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
        self._signed: set[str] = set()
        self.address = address

    @contextmanager
    def _connected(self) -> Iterator[Any]:  # torch's stubs do not know all of a store's methods
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
            new = name not in self._signed or not store.check([_key(name)])  # or the roll is new
            store.set(_key(name), json.dumps(entry))
            if new:  # after its entry, which whoever reads the name asks for
                store.append(_NAMES, f"{name}\n")
                self._signed.add(name)

    def names(self) -> list[str]:
        """Everybody who ever signed, as often as it came."""
        with self._connected() as store:
            return store.get(_NAMES).decode().split() if store.check([_NAMES]) else []

    def entries(self, names: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """What these signed last, or everybody, by name. All are asked for at once: the roll may be far away."""
        names = dict.fromkeys(self.names()) if names is None else names
        with self._connected() as store:
            found = store.multi_get([*map(_key, names)]) if names else []
            return {name: json.loads(entry) for name, entry in zip(names, found, strict=True)}


def _key(name: str) -> str:
    return f"island/{name}"


class Roll:
    """Signs for one island, in a thread of its own, and knows who else is alive.

    Args:
        address: of the roll.
        name: of the island.
        entry: what it signs with: asked every time.
    """

    def __init__(self, address: str, name: str, entry: Callable[[], Mapping[str, Any]]) -> None:
        self._board, self._name, self._entry = Board(address), name, entry
        self._over, self._looking = threading.Event(), threading.Lock()
        self._beats = 0
        self._seen: dict[str, tuple[int, float]] = {}
        """Everybody's last count, and when it was first seen."""
        self._entries: dict[str, dict[str, Any]] = {}
        self._forgotten: dict[str, int] = {}
        """Who was silent for too long, and how often it had come by then."""
        self.reached_s = math.inf
        """Since when the roll could be reached whenever it was asked; infinity if it could not the last time."""
        self.look()
        self._thread = threading.Thread(target=self._go_on, name="roll", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._over.wait(BEAT_S):
            self.look()

    def look(self) -> None:
        """Sign, and read. Whoever looks while another does waits for it: a store has one connection, and answers in order."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        self._beats += 1
        try:
            self._board.sign(self._name, {**self._entry(), "beat": self._beats})
            came = Counter(self._board.names())
            self._entries = self._board.entries([name for name in came if self._forgotten.get(name) != came[name]])
            self._notice(came)
        except ExchangeFailed:
            self.reached_s = math.inf
        else:
            self.reached_s = min(self.reached_s, time.monotonic())

    def _notice(self, came: Mapping[str, int]) -> None:
        """Who has signed since the last look, and who has not for long."""
        now_s = time.monotonic()
        for name, entry in self._entries.items():
            if name not in self._seen or self._seen[name][0] != entry["beat"]:
                self._seen[name] = (entry["beat"], now_s)
            elif now_s - self._seen[name][1] > FORGOTTEN_S:
                self._forgotten[name] = came[name]
                del self._seen[name]

    def alive(self) -> dict[str, dict[str, Any]]:
        """Whoever has signed lately, and what."""
        now_s = time.monotonic()
        return {name: e for name, e in list(self._entries.items()) if now_s - self._seen.get(name, (0, 0.0))[1] < SILENT_S}

    def quiet_s(self, such: Callable[[Mapping[str, Any]], bool]) -> float:
        """Since when nobody else that signs with such an entry is alive: minus infinity if nobody was at all since this island
        came. It lies ahead where somebody is."""
        others = [name for name, entry in list(self._entries.items()) if name != self._name and such(entry)]
        return max((self._seen.get(name, (0, 0.0))[1] + SILENT_S for name in others), default=-math.inf)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
