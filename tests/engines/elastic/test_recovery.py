"""Recovery, driven by hand: no island continues from an old state while a newer one may be found."""

import math
import threading
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace

import pytest

from atoll.core.errors import CheckpointError, ExchangeFailed
from atoll.core.serialization import pack
from atoll.engines.elastic import recovery as recovery_module
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.membership import MembershipLost
from atoll.engines.elastic.quorum import LastQuorum
from atoll.engines.elastic.recovery import NoState, Recovery
from atoll.engines.elastic.rendezvous import UNREGISTERED_S
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, Snapshot, SnapshotServer
from atoll.engines.elastic.state_version import NO_VERSION, StateVersion
from atoll.engines.liveness import log_while_waiting

NOW, AHEAD = StateVersion(5, 9), StateVersion(6, 10)


def reported(name, version, address="", **fields):
    return {**IslandStatus(name, True, address, IslandPhase.JOINED, version).to_json(), **fields}


class Engine:
    """Records what it is made to do."""

    def __init__(self, peer_addresses=()):
        self.version, self.peer_addresses, self.done = NOW, dict(peer_addresses), []
        self.accounting = SimpleNamespace(quorum=LastQuorum(("a#1",)))
        self.replica = SimpleNamespace(optimizer_parameters=[])

    def successors(self):
        return ["b#1"]

    def resume_alone(self):
        self.done.append("resumes alone")

    def shared(self):
        return {}

    def restore(self, metadata, shared, donor, received_bytes, moments):
        self.version = StateVersion(*metadata["version"])
        self.done.append(f"fetches round {self.version.round} from {donor}")


class Registry:
    """A registry that has another island's entry for the first `until` reads. A read takes a second."""

    def __init__(self, until=0, signed=AHEAD, address="127.0.0.1:1", reachable_since_s=0.0):
        self.reads, self._until, self.reachable_since_s = 0, until, reachable_since_s
        self._status = IslandStatus("b", True, address, IslandPhase.JOINED, signed)

    def refresh(self):
        self.reads += 1
        assert self.reads < 50, "it waits for ever"

    def alive(self):
        return {"b": self._status} if self.reads <= self._until else {}


LIMIT_S, ORIGIN = 10.0, dict.fromkeys(("run", "data", "atoll", "torch"))


class LeaderLog:
    """Has one checkpoint, or none."""

    last_quorum, is_copy = LastQuorum, False

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

    def make(registry, leader_log, log=bool, left=None, ended=lambda others: {"b#1"}):
        monkeypatch.setattr(
            recovery_module, "time", SimpleNamespace(monotonic=lambda: float(registry.reads), sleep=lambda seconds: None)
        )
        leave = lambda: left is not None and left.append(registry.reads)  # noqa: E731
        membership = SimpleNamespace(leave=leave, network=DirectNetwork("", "127.0.0.1:7000"), ended=ended)
        commits = SimpleNamespace(from_parts=bool)
        return Recovery("a", registry, membership, leader_log, commits, ORIGIN, log, LIMIT_S)

    return make


@pytest.mark.parametrize(
    ("saved", "done"),
    [(None, "resumes alone"), ([5, 9], "resumes alone"), ([4, 20], "resumes alone"), ([5, 10], "restores round 5")],
)
def test_a_dead_donor_may_have_left_a_newer_checkpoint(recovery, saved, done):
    engine = Engine()
    recovery(Registry(), LeaderLog(saved)).confirm(engine)
    assert engine.done == [done]


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_a_damaged_checkpoint_does_not_cost_an_island_its_state(recovery, go_on):
    def damaged():
        raise CheckpointError("the checkpoint is damaged.")

    engine, leader_log, logged = Engine(), LeaderLog([6, 0]), []
    leader_log.checkpoints.newest = damaged
    if go_on == "initialize":  # it holds no state to continue with
        with pytest.raises(NoState, match="damaged"):
            go(recovery(Registry(), leader_log), go_on, engine)
        return
    go(recovery(Registry(), leader_log, logged.append), go_on, engine)
    assert engine.done == ["resumes alone"]
    assert "the checkpoint is damaged. a does without it, since it holds round 5 itself" in logged


def test_an_island_waits_for_registered_islands_that_do_not_answer(recovery):
    engine, registry = Engine(), Registry(until=7)
    recovery(registry, LeaderLog()).catch_up(engine, AHEAD)
    assert engine.done == ["resumes alone"]
    assert registry.reads == 7 + UNREGISTERED_S


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_an_island_does_not_go_on_alone_before_the_members_of_the_last_quorum_are_reported_to_have_ended(recovery, go_on):
    engine, registry, logged = Engine(), Registry(), []

    def ended(others):
        return {"b#1"} if registry.reads > 20 else {"c#1"}

    go(recovery(registry, LeaderLog([6, 0]), logged.append, ended=ended), go_on, engine)
    assert engine.done == ["restores round 6"]
    assert registry.reads == 21
    assert [text for text in logged if "a waits: b took part in the last commit and cannot be reached" in text]


def test_an_island_that_was_told_of_a_newer_state_waits_for_its_holders(recovery):
    engine, registry = Engine(), Registry()
    ended = [{"b#1"}] * 10 + [{"b#1", "c#1"}] * 90
    recovery(registry, LeaderLog(), ended=lambda others: ended[registry.reads]).catch_up(engine, AHEAD, ["c#1"])
    assert (engine.done, registry.reads) == (["resumes alone"], 10)


def test_a_joiner_does_not_begin_the_run_by_itself(recovery):
    engine, registry = Engine(), Registry()
    engine.accounting.quorum = LastQuorum()
    with pytest.raises(AssertionError, match="it waits for ever"):
        recovery(registry, None).confirm(engine)
    assert engine.done == []


def go(where_from, how, engine):
    """Recover in one of three ways."""
    {"initialize": where_from.initialize, "confirm": where_from.confirm, "catch_up": lambda e: where_from.catch_up(e, AHEAD)}[how](
        engine
    )


@pytest.mark.parametrize("go_on", ["initialize", "catch_up", "confirm"])
def test_the_first_reader_of_a_restarted_registry_does_not_take_itself_for_the_last_island(recovery, go_on):
    engine, registry = Engine(), Registry(reachable_since_s=9.0)
    go(recovery(registry, LeaderLog([6, 0])), go_on, engine)
    assert engine.done == ["restores round 6"]
    assert registry.reads == 9 + UNREGISTERED_S


def test_a_checkpoint_is_restored_only_when_no_island_registers_a_state(recovery):
    engine, registry = Engine(), Registry(until=7, signed=StateVersion(0, 0))
    recovery(registry, LeaderLog([6, 0])).initialize(engine)
    assert registry.reads == 7 + UNREGISTERED_S


def test_two_islands_that_need_a_lost_state_do_not_wait_for_each_other(recovery):
    engine = Engine()
    recovery(Registry(until=100, signed=NOW), LeaderLog()).catch_up(engine, AHEAD)
    assert engine.done == ["resumes alone"]


def test_a_peer_that_answers_counts_though_it_is_not_registered(recovery):
    registry = Registry()

    def about():
        return reported("b", AHEAD if registry.reads <= 7 else NO_VERSION)

    with closing(SnapshotServer("127.0.0.1", about)) as server:
        recovery(registry, LeaderLog()).catch_up(Engine({"b": server.address}), AHEAD)
    assert registry.reads == 7 + UNREGISTERED_S


def test_an_island_leaves_the_quorum_when_a_fetch_fails_but_not_while_a_commit_may_follow(recovery):
    left = []

    def about():
        exchanging = registry.reads <= 3
        return reported("b", NOW if exchanging else AHEAD, server.address, exchanging=exchanging)

    with closing(SnapshotServer("127.0.0.1", about)) as server:
        registry = Registry(until=7, address=server.address)
        recovery(registry, LeaderLog(), left=left).catch_up(Engine(), AHEAD)
    assert left[:2] == [4, 5]


@pytest.mark.parametrize(("until", "calls"), [(3, []), (5, [7, 8])])
def test_an_island_leaves_the_quorum_only_after_long_silence(recovery, until, calls):
    left, registry = [], Registry(until=until)
    recovery(registry, LeaderLog(), left=left).catch_up(Engine(), AHEAD)
    assert left == calls


def serving(name, version, confirmed=True, published=True, mutate=lambda header: header):
    """The server of an island that reports this state, and whose snapshot has a header that `mutate` changes."""
    server = SnapshotServer("127.0.0.1", lambda: reported(name, version, server.address, confirmed=confirmed))
    metadata = {"version": list(version), "wall_time_s": 0.0, "peers": {}, "rounds_without_delta": 0}
    if published:
        header = {"metadata": metadata, "structure": pack({})[0], "moments": pack({"moments": {}})[0]}
        server.publish(Snapshot(mutate({**header, "origin": ORIGIN, "commit_log": []})))
    return server


MALFORMED = [
    {},
    [],
    *({"metadata": metadata} for metadata in ([], {}, {"version": ["x", 1], "wall_time_s": 0.0})),
    *({"structure": structure} for structure in ([1], {"kind": "none"}, {"kind": "dict", "items": 5})),
    *({"moments": moments} for moments in ([], {"kind": "dict", "items": {}})),
    *({"commit_log": commit_log} for commit_log in (5, [[1]], [[1, 2, False, ["{}"]]], [[1, 2, False, ["no JSON"]]])),
    {"origin": []},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
def test_an_island_does_not_go_on_alone_while_the_holder_of_a_newer_state_sends_a_malformed_one(recovery, change):
    engine, logged = Engine(), []
    with closing(serving("z", AHEAD, mutate=lambda header: header | change if change else change)) as malformed:
        engine.peer_addresses = {"z": malformed.address}
        with pytest.raises(AssertionError, match="it waits for ever"):
            recovery(Registry(), LeaderLog([6, 0]), logged.append).catch_up(engine, AHEAD)
        assert engine.done == []
        assert sum(line.startswith("the state of z cannot be used: ") for line in logged) == 1, "however often it is tried"
        with closing(serving("y", AHEAD)) as holder:  # it is asked after z
            engine.peer_addresses["y"] = holder.address
            recovery(Registry(), None).catch_up(engine, AHEAD)
    assert engine.done == ["fetches round 6 from y"]


def test_an_older_state_of_another_island_is_no_failed_fetch(recovery):
    left = []
    with closing(serving("b", NOW)) as server:
        recovery(Registry(), LeaderLog(), left=left).catch_up(Engine({"b": server.address}), AHEAD)
    assert not left


def test_a_fetched_state_is_passed_on_only_when_no_island_answers_that_confirmed_it(recovery):
    engine, logged = Engine(), []

    class Gone(Registry):
        """The island that confirmed the state answers for three reads."""

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
        recovery(registry, None, logged.append).catch_up(engine, AHEAD)
    assert engine.done == ["fetches round 6 from z"]
    assert registry.reads == 4
    assert "z (0 bytes), which fetched it itself: no island answers that confirmed it" in logged[-1]


def test_a_state_is_fetched_from_an_island_that_confirmed_it(recovery):
    engine = Engine()
    with closing(serving("y", AHEAD)) as committed, closing(serving("z", AHEAD, confirmed=False)) as given:
        engine.peer_addresses = {"y": committed.address, "z": given.address}
        recovery(Registry(), None).catch_up(engine, AHEAD)
    assert engine.done == ["fetches round 6 from y"]


@pytest.mark.parametrize(
    ("go_on", "limit_s"), [("initialize", recovery_module.JOINER_LIMIT_S), ("catch_up", LIMIT_S), ("confirm", LIMIT_S)]
)
def test_without_a_registry_and_a_holder_of_the_state_an_island_ends_with_an_error(recovery, go_on, limit_s):
    registry, engine = Registry(reachable_since_s=math.inf), Engine()
    with closing(serving("b", NOW)) as behind:
        engine.peer_addresses = {"b": behind.address} if go_on != "initialize" else {}
        message = f"a waited {limit_s:.0f} s for an island that has the run's state.* the run's address 127.0.0.1:7000. .*run over"
        with pytest.raises(MembershipLost, match=message):
            go(recovery(registry, None), go_on, engine)
    assert registry.reads == limit_s + 1
    assert engine.done == []


def test_an_island_waits_for_a_holder_that_answers_though_the_registry_is_unreachable(recovery):
    class Gone(Registry):
        def refresh(self):
            super().refresh()
            if self.reads == 30:
                server.close()

    registry, server = Gone(reachable_since_s=math.inf), serving("b", AHEAD, published=False)
    with pytest.raises(MembershipLost):
        recovery(registry, None).catch_up(Engine({"b": server.address}), AHEAD)
    assert registry.reads > 30 + LIMIT_S - 1


def test_a_long_fetch_that_fails_is_no_silence(recovery, monkeypatch):
    registry, server = Registry(reachable_since_s=math.inf), serving("b", AHEAD)

    def fail(*given):
        registry.reads += 2 * int(LIMIT_S)
        server.close()
        raise ExchangeFailed("it sends nothing.")

    monkeypatch.setattr(recovery_module, "fetch_snapshot", fail)
    with pytest.raises(MembershipLost):
        recovery(registry, None).catch_up(Engine({"b": server.address}), AHEAD)
    assert registry.reads > 3 * LIMIT_S


@pytest.mark.parametrize("go_on", ["initialize", "confirm"])
def test_waiting_for_a_state_is_logged(recovery, monkeypatch, go_on):
    logged_once = threading.Event()

    class Slow(Registry):
        def refresh(self):
            assert logged_once.wait(20.0), "it logs nothing while it waits"
            super().refresh()

    monkeypatch.setattr(recovery_module, "log_while_waiting", partial(log_while_waiting, every_s=0.001))
    engine = Engine()
    where_from = recovery(Slow(reachable_since_s=math.inf), None, log=lambda text: logged_once.set())
    with pytest.raises(MembershipLost):
        go(where_from, go_on, engine)
