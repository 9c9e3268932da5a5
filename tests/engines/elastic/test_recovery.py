"""Where an island comes by the state, driven by hand: nobody goes on from an old one while a newer one may be found."""

import math
import threading
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace

import pytest

from atoll.core.errors import CheckpointError
from atoll.core.state_packing import pack
from atoll.engines.elastic import recovery as where
from atoll.engines.elastic.membership import CutOff
from atoll.engines.elastic.recovery import NoState, Sources
from atoll.engines.elastic.registry import SILENT_S
from atoll.engines.elastic.snapshot_server import Cargo, Pier
from atoll.engines.elastic.state_version import Generation
from atoll.engines.elastic.wait_log import reminding

NOW, AHEAD = Generation(5, 9), Generation(6, 10)


class Engine:
    """Knows what it was told to do."""

    def __init__(self, fellows=()):
        self.generation, self.fellows, self.done = NOW, dict(fellows), []

    def begin_anew(self):
        self.done.append("begins anew")

    def shared(self):
        return {}

    def restore(self, plain, shared, donor, nbytes):
        self.generation = Generation(*plain["generation"])
        self.done.append(f"is given round {self.generation.round} by {donor}")


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


LIMIT_S, ORIGIN = 10.0, dict.fromkeys(("run", "data", "atoll", "torch"))


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

    def make(roll, desk, say=bool):
        monkeypatch.setattr(where, "time", SimpleNamespace(monotonic=lambda: float(roll.looks), sleep=lambda seconds: None))
        return Sources("a", roll, None, desk, SimpleNamespace(from_parts=bool), ORIGIN, say, LIMIT_S)

    return make


@pytest.mark.parametrize(
    ("saved", "done"),
    [(None, "begins anew"), ([5, 9], "begins anew"), ([4, 20], "begins anew"), ([5, 10], "restores round 5")],
)
def test_whoever_gave_the_state_and_is_gone_may_have_left_a_newer_checkpoint(sources, saved, done):
    engine = Engine()
    sources(Roll(), Desk(saved)).confirm(engine)
    assert engine.done == [done]


@pytest.mark.parametrize("go_on", ["first", "catch_up", "confirm"])
def test_over_a_checkpoint_that_cannot_be_read_nobody_loses_the_state_that_it_holds(sources, go_on):
    def damaged():
        raise CheckpointError("the checkpoint is damaged.")

    engine, desk, said = Engine(), Desk([6, 0]), []
    desk.checkpoints.newest = damaged
    if go_on == "first":  # who holds nothing has nothing to go on with
        with pytest.raises(NoState, match="damaged"):
            go(sources(Roll(), desk), go_on, engine)
        return
    go(sources(Roll(), desk, said.append), go_on, engine)
    assert engine.done == ["begins anew"]
    assert "the checkpoint is damaged. a does without it, since it holds round 5 itself" in said


def test_an_island_is_alone_only_when_nobody_signs_any_more_though_nobody_answers(sources):
    engine, roll = Engine(), Roll(until=7)
    sources(roll, Desk()).catch_up(engine, AHEAD)
    assert engine.done == ["begins anew"]
    assert roll.looks == 7 + SILENT_S


def go(where_from, how, engine):
    """Have an island come by the state, in one of three ways."""
    {"first": where_from.first, "confirm": where_from.confirm, "catch_up": lambda e: where_from.catch_up(e, AHEAD)}[how](engine)


@pytest.mark.parametrize("go_on", ["first", "catch_up", "confirm"])
def test_whoever_reads_a_roll_first_that_was_just_started_does_not_take_itself_for_the_last_one(sources, go_on):
    engine, roll = Engine(), Roll(reached_s=9.0)
    go(sources(roll, Desk([6, 0])), go_on, engine)
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
        return {"name": "b", "generation": AHEAD.number if roll.looks <= 7 else -1, "exchanging": False, "vouched": True}

    with closing(Pier("127.0.0.1", about)) as pier:
        sources(roll, Desk()).catch_up(Engine({"b": pier.address}), AHEAD)
    assert roll.looks == 7 + SILENT_S


def test_whoever_cannot_fetch_what_another_has_says_so_but_not_while_it_may_follow_at_any_moment(sources):
    failed = []

    def about():
        return {
            "name": "b",
            "generation": (NOW if roll.looks <= 3 else AHEAD).number,
            "exchanging": roll.looks <= 3,
            "vouched": True,
        }

    with closing(Pier("127.0.0.1", about)) as pier:
        roll = Roll(until=7, pier=pier.address)
        sources(roll, Desk()).catch_up(Engine(), AHEAD, failed=lambda: failed.append(roll.looks))
    assert failed[:2] == [4, 5]


@pytest.mark.parametrize(("until", "calls"), [(3, []), (5, [7, 8])])
def test_whoever_is_silent_for_a_moment_is_not_taken_for_one_from_whom_nothing_can_be_fetched(sources, until, calls):
    failed, roll = [], Roll(until=until)
    sources(roll, Desk()).catch_up(Engine(), AHEAD, failed=lambda: failed.append(roll.looks))
    assert failed == calls


def has(name, generation, vouched=True, handed_out=True):
    """A pier of an island that says that it has this state."""
    pier = Pier("127.0.0.1", lambda: {"name": name, "generation": generation.number, "exchanging": False, "vouched": vouched})
    plain = {"generation": list(generation), "wall_time_s": 0.0}
    with pier.changing() as put:
        if handed_out:
            put(Cargo({"plain": plain, "structure": pack({})[0], "origin": ORIGIN, "minutes": []}))
    return pier


def test_those_who_are_behind_have_nothing_that_could_not_be_fetched(sources):
    failed = []
    with closing(has("b", NOW)) as pier:
        sources(Roll(), Desk()).catch_up(Engine({"b": pier.address}), AHEAD, failed=lambda: failed.append(1))
    assert not failed


def test_nobody_is_given_a_state_by_one_that_was_given_it_itself_while_one_answers_that_has_committed_it(sources):
    engine, said = Engine(), []

    class Gone(Roll):
        """Whoever has committed it is there for three looks."""

        def look(self):
            super().look()
            if self.looks == 4:
                committed.close()

    with ExitStack() as stack:
        committed = has("y", AHEAD, handed_out=False)
        given, older = (stack.enter_context(closing(pier)) for pier in (has("z", AHEAD, vouched=False), has("x", NOW)))
        engine.fellows = {"x": older.address, "y": committed.address, "z": given.address}
        roll = Gone()
        sources(roll, None, said.append).catch_up(engine, AHEAD)
    assert engine.done == ["is given round 6 by z"]
    assert roll.looks == 4
    assert "z (0 bytes), which was given it itself: nobody answers who has committed it" in said[-1]


def test_of_those_who_have_a_state_one_that_has_committed_it_gives_it(sources):
    engine = Engine()
    with closing(has("y", AHEAD)) as committed, closing(has("z", AHEAD, vouched=False)) as given:
        engine.fellows = {"y": committed.address, "z": given.address}
        sources(Roll(), None).catch_up(engine, AHEAD)
    assert engine.done == ["is given round 6 by y"]


@pytest.mark.parametrize("go_on", ["first", "catch_up", "confirm"])
def test_when_the_roll_is_gone_and_nobody_has_the_state_whoever_needs_it_ends_with_a_sentence(sources, go_on):
    roll, engine = Roll(reached_s=math.inf), Engine()
    with closing(has("b", NOW)) as behind:
        engine.fellows = {"b": behind.address} if go_on != "first" else {}
        with pytest.raises(CutOff, match="a waited 10 s for an island that has the run's state"):
            go(sources(roll, None), go_on, engine)
    assert roll.looks == LIMIT_S + 1
    assert engine.done == []


def test_as_long_as_somebody_answers_who_has_the_state_it_is_waited_for_though_the_roll_is_gone(sources):
    class Gone(Roll):
        def look(self):
            super().look()
            if self.looks == 30:
                pier.close()

    roll, pier = Gone(reached_s=math.inf), has("b", AHEAD, handed_out=False)
    with pytest.raises(CutOff):
        sources(roll, None).catch_up(Engine({"b": pier.address}), AHEAD)
    assert roll.looks > 30 + LIMIT_S - 1


@pytest.mark.parametrize("go_on", ["first", "confirm"])
def test_whoever_waits_for_a_state_says_so(sources, monkeypatch, go_on):
    spoken = threading.Event()

    class Slow(Roll):
        def look(self):
            assert spoken.wait(20.0), "it waits in silence"
            super().look()

    monkeypatch.setattr(where, "reminding", partial(reminding, every_s=0.001))
    engine = Engine()
    where_from = sources(Slow(reached_s=math.inf), None, say=lambda text: spoken.set())
    with pytest.raises(CutOff):
        go(where_from, go_on, engine)
