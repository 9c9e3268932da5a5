"""Where an island comes by the state, driven by hand: nobody goes on from an old one while a newer one may be found."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from atoll.engines.elastic.generation import Generation
from atoll.engines.elastic.pier import Pier
from atoll.engines.elastic.roll import SILENT_S
from atoll.runs.elastic import sources as where
from atoll.runs.elastic.sources import Sources

NOW, AHEAD = Generation(5, 9), Generation(6, 10)


class Engine:
    """Knows what it was told to do."""

    def __init__(self, fellows=()):
        self.generation, self.fellows, self.done = NOW, dict(fellows), []

    def begin_anew(self):
        self.done.append("begins anew")


class Roll:
    """A roll on which another has signed until so many looks are over. A look takes a second."""

    def __init__(self, until=0, signed=AHEAD, pier="127.0.0.1:1", reached_s=0.0):
        self.looks, self._until, self.reached_s = 0, until, reached_s
        self._entry = {"pier": pier, "generation": signed.number, "exchanging": False}

    def look(self):
        self.looks += 1
        assert self.looks < 50, "it waits for ever"

    def alive(self):
        return {"b": self._entry} if self.looks <= self._until else {}


class Desk:
    """Has one checkpoint, or none."""

    def __init__(self, generation=None):
        saved = SimpleNamespace(round=generation and generation[0], metadata={"engine": {"generation": generation}})
        self.checkpoints = SimpleNamespace(
            newest=lambda: saved if generation else None, rounds=lambda: [saved.round] if generation else []
        )

    def restored(self, checkpoint, engine):
        engine.done.append(f"restores round {checkpoint.round}")


@pytest.fixture
def sources(monkeypatch):
    """Of an island that reads this roll, by whose looks time passes."""

    def make(roll, desk):
        monkeypatch.setattr(where, "time", SimpleNamespace(monotonic=lambda: float(roll.looks), sleep=lambda seconds: None))
        return Sources("a", roll, None, desk, None, {}, lambda text: None)

    return make


@pytest.mark.parametrize(
    ("saved", "done"),
    [(None, "begins anew"), ([5, 9], "begins anew"), ([4, 20], "begins anew"), ([5, 10], "restores round 5")],
)
def test_whoever_gave_the_state_and_is_gone_may_have_left_a_newer_checkpoint(sources, saved, done):
    engine = Engine()
    sources(Roll(), Desk(saved)).confirm(engine)
    assert engine.done == [done]


def test_an_island_is_alone_only_when_nobody_signs_any_more_though_nobody_answers(sources):
    engine, roll = Engine(), Roll(until=7)
    sources(roll, Desk()).catch_up(engine, AHEAD)
    assert engine.done == ["begins anew"]
    assert roll.looks == 7 + SILENT_S


@pytest.mark.parametrize("go_on", ["first", "catch_up", "confirm"])
def test_whoever_reads_a_roll_first_that_was_just_started_does_not_take_itself_for_the_last_one(sources, go_on):
    engine, roll = Engine(), Roll(reached_s=9.0)
    where_from = sources(roll, Desk([6, 0]))
    {"first": where_from.first, "confirm": where_from.confirm, "catch_up": lambda e: where_from.catch_up(e, AHEAD)}[go_on](engine)
    assert engine.done == ["restores round 6"]
    assert roll.looks == 9 + SILENT_S


def test_a_checkpoint_is_restored_only_when_nobody_signs_that_it_has_a_state_though_nobody_answers(sources):
    engine, roll = Engine(), Roll(until=7, signed=Generation(0, 0))
    sources(roll, Desk([6, 0])).first(engine)
    assert roll.looks == 7 + SILENT_S


def test_islands_that_both_need_a_state_that_is_gone_do_not_wait_for_each_other(sources):
    engine = Engine()
    sources(Roll(until=100, signed=NOW), Desk()).catch_up(engine, AHEAD)
    assert engine.done == ["begins anew"]


def test_a_fellow_that_is_not_on_the_roll_and_answers_has_the_state(sources):
    roll = Roll()

    def about():
        return {"name": "b", "generation": AHEAD.number if roll.looks <= 7 else -1, "exchanging": False}

    with closing(Pier("127.0.0.1", about)) as pier:
        sources(roll, Desk()).catch_up(Engine({"b": pier.address}), AHEAD)
    assert roll.looks == 7 + SILENT_S


def test_whoever_cannot_fetch_what_another_has_says_so_but_not_while_it_may_follow_at_any_moment(sources):
    failed = []

    def about():
        return {"name": "b", "generation": (NOW if roll.looks <= 3 else AHEAD).number, "exchanging": roll.looks <= 3}

    with closing(Pier("127.0.0.1", about)) as pier:
        roll = Roll(until=7, pier=pier.address)
        sources(roll, Desk()).catch_up(Engine(), AHEAD, failed=lambda: failed.append(roll.looks))
    assert failed[:2] == [4, 5]
