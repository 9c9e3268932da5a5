"""Meetings over a real lighthouse: wholly or not at all, and never with an older state."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from atoll.engines.elastic import commit as meeting
from atoll.engines.elastic import failure_detector as watching
from atoll.engines.elastic.commit import Absent, Disagreed, LeftBehind, Meetings, Unvouched
from atoll.engines.elastic.membership import CutOff, Membership
from atoll.engines.elastic.rendezvous import Harbour, free_port
from atoll.engines.elastic.snapshot_server import Pier
from atoll.engines.elastic.state_version import Generation, epoch_of
from atoll.engines.wall_clock import ExchangeTimeout

HOST = "127.0.0.1"
NOW = Generation(3, 7)


@pytest.fixture(scope="module", autouse=True)
def _light():
    """An island that leaves collects what it holds: what was here before the tests is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


class Islands:
    """Members of one lighthouse, each driven by a thread of its own."""

    def __init__(self, lighthouse, names):
        self.said, self._lighthouse = [], lighthouse
        self.members, self.meetings, self.piers, self.about = {}, {}, {}, {}
        for name in names:
            self.add(name).join()

    def add(self, name, home=True):
        """An island that can be asked, and has not joined yet."""

        def about():
            self.about.get(name, bool)()
            return {"name": name, "generation": NOW.number, "blames": sorted(self.meetings[name].blames)}

        pier = self.piers[name] = Pier(HOST, about)
        member = Membership(name, HOST, self._lighthouse, pier=pier.address, home=home, limit_s=20.0, say=self.said.append)
        self.members[name] = member
        self.meetings[name] = Meetings(member, ExchangeTimeout(10.0), self.said.append, patience_s=20.0)
        return member

    def hold(self, acts, generations=None, digests=None):
        """Everybody's meeting, or what it raised."""
        generations, digests = generations or {}, digests or {}

        def one(name):
            try:
                return self.meetings[name].hold(generations.get(name, NOW), digests.get(name, 1), acts[name])
            except (LeftBehind, Unvouched, CutOff, Died) as error:
                raised = error.with_traceback(None)  # which would hold its connections open
            self.members[name].leave()
            return raised

        with ThreadPoolExecutor(len(acts)) as pool:
            return dict(zip(acts, pool.map(one, acts), strict=True))

    def close(self):
        for member, pier in zip(self.members.values(), self.piers.values(), strict=True):
            member.leave()
            pier.close()


class Died(Exception):
    """An island is gone."""


@pytest.fixture
def islands():
    """Makes islands, all of one lighthouse: the test's own, since those of the test before would be waited for there."""
    port, made, harbours = free_port(HOST), [], []

    def make(*names):
        if not harbours:
            harbours.append(Harbour(HOST, 0, port, "", join_limit_s=20.0, silent_s=0.8))
        made.append(Islands(f"{HOST}:{port}", names))
        return made[-1]

    yield make
    for one in [*made, *harbours]:
        one.close()


def names_of(wire, names):
    wire.all_gather_numbers(1.0)
    return names


def test_all_who_are_there_meet_in_the_order_of_their_names(islands):
    met = islands("c", "a", "b").hold(dict.fromkeys("abc", names_of))
    assert {name: m.result for name, m in met.items()} == dict.fromkeys("abc", ("a", "b", "c"))
    assert {(m.names, m.behind, m.attempts) for m in met.values()} == {(("a", "b", "c"), (), 1)}
    assert {m.epoch for m in met.values()} == {epoch_of("abc", NOW.epoch + 1)}


def test_whoever_holds_an_older_state_is_left_behind_and_told_so(islands):
    met = islands("a", "b", "c").hold(dict.fromkeys("abc", names_of), {"a": Generation(2, 6), "b": Generation(3, 6)})
    assert met["c"].result == ("c",)
    assert met["c"].behind == ("a", "b")
    assert [type(met[name]) for name in "ab"] == [LeftBehind, LeftBehind]
    assert met["a"].ahead == NOW


def test_of_those_who_differ_the_fewer_take_part_and_are_told_so(islands):
    met = islands("a", "b", "c").hold(dict.fromkeys("abc", names_of), digests={"a": 5})
    assert {(one.names, one.apart, one.epoch) for one in met.values()} == {
        (("a", "b", "c"), ("a",), epoch_of("abc", NOW.epoch + 1))
    }


def test_whoever_was_given_its_state_never_outvotes_one_that_has_committed_it(islands):
    shore = islands("a", "b", "c")
    shore.meetings["a"].vouched = shore.meetings["b"].vouched = False
    met = shore.hold(dict.fromkeys("abc", names_of), digests={"a": 5, "b": 5})
    assert met["c"].names == ("c",)
    assert met["c"].behind == ("a", "b")
    assert "it holds other bits than the others" in str(met["a"])


def test_where_nobody_has_committed_the_state_nobody_goes_on_from_it(islands):
    shore = islands("a", "b")
    for meetings in shore.meetings.values():
        meetings.vouched = False
    assert {type(met) for met in shore.hold(dict.fromkeys("ab", names_of)).values()} == {Unvouched}


def test_of_two_islands_of_one_name_the_later_ends(islands):
    shore, later = islands("a", "b"), islands("a")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(later.hold, {"a": names_of})
        met = shore.hold(dict.fromkeys("ab", names_of))
    assert isinstance(other.result()["a"], CutOff)
    assert "another island is called a too" in str(other.result()["a"])
    assert met["a"].names == met["b"].names == ("a", "b")
    assert met["a"].attempts == 1


def test_when_one_dies_in_the_middle_the_others_meet_again_and_begin_anew(islands):
    shore, begun = islands("a", "b", "c"), []

    def dies(wire, names):
        wire.all_gather_numbers(1.0)
        raise Died

    def goes_on(wire, names):
        begun.append(names)
        wire.all_gather_numbers(1.0)
        flat = torch.ones(300_000)
        wire.reduce_scatter(flat, [1.0] * wire.size)
        wire.all_gather(flat)
        wire.all_gather_numbers(1.0)
        return float(flat[-1])

    met = shore.hold({"a": goes_on, "b": dies, "c": goes_on})
    assert met["a"].names == met["c"].names == ("a", "c")
    assert met["a"].result == met["c"].result == 2.0
    assert met["a"].attempts >= 2
    assert met["a"].epoch == met["c"].epoch > epoch_of("abc", NOW.epoch + 1), "a later attempt has a later epoch"
    assert ("a", "b", "c") in begun
    assert any("has failed, and those who are left meet again" in text for text in shore.said)


def test_what_they_disagree_on_is_done_again(islands):
    tries = []

    def act(wire, names):
        wire.all_gather_numbers(1.0)
        tries.append(names)
        if len(tries) <= 2:
            raise Disagreed("a bit has flipped")
        return len(tries)

    met = islands("a", "b").hold({"a": act, "b": act})
    assert {m.attempts for m in met.values()} == {2}


def test_what_was_sent_in_vain_is_known_when_it_succeeds(islands):
    def act(wire, names):
        wire.all_gather_numbers(1.0)
        if len(tried.setdefault(wire.rank, [])) < 2:
            tried[wire.rank].append(wire.control_bytes)
            raise Disagreed("a bit has flipped")
        return [meetings.wasted_control_bytes for meetings in shore.meetings.values()]

    tried, shore = {}, islands("a", "b")
    met = shore.hold({"a": act, "b": act})
    assert met["a"].attempts == 3
    assert met["a"].result == met["b"].result == [sum(tried[0]), sum(tried[1])]


def test_one_that_dies_after_it_was_found_is_missed_before_anybody_connects_to_it(islands):
    shore = islands("a", "b", "c")

    def dies(name):
        shore.piers[name].close()  # before anybody could ask
        shore.members[name].find(NOW, 0)
        shore.members[name].leave()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(dies, "c")
        met = shore.hold(dict.fromkeys("ab", names_of))
    assert met["a"].names == met["b"].names == ("a", "b")
    assert all("c came to this meeting, and cannot be asked" in text for text in shore.said), "nobody has waited for a connection"


def test_one_that_stops_in_the_middle_is_given_up_though_its_connections_stand(islands, monkeypatch):
    monkeypatch.setattr(meeting, "_SILENT_S", 1.0)
    monkeypatch.setattr(watching, "EVERY_S", 0.05)
    shore, goes_on, stopped = islands("a", "b", "c"), threading.Event(), threading.Event()
    shore.about["c"] = lambda: stopped.is_set() and goes_on.wait(20.0)

    def stops(wire, names):
        shore.members["c"]._server.shutdown()  # whose heartbeats stop with the process
        stopped.set()
        goes_on.wait(20.0)
        raise Died

    with ThreadPoolExecutor(1) as pool:
        pool.submit(shore.hold, {"c": stops})
        met = shore.hold(dict.fromkeys("ab", names_of))
        goes_on.set()
    assert met["a"].names == met["b"].names == ("a", "b")
    assert any("c has not answered for 1 s" in text for text in shore.said)


@pytest.fixture
def hasty(monkeypatch):
    """Islands wait for each other for a moment only."""
    for name in ("_CALL_S", "_CONNECT_S"):
        monkeypatch.setattr(meeting, name, 0.2)


def test_one_that_the_others_cannot_reach_leaves_and_they_go_on(islands, hasty):
    shore = islands("a", "b", "c")
    shore.piers["c"].close()
    met = shore.hold(dict.fromkeys("abc", names_of))
    assert met["a"].names == met["b"].names == ("a", "b")
    assert isinstance(met["c"], CutOff)
    assert "See that all of them reach each other" in str(met["c"])
    assert any(text.startswith("c is left out") for text in shore.said)


@pytest.mark.parametrize(("homes", "leaves"), [({"a": True, "b": False}, "b"), ({"a": False, "b": True}, "a")])
def test_of_two_whose_line_changes_bits_the_one_that_has_the_folder_goes_on(islands, hasty, homes, leaves):
    shore = islands()
    for name, home in homes.items():
        shore.add(name, home).join()

    def act(wire, names):
        wire.all_gather_numbers(1.0)
        if len(names) == 2:
            raise Disagreed("a bit has flipped", [names[1 - wire.rank]])
        return names

    met = shore.hold({"a": act, "b": act})
    assert isinstance(met[leaves], CutOff)
    (stays,) = {"a", "b"} - {leaves}
    assert met[stays].result == (stays,)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_fellow_that_is_alive_is_waited_for_though_the_lighthouse_does_not_know_it(islands, names):
    shore, asked = islands(*names), threading.Event()
    shore.add("c")

    def about():
        asked.set()
        return {"name": "c", "generation": NOW.number}

    with closing(Pier(HOST, about)) as pier, ThreadPoolExecutor(3) as pool:
        for name in names:
            shore.meetings[name].fellows = {"c": pier.address}
        early = [pool.submit(shore.meetings[name].hold, NOW, 1, names_of) for name in names]
        assert asked.wait(20.0), "it was never asked"
        shore.members["c"].join()
        late = shore.meetings["c"].hold(NOW, 1, names_of)
        met = [late, *(one.result() for one in early)]
    assert {one.names for one in met} == {(*names, "c")}
    assert {one.attempts for one in met} == {1}, "nothing has failed"
    assert shore.said == []


def test_fellows_that_are_missed_are_asked_all_at_once_and_have_as_long_as_whoever_was_found(monkeypatch):
    monkeypatch.setattr(meeting, "_CALL_S", 20.0)
    together = threading.Barrier(2)

    def about(name):
        together.wait(10.0)  # nobody answers before the other was asked too
        return {"name": name, "generation": NOW.number}

    alone = Meetings(None, ExchangeTimeout(10.0), bool, patience_s=20.0)
    with closing(Pier(HOST, lambda: about("b"))) as b, closing(Pier(HOST, lambda: about("c"))) as c:
        alone.fellows = {"b": b.address, "c": c.address}
        with pytest.raises(Absent, match="b is alive and has not come"):
            alone._look_for_fellows(NOW, ["a"], time.monotonic())


@pytest.mark.parametrize("said", [None, {"name": "other", "generation": NOW.number}, {"name": "b", "generation": 0}])
def test_a_fellow_that_is_dead_another_or_behind_is_not_waited_for(islands, said):
    shore = islands("a")
    pier = Pier(HOST, lambda: said)
    if said is None:
        pier.close()
    shore.meetings["a"].fellows = {"b": pier.address}
    assert shore.meetings["a"].hold(NOW, 1, names_of).names == ("a",)
    if said is not None:
        pier.close()


@pytest.mark.parametrize("patience_s", [20.0, 0.0])
def test_of_a_fellow_that_is_alive_and_ahead_the_state_is_needed_though_the_lighthouse_does_not_know_it(islands, patience_s):
    shore, ahead = islands("a"), Generation(4, 1)
    with closing(Pier(HOST, lambda: {"name": "b", "generation": ahead.number})) as pier:
        shore.meetings["a"].fellows, shore.meetings["a"]._patience_s = {"b": pier.address}, patience_s
        left = shore.hold({"a": names_of})["a"]
    assert isinstance(left, LeftBehind)
    assert left.ahead == ahead


def test_without_a_lighthouse_it_is_said_how_long_it_was_waited_for():
    nowhere = f"{HOST}:{free_port(HOST)}"
    member = Membership("a", HOST, nowhere, pier=f"{HOST}:1", home=True, limit_s=0.1, say=lambda text: None)
    with pytest.raises(CutOff, match=r"a waited 0 s for the lighthouse at 127\.0\.0\.1"):
        member.join()
