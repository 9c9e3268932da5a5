"""Where an island comes by the state, driven by hand: nobody goes on from an old one while a newer one may be found."""

import math
import threading
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace

import pytest

from atoll.core.errors import CheckpointError
from atoll.core.state_packing import pack
from atoll.engines.elastic import recovery as recovery_module
from atoll.engines.elastic.membership import MembershipLost, log_while_waiting
from atoll.engines.elastic.recovery import NoState, Recovery
from atoll.engines.elastic.rendezvous import SILENT_S
from atoll.engines.elastic.snapshot_server import Snapshot, SnapshotServer
from atoll.engines.elastic.state_version import StateVersion

NOW, AHEAD = StateVersion(5, 9), StateVersion(6, 10)


class Engine:
    """Knows what it was told to do."""

    def __init__(self, peer_addresses=()):
        self.version, self.peer_addresses, self.done = NOW, dict(peer_addresses), []

    def resume_alone(self):
        self.done.append("resumes alone")

    def shared(self):
        return {}

    def restore(self, metadata, shared, donor, received_bytes):
        self.version = StateVersion(*metadata["version"])
        self.done.append(f"is given round {self.version.round} by {donor}")


class Registry:
    """A registry on which another has signed until so many looks are over. A look takes a second."""

    def __init__(self, until=0, signed=AHEAD, address="127.0.0.1:1", reachable_since_s=0.0):
        self.reads, self._until, self.reachable_since_s = 0, until, reachable_since_s
        self._entry = {"address": address, "version": signed.number, "exchanging": False}

    def refresh(self):
        self.reads += 1
        assert self.reads < 50, "it waits for ever"

    def alive(self):
        return {"b": self._entry} if self.reads <= self._until else {}


LIMIT_S, ORIGIN = 10.0, dict.fromkeys(("run", "data", "atoll", "torch"))


class LeaderLog:
    """Has one checkpoint, or none."""

    def __init__(self, version=None):
        saved = SimpleNamespace(round=version and version[0], metadata={"engine": {"version": version}})
        self.checkpoints = SimpleNamespace(
            newest=lambda: saved if version else None, rounds=lambda: [saved.round] if version else []
        )

    def restore(self, checkpoint, engine):
        engine.done.append(f"restores round {checkpoint.round}")


@pytest.fixture
def recovery(monkeypatch):
    """Makes an island's recovery, whose time passes with each read of the registry."""

    def make(registry, leader_log, log=bool, left=None):
        monkeypatch.setattr(
            recovery_module, "time", SimpleNamespace(monotonic=lambda: float(registry.reads), sleep=lambda seconds: None)
        )
        membership = SimpleNamespace(leave=lambda: left is not None and left.append(registry.reads))
        commits = SimpleNamespace(from_parts=bool)
        return Recovery("a", registry, membership, None, leader_log, commits, ORIGIN, log, LIMIT_S)

    return make


@pytest.mark.parametrize(
    ("saved", "done"),
    [(None, "resumes alone"), ([5, 9], "resumes alone"), ([4, 20], "resumes alone"), ([5, 10], "restores round 5")],
)
def test_whoever_gave_the_state_and_is_gone_may_have_left_a_newer_checkpoint(recovery, saved, done):
    engine = Engine()
    recovery(Registry(), LeaderLog(saved)).confirm(engine)
    assert engine.done == [done]


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_over_a_checkpoint_that_cannot_be_read_nobody_loses_the_state_that_it_holds(recovery, go_on):
    def damaged():
        raise CheckpointError("the checkpoint is damaged.")

    engine, leader_log, said = Engine(), LeaderLog([6, 0]), []
    leader_log.checkpoints.newest = damaged
    if go_on == "initialize":  # who holds nothing has nothing to go on with
        with pytest.raises(NoState, match="damaged"):
            go(recovery(Registry(), leader_log), go_on, engine)
        return
    go(recovery(Registry(), leader_log, said.append), go_on, engine)
    assert engine.done == ["resumes alone"]
    assert "the checkpoint is damaged. a does without it, since it holds round 5 itself" in said


def test_an_island_is_alone_only_when_nobody_signs_any_more_though_nobody_answers(recovery):
    engine, registry = Engine(), Registry(until=7)
    recovery(registry, LeaderLog()).catch_up(engine, AHEAD)
    assert engine.done == ["resumes alone"]
    assert registry.reads == 7 + SILENT_S


def go(where_from, how, engine):
    """Have an island come by the state, in one of three ways."""
    {"initialize": where_from.initialize, "confirm": where_from.confirm, "catch_up": lambda e: where_from.catch_up(e, AHEAD)}[how](
        engine
    )


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_whoever_reads_a_roll_first_that_was_just_started_does_not_take_itself_for_the_last_one(recovery, go_on):
    engine, registry = Engine(), Registry(reachable_since_s=9.0)
    go(recovery(registry, LeaderLog([6, 0])), go_on, engine)
    assert engine.done == ["restores round 6"]
    assert registry.reads == 9 + SILENT_S


def test_a_checkpoint_is_restored_only_when_nobody_signs_that_it_has_a_state_though_nobody_answers(recovery):
    engine, registry = Engine(), Registry(until=7, signed=StateVersion(0, 0))
    recovery(registry, LeaderLog([6, 0])).initialize(engine)
    assert registry.reads == 7 + SILENT_S


def test_islands_that_both_need_a_state_that_is_gone_do_not_wait_for_each_other(recovery):
    engine = Engine()
    recovery(Registry(until=100, signed=NOW), LeaderLog()).catch_up(engine, AHEAD)
    assert engine.done == ["resumes alone"]


def test_a_fellow_that_is_not_on_the_roll_and_answers_has_the_state(recovery):
    registry = Registry()

    def about():
        return {"name": "b", "version": AHEAD.number if registry.reads <= 7 else -1, "exchanging": False, "confirmed": True}

    with closing(SnapshotServer("127.0.0.1", about)) as server:
        recovery(registry, LeaderLog()).catch_up(Engine({"b": server.address}), AHEAD)
    assert registry.reads == 7 + SILENT_S


def test_whoever_cannot_fetch_what_another_has_says_so_but_not_while_it_may_follow_at_any_moment(recovery):
    left = []

    def about():
        return {
            "name": "b",
            "version": (NOW if registry.reads <= 3 else AHEAD).number,
            "exchanging": registry.reads <= 3,
            "confirmed": True,
        }

    with closing(SnapshotServer("127.0.0.1", about)) as server:
        registry = Registry(until=7, address=server.address)
        recovery(registry, LeaderLog(), left=left).catch_up(Engine(), AHEAD)
    assert left[:2] == [4, 5]


@pytest.mark.parametrize(("until", "calls"), [(3, []), (5, [7, 8])])
def test_whoever_is_silent_for_a_moment_is_not_taken_for_one_from_whom_nothing_can_be_fetched(recovery, until, calls):
    left, registry = [], Registry(until=until)
    recovery(registry, LeaderLog(), left=left).catch_up(Engine(), AHEAD)
    assert left == calls


def serving(name, version, confirmed=True, published=True):
    """The server of an island that reports this state."""
    status = {"name": name, "version": version.number, "exchanging": False, "confirmed": confirmed}
    server = SnapshotServer("127.0.0.1", lambda: status)
    metadata = {"version": list(version), "wall_time_s": 0.0}
    if published:
        server.publish(Snapshot({"metadata": metadata, "structure": pack({})[0], "origin": ORIGIN, "commits": []}))
    return server


def test_those_who_are_behind_have_nothing_that_could_not_be_fetched(recovery):
    left = []
    with closing(serving("b", NOW)) as server:
        recovery(Registry(), LeaderLog(), left=left).catch_up(Engine({"b": server.address}), AHEAD)
    assert not left


def test_nobody_is_given_a_state_by_one_that_was_given_it_itself_while_one_answers_that_has_committed_it(recovery):
    engine, said = Engine(), []

    class Gone(Registry):
        """Whoever has committed it is there for three looks."""

        def refresh(self):
            super().refresh()
            if self.reads == 4:
                committed.close()

    with ExitStack() as stack:
        committed = serving("y", AHEAD, published=False)
        given, older = (
            stack.enter_context(closing(server)) for server in (serving("z", AHEAD, confirmed=False), serving("x", NOW))
        )
        engine.peer_addresses = {"x": older.address, "y": committed.address, "z": given.address}
        registry = Gone()
        recovery(registry, None, said.append).catch_up(engine, AHEAD)
    assert engine.done == ["is given round 6 by z"]
    assert registry.reads == 4
    assert "z (0 bytes), which fetched it itself: no island answers that confirmed it" in said[-1]


def test_of_those_who_have_a_state_one_that_has_committed_it_gives_it(recovery):
    engine = Engine()
    with closing(serving("y", AHEAD)) as committed, closing(serving("z", AHEAD, confirmed=False)) as given:
        engine.peer_addresses = {"y": committed.address, "z": given.address}
        recovery(Registry(), None).catch_up(engine, AHEAD)
    assert engine.done == ["is given round 6 by y"]


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_when_the_roll_is_gone_and_nobody_has_the_state_whoever_needs_it_ends_with_a_sentence(recovery, go_on):
    registry, engine = Registry(reachable_since_s=math.inf), Engine()
    with closing(serving("b", NOW)) as behind:
        engine.peer_addresses = {"b": behind.address} if go_on != "initialize" else {}
        with pytest.raises(MembershipLost, match="a waited 10 s for an island that has the run's state"):
            go(recovery(registry, None), go_on, engine)
    assert registry.reads == LIMIT_S + 1
    assert engine.done == []


def test_as_long_as_somebody_answers_who_has_the_state_it_is_waited_for_though_the_roll_is_gone(recovery):
    class Gone(Registry):
        def refresh(self):
            super().refresh()
            if self.reads == 30:
                server.close()

    registry, server = Gone(reachable_since_s=math.inf), serving("b", AHEAD, published=False)
    with pytest.raises(MembershipLost):
        recovery(registry, None).catch_up(Engine({"b": server.address}), AHEAD)
    assert registry.reads > 30 + LIMIT_S - 1


@pytest.mark.parametrize("go_on", ["initialize", "confirm"])
def test_whoever_waits_for_a_state_says_so(recovery, monkeypatch, go_on):
    spoken = threading.Event()

    class Slow(Registry):
        def refresh(self):
            assert spoken.wait(20.0), "it waits in silence"
            super().refresh()

    monkeypatch.setattr(recovery_module, "log_while_waiting", partial(log_while_waiting, every_s=0.001))
    engine = Engine()
    where_from = recovery(Slow(reachable_since_s=math.inf), None, log=lambda text: spoken.set())
    with pytest.raises(MembershipLost):
        go(where_from, go_on, engine)
