"""The roll: real stores on this machine."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic import registry as rolls
from atoll.engines.elastic.registry import Board, Roll, open_store

HOST = "127.0.0.1"


@pytest.fixture
def board():
    store, port = open_store(HOST)
    return Board(f"{HOST}:{port}", store)


def test_a_newcomer_is_told_what_was_ordered(board):
    newcomer = Board(board.address)
    assert newcomer.order() is None
    board.give_order("train")
    assert newcomer.order() == "train"


def test_islands_read_what_others_signed_last(board):
    one, two = Board(board.address), Board(board.address)
    one.sign("a", {"generation": 1})
    two.sign("b", {"generation": 2})
    one.sign("a", {"generation": 3})
    assert two.names() == one.names() == ["a", "b"]
    assert two.entries("ab") == one.entries("ab") == {"a": {"generation": 3}, "b": {"generation": 2}}


class Distant:
    """A store that counts the journeys to it."""

    def __init__(self, store):
        self._store, self.journeys = store, 0

    def __getattr__(self, name):
        self.journeys += 1
        return getattr(self._store, name)


def test_a_look_takes_as_many_journeys_however_many_islands_there_are(board):
    journeys = []
    for number in range(0, 20, 10):
        for name in range(number, number + 10):
            board.sign(f"island-{name}", {"beat": 1})
        far = Roll(board.address, "me", dict)
        far.look()
        far._board._store = store = Distant(board._store)
        far.look()
        journeys.append(store.journeys)
        assert len(far.alive()) == number + 11
        far.close()
    assert journeys == [5, 5]


def test_who_is_silent_for_long_is_asked_for_again_only_when_it_comes_back(board, monkeypatch):
    monkeypatch.setattr(rolls, "BEAT_S", 1e9)  # looks when it is told to
    here, gone = (Roll(board.address, name, dict) for name in ("here", "gone"))
    here.look()
    now_s = time.monotonic()
    monkeypatch.setattr(rolls.time, "monotonic", lambda: now_s + rolls.FORGOTTEN_S + 1)
    for _ in range(2):
        here.look()
    assert here._entries.keys() == {"here"}
    again = Roll(board.address, "gone", dict)  # another process of that name
    here.look()
    assert sorted(here.alive()) == ["gone", "here"]
    for roll in (here, gone, again):
        roll._over.set()


def test_who_has_not_signed_for_a_while_is_not_alive(board, monkeypatch):
    monkeypatch.setattr(rolls, "BEAT_S", 1e9)  # looks when it is told to
    here, gone = (Roll(board.address, name, lambda: {"doing": "training"}) for name in ("here", "gone"))
    here.look()
    assert sorted(here.alive()) == ["gone", "here"]
    now_s = time.monotonic()
    monkeypatch.setattr(rolls.time, "monotonic", lambda: now_s + rolls.SILENT_S + 1)
    here.look()
    assert sorted(here.alive()) == ["here"]
    gone.look()
    here.look()
    assert sorted(here.alive()) == ["gone", "here"]


def test_when_the_roll_comes_back_empty_everybody_signs_again():
    store, port = open_store(HOST)
    roll = Roll(f"{HOST}:{port}", "a", lambda: {"doing": "training"})
    before_s = roll.reached_s
    roll.look()
    assert roll.reached_s == before_s
    del store
    roll.look()
    assert roll.reached_s == math.inf
    store, _ = open_store(HOST, port)
    roll.look()
    roll.look()
    assert before_s < roll.reached_s <= time.monotonic(), "not for as long as it was before"
    assert Board(f"{HOST}:{port}", store).names() == ["a"]
    roll.close()


def test_where_nobody_keeps_a_roll_it_is_said():
    store, port = open_store(HOST)
    del store
    with pytest.raises(ExchangeFailed, match=f"nobody answers at {HOST}:{port}"):
        Board(f"{HOST}:{port}").order()


def test_two_threads_never_look_at_once(board, monkeypatch):
    monkeypatch.setattr(rolls, "BEAT_S", 1e9)  # looks when it is told to
    looking, together = [], []

    def entry():
        looking.append(1)
        together.append(len(looking))
        inside.wait(0.05)  # for another to come in, if it can
        looking.pop()
        return {}

    inside = threading.Event()
    roll = Roll(board.address, "a", entry)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(roll.look)
    assert together == [1, 1, 1]
    roll._over.set()
