"""Where an island comes by the state, driven by hand: nobody goes on from an old one while a newer one may be found."""

from types import SimpleNamespace

import pytest

from atoll.engines.elastic.generation import Generation
from atoll.runs.elastic import sources as where
from atoll.runs.elastic.sources import Sources


class Engine:
    """Knows what it was told to do."""

    def __init__(self):
        self.generation, self.done = Generation(5, 9), []

    def begin_anew(self):
        self.done.append("begins anew")


class Roll:
    """A roll on which others disappear after so many looks. Nobody answers."""

    reached = True

    def __init__(self, looks=0):
        self.looks, self.left = 0, looks

    def look(self):
        self.looks += 1

    def alive(self):
        gone = self.looks > self.left
        return {} if gone else {"b": {"pier": "127.0.0.1:1", "generation": Generation(6, 10).number}}


class Desk:
    """Has one checkpoint, or none."""

    def __init__(self, generation=None):
        saved = SimpleNamespace(round=generation and generation[0], metadata={"engine": {"generation": generation}})
        self.checkpoints = SimpleNamespace(newest=lambda: saved if generation else None)

    def restored(self, checkpoint, engine):
        engine.done.append(f"restores round {checkpoint.round}")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(where, "_LOOK_S", 0.0)


def sources(roll, desk):
    return Sources("a", roll, None, desk, None, {}, lambda text: None)


@pytest.mark.parametrize(
    ("saved", "done"),
    [(None, "begins anew"), ([5, 9], "begins anew"), ([4, 20], "begins anew"), ([5, 10], "restores round 5")],
)
def test_whoever_gave_the_state_and_is_gone_may_have_left_a_newer_checkpoint(saved, done):
    engine = Engine()
    sources(Roll(), Desk(saved)).confirm(engine)
    assert engine.done == [done]


def test_an_island_is_alone_only_when_nobody_signs_any_more_though_nobody_answers():
    engine, roll = Engine(), Roll(looks=3)
    sources(roll, Desk()).catch_up(engine, Generation(6, 10))
    assert engine.done == ["begins anew"]
    assert roll.looks == 4
