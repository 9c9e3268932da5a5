"""The registry, over real stores on this machine."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic import rendezvous
from atoll.engines.elastic.rendezvous import Registry, RegistryClient, open_store

HOST = "127.0.0.1"


@pytest.fixture
def client():
    store, port = open_store(HOST)
    return RegistryClient(f"{HOST}:{port}", store)


def test_a_joiner_reads_the_join_info(client):
    newcomer = RegistryClient(client.address)
    assert newcomer.join_info() is None
    client.set_join_info("train")
    assert newcomer.join_info() == "train"


def test_islands_read_each_others_last_entries(client):
    one, two = RegistryClient(client.address), RegistryClient(client.address)
    one.register("a", {"version": 1})
    two.register("b", {"version": 2})
    one.register("a", {"version": 3})
    assert two.names() == one.names() == ["a", "b"]
    assert two.entries("ab") == one.entries("ab") == {"a": {"version": 3}, "b": {"version": 2}}


class Distant:
    """A store that counts the requests to it."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


def test_a_refresh_takes_five_requests_however_many_islands_there_are(client):
    requests = []
    for number in range(0, 20, 10):
        for name in range(number, number + 10):
            client.register(f"island-{name}", {"heartbeat": 1})
        far = Registry(client.address, "me", dict)
        far.refresh()
        far._client._store = store = Distant(client._store)
        far.refresh()
        requests.append(store.requests)
        assert len(far.alive()) == number + 11
        far.close()
    assert requests == [5, 5]


def test_a_forgotten_island_is_read_again_when_it_registers_anew(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here, gone = (Registry(client.address, name, dict) for name in ("here", "gone"))
    here.refresh()
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.FORGOTTEN_S + 1)
    for _ in range(2):
        here.refresh()
    assert here._entries.keys() == {"here"}
    again = Registry(client.address, "gone", dict)  # another process of that name
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]
    for registry in (here, gone, again):
        registry.close()


def test_an_island_without_heartbeats_is_not_alive(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    here, gone = (Registry(client.address, name, lambda: {"phase": "training"}) for name in ("here", "gone"))
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s + rendezvous.SILENT_S + 1)
    here.refresh()
    assert sorted(here.alive()) == ["here"]
    gone.refresh()
    here.refresh()
    assert sorted(here.alive()) == ["gone", "here"]


def test_islands_register_again_when_the_registry_comes_back_empty():
    store, port = open_store(HOST)
    registry = Registry(f"{HOST}:{port}", "a", lambda: {"phase": "training"})
    before_s = registry.reachable_since_s
    registry.refresh()
    assert registry.reachable_since_s == before_s
    del store
    registry.refresh()
    assert registry.reachable_since_s == math.inf
    store, _ = open_store(HOST, port)
    registry.refresh()
    registry.refresh()
    assert before_s < registry.reachable_since_s <= time.monotonic(), "not for as long as it was before"
    assert RegistryClient(f"{HOST}:{port}", store).names() == ["a"]
    registry.close()


def test_a_missing_registry_is_an_error():
    store, port = open_store(HOST)
    del store
    with pytest.raises(ExchangeFailed, match=f"no registry answers at {HOST}:{port}"):
        RegistryClient(f"{HOST}:{port}").join_info()


def test_two_threads_never_refresh_at_once(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # refreshes on command
    looking, together = [], []

    def entry():
        looking.append(1)
        together.append(len(looking))
        inside.wait(0.05)  # for another thread to come in, if it can
        looking.pop()
        return {}

    inside = threading.Event()
    registry = Registry(client.address, "a", entry)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(registry.refresh)
    assert together == [1, 1, 1]
    registry.close()
