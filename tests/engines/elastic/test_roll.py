"""The roll: real stores on this machine."""

import time

import pytest

from atoll.engines.elastic import roll as rolls
from atoll.engines.elastic.roll import Board, Roll, open_store
from atoll.errors import ExchangeFailed

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
    assert two.entries() == one.entries() == {"a": {"generation": 3}, "b": {"generation": 2}}


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
    assert roll.reached
    del store
    roll.look()
    assert not roll.reached
    store, _ = open_store(HOST, port)
    roll.look()
    roll.look()
    assert roll.reached
    assert list(Board(f"{HOST}:{port}", store).entries()) == ["a"]
    roll.close()


def test_where_nobody_keeps_a_roll_it_is_said():
    store, port = open_store(HOST)
    del store
    with pytest.raises(ExchangeFailed, match=f"nobody answers at {HOST}:{port}"):
        Board(f"{HOST}:{port}").order()
