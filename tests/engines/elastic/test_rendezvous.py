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


def test_a_newcomer_is_told_what_was_ordered(client):
    newcomer = RegistryClient(client.address)
    assert newcomer.join_info() is None
    client.set_join_info("train")
    assert newcomer.join_info() == "train"


def test_islands_read_what_others_signed_last(client):
    one, two = RegistryClient(client.address), RegistryClient(client.address)
    one.register("a", {"version": 1})
    two.register("b", {"version": 2})
    one.register("a", {"version": 3})
    assert two.names() == one.names() == ["a", "b"]
    assert two.entries("ab") == one.entries("ab") == {"a": {"version": 3}, "b": {"version": 2}}


class Distant:
    """A store that counts the journeys to it."""

    def __init__(self, store):
        self._store, self.journeys = store, 0

    def __getattr__(self, name):
        self.journeys += 1
        return getattr(self._store, name)


def test_a_look_takes_as_many_journeys_however_many_islands_there_are(client):
    journeys = []
    for number in range(0, 20, 10):
        for name in range(number, number + 10):
            client.register(f"island-{name}", {"heartbeat": 1})
        far = Registry(client.address, "me", dict)
        far.refresh()
        far._client._store = store = Distant(client._store)
        far.refresh()
        journeys.append(store.journeys)
        assert len(far.alive()) == number + 11
        far.close()
    assert journeys == [5, 5]


def test_who_is_silent_for_long_is_asked_for_again_only_when_it_comes_back(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # looks when it is told to
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
        registry._closed.set()


def test_who_has_not_signed_for_a_while_is_not_alive(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # looks when it is told to
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


def test_when_the_registry_comes_back_empty_everybody_signs_again():
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


def test_where_nobody_keeps_a_registry_it_is_said():
    store, port = open_store(HOST)
    del store
    with pytest.raises(ExchangeFailed, match=f"no registry answers at {HOST}:{port}"):
        RegistryClient(f"{HOST}:{port}").join_info()


def test_two_threads_never_look_at_once(client, monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 1e9)  # looks when it is told to
    looking, together = [], []

    def entry():
        looking.append(1)
        together.append(len(looking))
        inside.wait(0.05)  # for another to come in, if it can
        looking.pop()
        return {}

    inside = threading.Event()
    registry = Registry(client.address, "a", entry)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(registry.refresh)
    assert together == [1, 1, 1]
    registry._closed.set()
