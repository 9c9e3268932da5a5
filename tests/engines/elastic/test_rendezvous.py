"""The registry, over real stores on this machine."""

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic import rendezvous
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.rendezvous import Registry, RegistryClient, open_store
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.network_interfaces import free_port

HOST = "127.0.0.1"


class AnsweredStore:
    """A store whose writes return once the server has them: a TCPStore's own return when they are sent, so that a read by another
    connection may come first."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def set(self, key, value):
        self._store.set(key, value)
        assert self._store.check([key])

    def append(self, key, value):
        self._store.append(key, value)
        assert self._store.check([key])


@pytest.fixture
def store():
    """A store with its address."""
    store, port = open_store(HOST)
    return SimpleNamespace(store=AnsweredStore(store), address=f"{HOST}:{port}")


def test_a_joiner_reads_the_join_info(store):
    joiner = RegistryClient(store.address)
    assert joiner.join_info() is None
    store.store.set("join_info", "train")
    assert joiner.join_info() == "train"


def test_islands_read_each_others_last_entries(store):
    one, two = RegistryClient(store.address), RegistryClient(store.address)
    a, b = IslandStatus("a", True, heartbeat=1), IslandStatus("b", False, "127.0.0.1:1", suspects=frozenset("a"))
    one.register(a)
    two.register(b)
    one.register(replace(a, heartbeat=2))
    assert two.names() == one.names() == ["a", "b"]
    assert two.statuses("ab") == one.statuses("ab") == {"a": replace(a, heartbeat=2), "b": b}


def test_a_malformed_entry_hides_no_other_island(store):
    client = RegistryClient(store.address)
    for name in "abc":
        client.register(IslandStatus(name, True))
    store.store.set("island/a", "[]")
    store.store.set("island/b", json.dumps({**IslandStatus("b", True).to_json(), "version": "3"}))
    assert client.statuses("abc") == {"c": IslandStatus("c", True)}


@pytest.mark.parametrize("entry", ["{", "[" * 100_000, "\\xff", "null", '{"name": "x"}'])
def test_an_entry_that_is_no_status_ends_no_island_and_is_logged_once(store, monkeypatch, entry):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    logged = []
    registry = Registry(DirectNetwork(HOST, store.address), IslandStatus("me", True, run="run-1"), logged.append)
    store.store.set("island/x", entry)
    store.store.append("names", "x\n")
    store.store.append("names", "without-entry\n../%s\n")
    RegistryClient(store.address).register(IslandStatus("foreign", True, run="run-2"))
    for _ in range(3):
        registry.refresh()
    assert [*registry.alive()] == ["me"]
    assert registry.reachable_since_s < math.inf
    assert len(logged) == 1
    assert "'../%s', 'foreign', 'without-entry', 'x'" in logged[0]
    registry.close()


class Distant:
    """A store that counts the requests to it."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


def test_a_refresh_takes_five_requests_however_many_islands_there_are(store):
    requests, client = [], RegistryClient(store.address)
    for number in range(0, 20, 10):
        for name in range(number, number + 10):
            client.register(IslandStatus(f"island-{name}", True))
        far = Registry(DirectNetwork(HOST, store.address), IslandStatus("me", True))
        far.refresh()
        far._client._store = distant = Distant(far._client._store)
        far.refresh()
        requests.append(distant.requests)
        assert len(far.alive()) == number + 11
        far.close()
    assert requests == [5, 5]


def test_a_forgotten_island_is_read_again_when_it_registers_again(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here, gone = (Registry(DirectNetwork(HOST, store.address), IslandStatus(name, True)) for name in ("here", "gone"))
    here.refresh()
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.FORGOTTEN_S + 1)
    for _ in range(2):
        here.refresh()
    assert here._statuses.keys() == {"here"}
    again = Registry(DirectNetwork(HOST, store.address), IslandStatus("gone", True))  # another process of that name
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]
    for registry in (here, gone, again):
        registry.close()


def test_the_registry_is_pruned_of_repeated_and_of_dead_names(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here = Registry(DirectNetwork(HOST, store.address), IslandStatus("here", True))
    gone = [Registry(DirectNetwork(HOST, store.address), IslandStatus(f"gone-{number % 3}", True)) for number in range(9)]
    here.refresh()
    client = RegistryClient(store.address)
    assert sorted(client.names()) == ["gone-0", "gone-1", "gone-2", "here"], "each once"
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.FORGOTTEN_S + 1)
    here.refresh()
    assert client.names() == ["here"]
    assert store.store.check(["island/gone-0"]), "a reader that has the name would wait for it"
    here.refresh()
    assert sorted(here.alive()) == ["here"]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.FORGOTTEN_S + rendezvous.UNREGISTERED_S + 2)
    here.refresh()
    assert not any(store.store.check([f"island/gone-{number}"]) for number in range(3))
    for registry in (here, *gone):
        registry.close()


def test_a_frozen_island_whose_name_was_pruned_registers_again(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here, frozen = (Registry(DirectNetwork(HOST, store.address), IslandStatus(name, True)) for name in ("here", "frozen"))
    here.refresh()
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.FORGOTTEN_S + 1)
    here.refresh()
    assert RegistryClient(store.address).names() == ["here"]
    for _ in range(2):  # it sees that its name is gone, and registers
        frozen.refresh()
    here.refresh()
    assert sorted(here.alive()) == ["frozen", "here"]
    for registry in (here, frozen):
        registry.close()


def test_a_registration_during_a_prune_is_not_lost(store):
    client = RegistryClient(store.address)
    for name in "ab":
        client.register(IslandStatus(name, True))
    names = client.names()
    client.register(IslandStatus("c", True))
    assert not client.prune(names, {"a"})
    assert client.names() == ["a", "b", "c"]
    assert client.prune(client.names(), {"a"})
    assert client.names() == ["b", "c"]


def test_an_island_without_heartbeats_is_not_alive(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here, gone = (Registry(DirectNetwork(HOST, store.address), IslandStatus(name, True)) for name in ("here", "gone"))
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.UNREGISTERED_S + 1)
    here.refresh()
    assert sorted(here.alive()) == ["here"]
    gone.refresh()
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]


def test_islands_register_again_when_the_registry_restarts_empty():
    store, port = open_store(HOST)
    registry = Registry(DirectNetwork(HOST, f"{HOST}:{port}"), IslandStatus("a", True))
    before_s = registry.reachable_since_s
    registry.refresh()
    assert registry.reachable_since_s == before_s
    del store
    registry.refresh()
    assert registry.reachable_since_s == math.inf
    again = open_store(HOST, port)
    registry.refresh()
    registry.refresh()
    assert before_s < registry.reachable_since_s <= time.monotonic(), "not for as long as it was before"
    assert RegistryClient(f"{HOST}:{port}").names() == ["a"], again
    registry.close()


def test_a_missing_registry_is_an_error():
    store, port = open_store(HOST)
    del store
    with pytest.raises(ExchangeFailed, match=f"no registry answers at {HOST}:{port}"):
        RegistryClient(f"{HOST}:{port}").join_info()


def test_a_registry_that_accepts_and_never_answers_is_an_error():
    """As a machine that loses its power, or a process that is stopped: no connection is closed."""
    with socket.create_server((HOST, 0)) as server:
        silent = RegistryClient(f"{HOST}:{server.getsockname()[1]}", 0.2)
        with pytest.raises(ExchangeFailed, match=r"it has not answered for 0\.2 s"):
            silent.join_info()


def no_thread(*_, **__):
    raise RuntimeError("can't start new thread")


def test_a_request_that_gets_no_thread_has_failed(store, monkeypatch):
    client = RegistryClient(store.address)
    monkeypatch.setattr(threading, "Thread", no_thread)
    with pytest.raises(ExchangeFailed, match="can't start new thread"):
        client.join_info()


def test_no_error_ends_the_heartbeats_of_an_island(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.01)
    status, logged, later = IslandStatus("a", True), [], threading.Event()
    registry = Registry(DirectNetwork(HOST, store.address), status, logged.append)
    beats = iter([1, 2, 3])

    def prune(names, dead):
        if number := next(beats, None):
            assert number == 1 or registry.reachable_since_s == math.inf, "its entries could not be read all the while"
            raise RuntimeError("can't start new thread")
        later.set()

    monkeypatch.setattr(registry, "_prune", prune)
    assert later.wait(10.0)
    registry.close()
    assert registry.reachable_since_s < math.inf
    assert logged == [f"the registry at {store.address}: RuntimeError: can't start new thread. The next heartbeat tries again"]


def test_two_threads_never_refresh_at_once(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    looking, together = [], []

    class Slow(IslandStatus):
        def to_json(self):
            looking.append(1)
            together.append(len(looking))
            inside.wait(0.05)  # so that another thread may run, if it can
            looking.pop()
            return super().to_json()

    inside = threading.Event()
    registry = Registry(DirectNetwork(HOST, store.address), Slow("a", True))
    with ThreadPoolExecutor(2) as pool:
        for refreshed in [pool.submit(registry.refresh) for _ in range(2)]:
            refreshed.result()
    assert together == [1, 1, 1]
    registry.close()


def test_ends_are_reported_once_and_survive_a_restart_of_the_registry_in_those_that_read_them(store):
    client = RegistryClient(store.address)
    for _ in range(2):
        client.report_ended(["a#1", "b#1"])
    assert client.ended() == ["a#1", "b#1"]
    registry = Registry(DirectNetwork(HOST, store.address), IslandStatus("c", True, process="c#1.0"))
    registry.report_own_end("c#1.0")
    assert registry.ended() == {"a#1", "b#1", "c#1.0"}
    store.store.delete_key("ended")
    assert registry.ended() == {"a#1", "b#1", "c#1.0"}
    registry.close()


def test_the_registry_keeps_the_newest_ends(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "ENDS_KEPT", 10)
    client, sizes = RegistryClient(store.address), []
    for number in range(100):
        client.report_ended([f"a#{number}", f"b#{number}"])
        sizes.append(len(client.ended()))
        assert {f"a#{one}" for one in range(max(0, number - 3), number + 1)} <= {*client.ended()}
    assert max(sizes) == 20
    registry = Registry(DirectNetwork(HOST, store.address), IslandStatus("c", True, process="c#1.0"))
    for number in range(100, 200):
        registry.report_own_end(f"c#{number}")
        assert len(registry.ended()) <= 40
    assert f"c#{number}" in registry.ended()
    registry.close()


OF_THIS_RUN = json.dumps({"run_id": "run-1"})


@pytest.fixture
def _fast_probes(monkeypatch):
    monkeypatch.setattr(rendezvous, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous, "SWITCH_S", 0.3)


@pytest.mark.usefixtures("_fast_probes")
def test_an_island_uses_the_first_rendezvous_that_answers_and_returns_to_an_earlier_one(store):
    store.store.set("join_info", OF_THIS_RUN)
    port, moves = free_port(HOST), []
    moved = threading.Condition()

    def on_move(lighthouse):
        with moved:
            moves.append(lighthouse)
            moved.notify()

    places = [(f"{HOST}:{port}", "first"), (store.address, "standby")]
    registry = Registry(DirectNetwork(HOST, f"{HOST}:{port}"), IslandStatus("a", True, run="run-1"), first=places)
    registry.on_move = on_move
    with moved:
        assert moved.wait_for(lambda: moves == ["standby"], 20.0)
    registry.refresh()
    assert RegistryClient(store.address).names() == ["a"]
    first = AnsweredStore(open_store(HOST, port)[0])
    first.set("join_info", '{"run_id": "run-2"}')  # another run has the port
    asked = RegistryClient(f"{HOST}:{port}")
    assert asked.run_id() == "run-2"
    with moved:
        assert not moved.wait_for(lambda: len(moves) > 1, 1.0), "three times as long as an earlier rendezvous has to answer"
    first.set("join_info", OF_THIS_RUN)
    with moved:
        assert moved.wait_for(lambda: moves == ["standby", "first"], 20.0)
    registry.close()


def test_islands_learn_of_a_standby_from_its_islands_status_and_ignore_what_is_no_address(store):
    client = RegistryClient(store.address)
    for name, standby in (
        ("b", "192.0.2.9:7000 192.0.2.9:7001"),
        ("c", "x"),
        ("d", "x:y z"),
        ("e", "192.0.2.9:1 192.0.2.9:99999999"),
    ):
        status = IslandStatus(name, True)
        status.standby = standby
        client.register(status)
    registry = Registry(DirectNetwork(HOST, store.address), IslandStatus("a", True))
    assert registry._standbys == {"192.0.2.9:7000": ("192.0.2.9:7000", "192.0.2.9:7001")}
    registry.close()
    secured = Registry(DirectNetwork(HOST, store.address), IslandStatus("a", True), first=None)
    assert secured._standbys == {}, "where a gateway authenticates machines, no island leads others elsewhere"
    secured.close()


@pytest.fixture
def driven(store, monkeypatch):
    """An island's registry that is driven by hand, the lighthouses that it moves to, its clock, and a keeper's reports."""
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)
    monkeypatch.setattr(rendezvous, "PROBE_S", 1e9)
    now_s, keepers, client = [1000.0], {}, RegistryClient(store.address)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    store.store.set("join_info", OF_THIS_RUN)
    registry = Registry(DirectNetwork(HOST, store.address, "first", "run-1"), IslandStatus("a", True, run="run-1"))
    registry._first, moves = {f"{HOST}:1": "first", store.address: "first"}, []
    registry.on_move = moves.append

    def report(name, standby):
        status = keepers.setdefault(name, IslandStatus(name, True, run="run-1"))
        status.standby, status.heartbeat = standby, status.heartbeat + 1
        client.register(status)
        registry.refresh()
        registry._choose_rendezvous()

    yield SimpleNamespace(registry=registry, moves=moves, now_s=now_s, report=report, address=store.address)
    registry.close()


def test_islands_move_to_the_new_lighthouse_of_a_standby_that_was_restarted(driven):
    driven.report("keeper-1", f"{driven.address} {HOST}:9")
    assert driven.moves == [f"{HOST}:9"]
    driven.now_s[0] += rendezvous.UNREGISTERED_S + 1.0
    driven.report("keeper-2", f"{driven.address} {HOST}:7")
    driven.report("keeper-2", f"{driven.address} {HOST}:7")
    assert driven.moves == [f"{HOST}:9", f"{HOST}:7"], "the dead keeper's status is there still"
    assert [*driven.registry._standbys.values()] == [(driven.address, f"{HOST}:7")]


def test_a_standby_takes_the_place_of_one_that_has_long_not_answered(driven, monkeypatch):
    forgotten = []
    monkeypatch.setattr(driven.registry, "_most_standbys", 2)
    monkeypatch.setattr(driven.registry._network, "forget", forgotten.append)
    for port in (2, 3):
        driven.report("keeper", f"{HOST}:{port} {HOST}:9")
    driven.report("keeper", f"{HOST}:4 {HOST}:9")
    assert [*driven.registry._standbys] == [f"{HOST}:2", f"{HOST}:3"]
    driven.now_s[0] += rendezvous.FORGOTTEN_S + 1.0
    driven.report("keeper", f"{HOST}:4 {HOST}:9")
    assert [*driven.registry._standbys] == [f"{HOST}:3", f"{HOST}:4"]
    assert forgotten == [f"{HOST}:2"]
