"""The address of an elastic run: torchft's lighthouse, which forms quorums, and the registry of islands beside it.

The registry is a TCPStore. Every island puts its status there twice a second and reads the others'. A joiner learns from it what
the run is and which islands can send a snapshot. No commit depends on it: while the registry is away, training goes on. When the
rendezvous process dies and comes back on the same ports, islands register again. When it is lost for good, islands change to a
standby rendezvous, which a joiner that keeps a copy of the run's folder may run.
"""

from __future__ import annotations

import errno
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ConfigError, ExchangeFailed, one_line
from atoll.core.optional_imports import require
from atoll.core.verified_files import parse_json
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.spec import NAME, JoinInfo
from atoll.engines.elastic.state_version import NO_VERSION
from atoll.engines.liveness import FailureDetector, Heartbeat
from atoll.engines.network_interfaces import refuse_loopback_name
from atoll.engines.rank_store import open_store

HEARTBEAT_S = 0.5
UNREGISTERED_S = 3.0
"""An island without a heartbeat for so long counts as dead."""
FORGOTTEN_S = 60.0
"""An island without a heartbeat for so long is removed from the registry until it registers anew."""
ENDS_KEPT = 1024
"""The newest ended processes that the registry keeps, and up to twice as many: every island reads them before each commit."""
LIGHTHOUSE_TICK_S = 0.02
PROBE_S, SWITCH_S = 1.0, 5.0
"""How often islands probe the run's rendezvous where there are several, and how long a silent one is waited for."""
_MOST_STANDBYS = 16
_JOIN_INFO, _NAMES, _ENDED, _REVOKED = "join_info", "names", "ended", "revoked"
_REQUEST_LIMIT_S = 5.0
T = TypeVar("T")


def check_free(listen: str, *, any_port: bool = False) -> None:
    """Refuse an `engine.listen` that is not an address of this machine, or, unless `any_port` will do, whose port another process
    has."""
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server((host, 0 if any_port else int(port))) as listener:
            address = listener.getsockname()[0]
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        own = "Give one of its own IPv4 addresses or its name, or leave it out for islands on this machine alone"
        in_use = "Stop the process that has the port, or use another port"
        raise ConfigError(
            f"engine.listen={listen}: this machine cannot listen there ({why}). "
            f"{in_use if error.errno == errno.EADDRINUSE else own}."
        ) from error
    refuse_loopback_name(f"engine.listen={listen}", host, address)


class Rendezvous:
    """A lighthouse and a registry store, in this process. The registry is at the run's address, and has the `info` for joiners."""

    def __init__(self, info: JoinInfo, address: str) -> None:
        coordination: Any = require("torchft.coordination", extra="torchft", purpose="elastic runs")
        self._lighthouse = coordination.LighthouseServer(
            bind=info.lighthouse,
            min_replicas=1,
            join_timeout_ms=int(info.straggler_s * 1000),
            quorum_tick_ms=int(LIGHTHOUSE_TICK_S * 1000),
            heartbeat_timeout_ms=int(info.spec.heartbeat_timeout_s * 1000),
        )
        host, _, wanted = address.rpartition(":")
        # After the lighthouse: a store that chooses its own port must not choose the lighthouse's.
        self._store, port = open_store(host, int(wanted))
        self.address, self.lighthouse = f"{host}:{port}", info.lighthouse
        self._store.set(_JOIN_INFO, info.to_text())

    def set_revoked(self, identities: Collection[str]) -> None:
        """Publish which join files were revoked, since a standby's may be among them."""
        self._store.set(_REVOKED, " ".join(sorted(identities)))

    def close(self) -> None:
        self._lighthouse.shutdown()


class RegistryClient:
    """Reads and writes the registry at this address, if this machine's network reaches it. It connects again if need be. A request
    takes at most `limit_s`."""

    def __init__(self, address: str, limit_s: float = _REQUEST_LIMIT_S, network: DirectNetwork | None = None) -> None:
        self._address, self._limit_s, self._network = address, limit_s, network
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._store: TCPStore | None = None
        self._registered: set[str] = set()
        self._stored: set[str] = set()
        """Names whose entries exist: a store waits for one that does not."""
        self.malformed: set[str] = set()
        """Names whose entries are missing, or no island's status."""

    def _ask(self, request: Callable[[Any], T]) -> T:
        """The answer to a request, on a thread of its own: a TCPStore's client waits for ever for the answer of a machine without
        power. Raises ExchangeFailed."""
        answer, former = Future[tuple[TCPStore, T]](), self._store

        def ask() -> None:
            try:
                store = former or self._connection()
                answer.set_result((store, request(store)))
            except BaseException as error:
                answer.set_exception(error)

        try:  # the thread's start may fail, too
            threading.Thread(target=ask, name="registry request", daemon=True).start()
            self._store, found = answer.result(self._limit_s)
        except (RuntimeError, OSError, TimeoutError) as error:
            self._store, self._stored = None, set()
            where = f"{self._host}:{self._port}"
            why = str(error) or f"it has not answered for {self._limit_s:g} s"
            raise ExchangeFailed(f"no registry answers at {where}: {why}. Is the run's first machine still up?") from error
        return found

    def _connection(self) -> TCPStore:
        if self._network is not None:  # a TCPStore client prints a stack trace if a forwarded connection leads nowhere
            self._network.check_reaches(self._address, self._limit_s)
        # A TCPStore client waits for a missing server; a plain socket fails at once.
        socket.create_connection((self._host, self._port), timeout=self._limit_s).close()
        limit = timedelta(seconds=self._limit_s)
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)

    def _words(self, key: str) -> list[str]:
        """The words in an entry of the registry; none if there is no entry."""
        return self._ask(lambda store: store.get(key).decode("utf-8", "replace").split() if store.check([key]) else [])

    def join_info(self) -> str | None:
        """What the run is; None as long as its rendezvous has not stored it."""
        return self._ask(lambda store: store.get(_JOIN_INFO).decode("utf-8", "replace") if store.check([_JOIN_INFO]) else None)

    def run_id(self) -> str | None:
        """The id of the run; None if its rendezvous has stored none."""
        text = self.join_info()
        with suppress(ValueError, LookupError, TypeError):
            return None if text is None else str(parse_json(text)["run_id"])
        return None

    def register(self, status: IslandStatus) -> None:
        key, name, text = _key(status.name), status.name, json.dumps(status.to_json())

        def register(store: Any) -> None:
            new = name not in self._registered or not store.check([key])  # or the registry was restarted
            store.set(key, text)
            if new:  # after the status, which a reader of the name asks for
                store.append(_NAMES, f"{name}\n")

        self._ask(register)
        self._registered.add(name)

    def report_ended(self, processes: Iterable[str]) -> None:
        """Report that these processes have ended: islands do not take them for the other side of a partition."""
        known = self.ended()
        if new := [process for process in processes if process not in known]:
            self._ask(lambda store: store.append(_ENDED, _lines(new)))
        if len(known) + len(new) > 2 * ENDS_KEPT:
            found = self.ended()  # if it changes once more, the next report cuts it
            self._ask(lambda store: store.compare_set(_ENDED, _lines(found), _lines(found[-ENDS_KEPT:])))

    def is_new_to(self, reader: str) -> bool:
        """Whether the registry was started since the last call for this reader, who then reports everything anew."""
        key = f"known to {reader}"
        return self._ask(lambda store: not store.check([key]) and store.set(key, "") is None)

    def ended(self) -> list[str]:
        """The processes that were reported to have ended."""
        return self._words(_ENDED)

    def revoked(self) -> list[str]:
        """The ids of join files that were revoked."""
        return self._words(_REVOKED)

    def names(self) -> list[str]:
        """The names that have registered and were not pruned, once per registration."""
        names = self._words(_NAMES)
        self._registered.intersection_update(names)  # another island may have pruned one that lives
        return names

    def prune(self, names: Sequence[str], dead: Collection[str]) -> bool:
        """Remove repeated and dead names, unless the registry has others than `names` by now. Returns whether it did so."""
        kept = [name for name in dict.fromkeys(names) if name not in dead]
        before, after = _lines(names), _lines(kept)
        return self._ask(lambda store: bool(store.compare_set(_NAMES, before, after).decode("utf-8", "replace") == after))

    def delete_status(self, name: str) -> None:
        self._ask(lambda store: store.delete_key(_key(name)))

    def statuses(self, names: Collection[str]) -> dict[str, IslandStatus]:
        """What these islands registered last, in one request. It leaves out names without a status."""
        known = self._stored.intersection(names)

        def read(store: Any) -> dict[str, bytes]:
            new = (name for name in names if name not in known and NAME.fullmatch(name) and store.check([_key(name)]))
            asked = [*known, *new]
            return dict(zip(asked, store.multi_get([*map(_key, asked)]) if asked else [], strict=True))

        texts = self._ask(read)
        self._stored = {*texts}
        found = {name: IslandStatus.from_text(texts[name]) for name in names if name in texts}
        statuses = {name: status for name, status in found.items() if status is not None and status.name == name}
        self.malformed = {*names} - statuses.keys()
        return statuses


def _lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _standby_key(standby: str) -> str:
    """What stays the same when a standby is restarted: its registry's address, or ID@GATEWAY."""
    return standby.partition(" ")[0]


def _key(name: str) -> str:
    return f"island/{name}"


class Registry:
    """Registers one island's status with each heartbeat, in a thread of its own, and knows which other islands are alive.

    Islands may run a standby rendezvous, and report it in their status. All islands use the first rendezvous that answers: those in
    `first`, which are pairs of registry and lighthouse, and then the standbys by name. If two groups of islands use two of them,
    since a network partition separates them, the rule of the last quorum lets at most one group commit. Islands on the machine of a
    gateway use no other rendezvous: `first` is None.
    """

    def __init__(
        self,
        network: DirectNetwork,
        status: IslandStatus,
        log: Callable[[str], object] = lambda text: None,
        first: Sequence[tuple[str, str]] | None = (),
    ) -> None:
        self._network, self._status, self._log = network, status, log
        self._client, self._at = RegistryClient(network.registry, network=network), network.registry
        self._ignored, self._logged = set[str](), set[str]()
        self._first = dict(first or [(network.registry, "")])
        self._most_standbys = 0 if first is None else _MOST_STANDBYS
        self._standbys = {_standby_key(one): network.place(one) for one in network.standbys}
        self._lighthouse = self._first.get(network.registry, "") or network.lighthouse
        """Of the present rendezvous."""
        self._probes: dict[str, tuple[RegistryClient, float, float]] = {}
        """By address: a client, since when each probe was answered, and when the last was."""
        self.on_move: Callable[[str], object] = bool
        """Called with the address of the lighthouse when this island changes to another rendezvous."""
        self._refreshing = threading.Lock()
        self._detector: FailureDetector[str] = FailureDetector(UNREGISTERED_S)
        self._statuses: dict[str, IslandStatus] = {}
        self._seen: set[str] = set()
        """The names at the last refresh."""
        self._pruned_s: dict[str, float] = {}
        """When this island pruned the names of others whose statuses it has not deleted yet."""
        self._ended: Collection[str] = ()
        """The oldest first."""
        self.reachable_since_s = math.inf
        """Since when every request to the registry has succeeded; infinity if the last one failed."""
        self.refresh()
        self._heartbeat = Heartbeat(self._never_ends(self.refresh), interval_s=HEARTBEAT_S)
        self._prober = Heartbeat(self._never_ends(self._choose_rendezvous), interval_s=PROBE_S)

    def _never_ends(self, work: Callable[[], object]) -> Callable[[int], None]:
        """A beat that logs an unexpected error, such as of a process without a thread left. If it ended the heartbeats, the other
        islands would take this one for dead."""

        def beat(number: int) -> None:
            try:
                work()
            except Exception as error:
                self._log_once(f"the registry at {self._at}: {one_line(error)}. The next heartbeat tries again")

        return beat

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)

    def refresh(self) -> None:
        """Send a heartbeat and read the others'. Threads take turns: a store has one connection and answers in order."""
        with self._refreshing:
            self._status.heartbeat += 1
            try:
                self._client.register(self._status)
                names = self._client.names()
                found = self._client.statuses([*dict.fromkeys(names)])
                self._statuses = {name: status for name, status in found.items() if status.run == self._status.run}
                self._log_ignored({*self._client.malformed, *(found.keys() - self._statuses.keys())})
                dead = self._note_heartbeats(names)
                self._prune(names, dead)
            except Exception as error:
                self.reachable_since_s = math.inf  # the statuses age
                if not isinstance(error, ExchangeFailed):
                    raise
            else:
                self.reachable_since_s = min(self.reachable_since_s, time.monotonic())

    def _log_ignored(self, names: set[str]) -> None:
        if new := sorted(names - self._ignored):
            shown = ", ".join(repr(name[:60]) for name in new[:5])
            self._log(f"ignores {len(new)} entries of the registry that are of no island of this run: {shown}")
        self._ignored |= names

    def _choose_rendezvous(self) -> None:
        """Change to the first rendezvous that answers: at once if the present one has been silent for `SWITCH_S`, and if an earlier
        one answers again, after as long."""
        places = {**self._first, **{registry: lighthouse for _, (registry, lighthouse) in sorted(self._standbys.items())}}
        if len(places) == 1:
            return
        for address in places:
            unknown = RegistryClient(address, network=self._network), math.inf, time.monotonic()
            client, since_s, answered_s = self._probes.get(address, unknown)
            try:
                # Another run may have the port now.
                answers = self._network.reaches(address) and client.run_id() == self._status.run
                if answers:
                    self._network.revoke(client.revoked())
            except ExchangeFailed:
                answers = False
            now_s = time.monotonic()
            self._probes[address] = (client, min(since_s, now_s), now_s) if answers else (client, math.inf, answered_s)
        now_s, order = time.monotonic(), [*places]
        silent = now_s - self._probes[self._at][2] > SWITCH_S
        for address in order:
            since_s = self._probes[address][1]
            # A standby that was restarted may have its registry's port, and another lighthouse.
            restarted = address == self._at and not silent and places[address] not in ("", self._lighthouse)
            if restarted or (address != self._at and since_s <= now_s and (silent or now_s - since_s > SWITCH_S)):
                with self._refreshing:
                    client = RegistryClient(address, network=self._network)
                    self._client, self._at, self._lighthouse = client, address, places[address]
                self._network.use(address)
                self.on_move(places[address])
                return
            if address == self._at and not silent:
                return

    def _note_heartbeats(self, names: Collection[str]) -> set[str]:
        """Returns the registered islands that have been silent for so long that no island needs their status."""
        now_s, dead = time.monotonic(), set[str]()
        for name in self._seen.difference(names):
            self._detector.forget(name)
        self._seen = {*names}
        for name in self._seen:
            # A name without a status counts as silent too: its island died between two requests, or is none of this run.
            status = self._statuses.get(name)
            self._detector.observe(name, None if status is None else status.heartbeat, now_s)
            if status is not None and status.standby and self._detector.is_alive(name, now_s):
                self._note_standby(status.standby, now_s)
            if now_s - self._detector.heard_s(name) > FORGOTTEN_S:
                dead.add(name)
        return dead

    def _note_standby(self, standby: str, now_s: float) -> None:
        """A live island reports this standby. If there are too many, it takes the place of one that has long not answered."""
        key = _standby_key(standby)
        if key not in self._standbys and len(self._standbys) >= self._most_standbys:
            answered_s = {one: self._probes[place[0]][2] for one, place in self._standbys.items() if place[0] in self._probes}
            silent = min(answered_s, key=lambda one: answered_s[one], default=None)
            if silent is None or now_s - answered_s[silent] <= FORGOTTEN_S:
                return
            self._standbys = {one: place for one, place in self._standbys.items() if one != silent}
            self._network.forget(silent)
        with suppress(ConfigError):  # of what is no address
            self._standbys = {**self._standbys, key: self._network.place(standby)}

    def _prune(self, names: Sequence[str], dead: Collection[str]) -> None:
        """Keep the registry as small as the run: every island reads all of it twice a second. The status of a pruned island is
        deleted later, since a reader that has its name would wait for it."""
        now_s = time.monotonic()
        if (dead or len(names) > len(set(names))) and self._client.prune(names, dead):
            self._pruned_s.update(dict.fromkeys(dead, now_s))
        for name in [name for name, pruned_s in self._pruned_s.items() if now_s - pruned_s > UNREGISTERED_S]:
            del self._pruned_s[name]
            if name not in names:
                self._client.delete_status(name)

    def alive(self) -> dict[str, IslandStatus]:
        """The statuses of all islands with a recent heartbeat, this one included."""
        now_s = time.monotonic()
        return {name: status for name, status in self._statuses.items() if self._detector.is_alive(name, now_s)}

    def ended(self) -> frozenset[str]:
        """The processes that were reported to have ended, as far as this island knows: a restarted registry has no reports yet."""
        with self._refreshing, suppress(ExchangeFailed):
            self._ended = [*dict.fromkeys([*self._ended, *self._client.ended()])][-4 * ENDS_KEPT :]
        return frozenset(self._ended)

    def report_own_end(self, process: str) -> None:
        """Report that this process ends, or that it gives this place in quorums up."""
        with self._refreshing, suppress(ExchangeFailed):
            self._client.report_ended([process])

    def stateless_since_s(self) -> float:
        """Since when no other live island reports a state. Minus infinity if none has since this island registered; a time in the
        future if one does."""
        others = [one for one in self._statuses.values() if one.name != self._status.name and one.version != NO_VERSION]
        return max((self._detector.heard_s(one.name) + UNREGISTERED_S for one in others), default=-math.inf)

    def close(self) -> None:
        self._prober.close()
        self._heartbeat.close(wait=True)
