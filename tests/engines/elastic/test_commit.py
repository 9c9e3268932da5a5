"""The commit protocol over a real lighthouse: all members of a quorum commit or none, and never from an older state."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from atoll.engines.elastic import commit as commit_module, quorum_monitor
from atoll.engines.elastic.aggregation import Disagreement, Proposal
from atoll.engines.elastic.commit import CommitProtocol, MemberMissing, StaleState, UnconfirmedState
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway_client import GatewayNetwork
from atoll.engines.elastic.membership import Membership, MembershipLost
from atoll.engines.elastic.quorum import process_name
from atoll.engines.elastic.rendezvous import Rendezvous
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, SnapshotServer
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.elastic.state_version import StateVersion, attempt_epoch
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.network_interfaces import free_port

HOST = "127.0.0.1"
NOW = StateVersion(3, 7)


@pytest.fixture(scope="module", autouse=True)
def _light():
    """An island that leaves collects garbage: objects from before the tests are not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def reported(name, version=NOW):
    return IslandStatus(name, True, phase=IslandPhase.JOINED, version=version).to_json()


def proposes(act, version=NOW, digest=1):
    """A proposal whose delta is a function of these tests."""
    return Proposal(version, digest, None, act)


def exchange_with(collectives, states, proposal):
    if proposal.tree is votes_and_misses_the_others:
        proposal.before_vote()
    return proposal.tree(collectives, collectives.names)


class Islands:
    """Members of one lighthouse, each driven by a thread of its own."""

    def __init__(self, lighthouse, names, sockets=False, cut=()):
        """With `cut`, the two islands of this pair cannot dial each other."""
        self.logged, self._lighthouse, self._sockets, self._cut = [], lighthouse, sockets, cut
        self.ended, self.silent = set(), set()
        self.members, self.protocols, self.servers, self.statuses, self.before_status = {}, {}, {}, {}, {}
        for name in names:
            self.add(name).join()

    def add(self, name, has_folder=True):
        """An island that can be queried, and has not joined yet."""
        status = self.statuses[name] = IslandStatus(name, has_folder, process=f"{name}#1.0")

        def answer():
            self.before_status.get(name, bool)()
            if name in self.silent:
                raise OSError("it answers nothing, as beyond a cut link")
            return {**replace(status, phase=IslandPhase.JOINED, version=NOW).to_json(), "member": status.member}

        def dial(address, limit_s):
            if any(name in self._cut and other in self._cut and address == self.statuses[other].address for other in self._cut):
                raise TimeoutError("timed out")
            return DirectNetwork(HOST).dial(address, limit_s)

        network = DirectNetwork(HOST, lighthouse=self._lighthouse)
        network.dial = dial
        server = self.servers[name] = SnapshotServer(HOST, answer, network=network)
        status.address = server.address
        member = self.members[name] = Membership(
            status, network, 20.0, self.logged.append, server, lambda: self.ended, sockets=self._sockets
        )
        self.protocols[name] = CommitProtocol(
            member, exchange_with, status, ExchangeTimeout(10.0), self.logged.append, patience_s=20.0
        )
        return member

    def commit(self, acts, versions=None, digests=None):
        """Every island's commit, or what it raised."""
        versions, digests = versions or {}, digests or {}

        def one(name):
            try:
                return self.protocols[name].commit(proposes(acts[name], versions.get(name, NOW), digests.get(name, 1)))
            except (StaleState, UnconfirmedState, MembershipLost, Died) as error:
                raised = error.with_traceback(None)  # which would hold its connections open
            self.members[name].leave()
            return raised

        with ThreadPoolExecutor(len(acts)) as pool:
            return dict(zip(acts, pool.map(one, acts), strict=True))

    def close(self):
        for member, server in zip(self.members.values(), self.servers.values(), strict=True):
            member.leave()
            server.close()

    def wait_until_it_waits(self, name):
        """Return what an island that does not commit waits for."""
        deadline_s = time.monotonic() + 20.0
        while not self.statuses[name].waiting:
            assert time.monotonic() < deadline_s, self.logged
            threading.Event().wait(0.01)
        return self.statuses[name].waiting


class Died(Exception):
    """An island died."""


@pytest.fixture
def islands():
    """Makes islands of one lighthouse. Each test has its own, which does not wait for the islands of the test before."""
    port, made, rendezvous = free_port(HOST), [], []

    def make(*names, **options):
        if not rendezvous:
            spec = Elastic(quorum_timeout_s=20.0, heartbeat_timeout_s=0.8)
            rendezvous.append(Rendezvous(JoinInfo(None, spec, f"{HOST}:{port}"), f"{HOST}:0"))
        made.append(Islands(f"{HOST}:{port}", names, **options))
        return made[-1]

    yield make
    for one in [*made, *rendezvous]:
        one.close()


def names_of(collectives, names):
    collectives.all_gather_numbers(1.0)
    return names


def test_live_islands_commit_in_the_order_of_their_names(islands):
    commits = islands("c", "a", "b").commit(dict.fromkeys("abc", names_of))
    assert {name: m.result for name, m in commits.items()} == dict.fromkeys("abc", ("a", "b", "c"))
    assert {(m.names, m.attempts) for m in commits.values()} == {(("a", "b", "c"), 1)}
    assert {m.epoch for m in commits.values()} == {attempt_epoch("abc", NOW.epoch + 1)}


def test_an_island_with_an_older_state_is_left_out_and_raises_stale_state(islands):
    commits = islands("a", "b", "c").commit(dict.fromkeys("abc", names_of), {"a": StateVersion(2, 6), "b": StateVersion(3, 6)})
    assert commits["c"].result == ("c",)
    assert [type(commits[name]) for name in "ab"] == [StaleState, StaleState]
    assert commits["a"].version == NOW


def test_a_minority_of_other_bits_takes_part_and_is_named_as_diverged(islands):
    commits = islands("a", "b", "c").commit(dict.fromkeys("abc", names_of), digests={"a": 5})
    assert {(one.names, one.diverged, one.epoch) for one in commits.values()} == {
        (("a", "b", "c"), ("a",), attempt_epoch("abc", NOW.epoch + 1))
    }


def test_islands_that_fetched_their_state_never_outvote_one_that_confirmed_it(islands):
    group = islands("a", "b", "c")
    group.statuses["a"].confirmed = group.statuses["b"].confirmed = False
    commits = group.commit(dict.fromkeys("abc", names_of), digests={"a": 5, "b": 5})
    assert commits["c"].names == ("c",)
    assert "its bits differ from the other islands'" in str(commits["a"])


def test_no_island_continues_from_a_state_that_none_has_confirmed(islands):
    group = islands("a", "b")
    for status in group.statuses.values():
        status.confirmed = False
    assert {type(commits) for commits in group.commit(dict.fromkeys("ab", names_of)).values()} == {UnconfirmedState}


def test_of_two_islands_of_one_name_the_later_ends(islands):
    group, later = islands("a", "b"), islands("a")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(later.commit, {"a": names_of})
        commits = group.commit(dict.fromkeys("ab", names_of))
    assert isinstance(other.result()["a"], MembershipLost)
    assert "another island is called a too" in str(other.result()["a"])
    assert commits["a"].names == commits["b"].names == ("a", "b")
    assert commits["a"].attempts == 1


def test_when_a_member_dies_in_an_exchange_the_survivors_repeat_it_in_a_later_epoch(islands):
    group, begun = islands("a", "b", "c"), []

    def dies(collectives, names):
        collectives.all_gather_numbers(1.0)
        raise Died

    def goes_on(collectives, names):
        begun.append(names)
        collectives.all_gather_numbers(1.0)
        flat = torch.ones(300_000)
        collectives.reduce_scatter(flat, [1.0] * collectives.size)
        collectives.all_gather(flat)
        collectives.all_gather_numbers(1.0)
        return float(flat[-1])

    commits = group.commit({"a": goes_on, "b": dies, "c": goes_on})
    assert commits["a"].names == commits["c"].names == ("a", "c")
    assert commits["a"].result == commits["c"].result == 2.0
    assert commits["a"].attempts >= 2
    assert commits["a"].epoch == commits["c"].epoch > attempt_epoch("abc", NOW.epoch + 1), "a later attempt has a later epoch"
    assert ("a", "b", "c") in begun
    assert any("has failed, and the survivors try again" in text for text in group.logged)


def test_an_exchange_without_agreement_is_repeated(islands):
    tries = []

    def act(collectives, names):
        collectives.all_gather_numbers(1.0)
        tries.append(names)
        if len(tries) <= 2:
            raise Disagreement("a bit has flipped")
        return len(tries)

    commits = islands("a", "b").commit({"a": act, "b": act})
    assert {m.attempts for m in commits.values()} == {2}


def test_bytes_of_failed_attempts_are_counted(islands):
    def act(collectives, names):
        collectives.all_gather_numbers(1.0)
        sent = tried.setdefault(collectives.rank, [])
        sent.append(collectives.control_bytes)
        if len(sent) < 3:
            raise Disagreement("a bit has flipped")

    tried, group = {}, islands("a", "b")
    commits = group.commit({"a": act, "b": act})
    assert commits["a"].attempts == 3
    assert tried[0] == tried[1] == [tried[0][0] * number for number in (1, 2, 3)]


def test_a_member_that_dies_before_connecting_is_found_by_a_query(islands):
    group = islands("a", "b", "c")

    def dies(name):
        group.servers[name].close()  # before a query
        group.members[name].form_quorum(NOW, 0)
        group.members[name].leave()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(dies, "c")
        commits = group.commit(dict.fromkeys("ab", names_of))
    assert commits["a"].names == commits["b"].names == ("a", "b")
    assert all("c joined this quorum and does not answer" in text for text in group.logged), "no member has waited for a connection"


def test_a_stopped_member_is_given_up_though_its_connections_stand(islands, monkeypatch):
    monkeypatch.setattr(commit_module, "SILENT_S", 1.0)
    monkeypatch.setattr(quorum_monitor, "PROBE_S", 0.05)
    group, goes_on, stopped = islands("a", "b", "c"), threading.Event(), threading.Event()
    group.before_status["c"] = lambda: stopped.is_set() and goes_on.wait(20.0)

    def stops(collectives, names):
        group.members["c"]._server.shutdown()  # whose heartbeats stop with the process
        stopped.set()
        goes_on.wait(20.0)
        raise Died

    with ThreadPoolExecutor(1) as pool:
        pool.submit(group.commit, {"c": stops})
        commits = group.commit(dict.fromkeys("ab", names_of))
        goes_on.set()
    assert commits["a"].names == commits["b"].names == ("a", "b")
    assert any("c has not answered for 1 s" in text for text in group.logged)


@pytest.fixture
def short_limits(monkeypatch):
    """Islands wait for each other for 0.2 s."""
    for name in ("QUERY_S", "_CONNECT_S"):
        monkeypatch.setattr(commit_module, name, 0.2)


def test_an_unreachable_member_is_evicted_and_the_others_commit(islands, short_limits):
    group = islands("a", "b", "c")
    group.servers["c"].close()
    commits = group.commit(dict.fromkeys("abc", names_of))
    assert commits["a"].names == commits["b"].names == ("a", "b")
    assert isinstance(commits["c"], MembershipLost)
    assert "Check that all of them reach each other" in str(commits["c"])
    assert any(text.startswith("c is evicted") for text in group.logged)


@pytest.mark.parametrize(("folders", "leaves"), [({"a": True, "b": False}, "b"), ({"a": False, "b": True}, "a")])
def test_of_two_islands_with_a_damaging_link_the_one_with_the_folder_stays(islands, short_limits, folders, leaves):
    group = islands()
    for name, has_folder in folders.items():
        group.add(name, has_folder).join()

    def act(collectives, names):
        collectives.all_gather_numbers(1.0)
        if len(names) == 2:
            raise Disagreement("a bit has flipped", [names[1 - collectives.rank]])
        return names

    commits = group.commit({"a": act, "b": act})
    assert isinstance(commits[leaves], MembershipLost)
    (stays,) = {"a", "b"} - {leaves}
    assert commits[stays].result == (stays,)


@pytest.mark.parametrize(("first", "leads"), [("island-0000", "island-0000"), ("box", "aaa")])
def test_a_joiner_that_claims_the_runs_folder_leads_no_quorum_with_an_island_of_the_run(islands, first, leads):
    """Of two equal halves of a partition the one with the leader goes on. A copy of the folder counts where nothing else does."""
    group = islands("aaa", first)
    for member in group.members.values():
        member.network.accepts_folder = partial(GatewayNetwork.accepts_folder, member.network)
    commits = group.commit(dict.fromkeys(("aaa", first), names_of))
    assert {process_name(one.quorum.leader.partition("@")[0]) for one in commits.values()} == {leads}
    commits = group.commit(dict.fromkeys(("aaa", first), names_of), digests={"aaa": 7})
    assert {one.diverged for one in commits.values()} == {("aaa",) if leads == first else (first,)}, "on a tie, too"


@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_quorum_waits_for_a_live_peer_that_the_lighthouse_does_not_know(islands, names):
    group, asked = islands(*names), threading.Event()
    group.add("c")

    def status():
        asked.set()
        return reported("c")

    with closing(SnapshotServer(HOST, status)) as server, ThreadPoolExecutor(3) as pool:
        for name in names:
            group.protocols[name].peers = {"c": server.address}
        early = [pool.submit(group.protocols[name].commit, proposes(names_of)) for name in names]
        assert asked.wait(20.0), "it was never asked"
        group.members["c"].join()
        late = group.protocols["c"].commit(proposes(names_of))
        commits = [late, *(one.result() for one in early)]
    assert {one.names for one in commits} == {(*names, "c")}
    assert {one.attempts for one in commits} == {1}, "nothing has failed"
    assert group.logged == []


def test_missing_peers_are_queried_in_parallel(monkeypatch):
    monkeypatch.setattr(commit_module, "QUERY_S", 20.0)
    together = threading.Barrier(2)

    def status(name):
        together.wait(10.0)  # both are queried before either answers
        return reported(name)

    alone = CommitProtocol(SimpleNamespace(network=DirectNetwork("")), None, None, ExchangeTimeout(10.0), bool, patience_s=20.0)
    with closing(SnapshotServer(HOST, lambda: status("b"))) as b, closing(SnapshotServer(HOST, lambda: status("c"))) as c:
        alone.peers = {"b": b.address, "c": c.address}
        with pytest.raises(MemberMissing, match="b is alive and not in"):
            alone._check_missing_peers(NOW, ["a"], time.monotonic(), 20.0)


@pytest.mark.parametrize("answer", [None, reported("other"), reported("b", StateVersion(0, 0)), {"name": "b"}])
def test_the_quorum_does_not_wait_for_a_peer_that_is_dead_or_replaced_or_behind(islands, answer):
    group = islands("a")
    server = SnapshotServer(HOST, lambda: answer)
    if answer is None:
        server.close()
    group.protocols["a"].peers = {"b": server.address}
    assert group.protocols["a"].commit(proposes(names_of)).names == ("a",)
    if answer is not None:
        server.close()


@pytest.mark.parametrize("patience_s", [20.0, 0.0])
def test_a_live_peer_that_is_ahead_makes_the_state_stale_though_the_lighthouse_does_not_know_it(islands, patience_s):
    group, ahead = islands("a"), StateVersion(4, 1)
    with closing(SnapshotServer(HOST, lambda: reported("b", ahead))) as server:
        group.protocols["a"].peers, group.protocols["a"]._patience_s = {"b": server.address}, patience_s
        left = group.commit({"a": names_of})["a"]
    assert isinstance(left, StaleState)
    assert left.version == ahead


def transports_of(collectives, names):
    collectives.all_gather_numbers(1.0)
    return type(collectives._transport).__name__


def test_islands_commit_over_sockets_of_their_own_and_keep_them(islands):
    group = islands("a", "b", "c", sockets=True)
    first = group.commit(dict.fromkeys("abc", transports_of))
    connected = {name: member._group for name, member in group.members.items()}
    second = group.commit(dict.fromkeys("abc", transports_of))
    for commits in (first, second):
        assert {(one.result, one.names, one.attempts) for one in commits.values()} == {("SocketGroup", ("a", "b", "c"), 1)}
    assert all(member._group is connected[name] for name, member in group.members.items())


def test_when_a_member_dies_in_an_exchange_over_sockets_the_survivors_repeat_it(islands):
    group = islands("a", "b", "c", sockets=True)

    def dies(collectives, names):
        raise Died

    commits = group.commit({"a": names_of, "b": names_of, "c": dies})
    assert commits["a"].names == commits["b"].names == ("a", "b")
    assert isinstance(commits["c"], Died)


def test_a_silent_member_over_sockets_is_given_up_by_the_monitor(islands, short_limits, monkeypatch):
    monkeypatch.setattr(quorum_monitor, "PROBE_S", 0.05)
    group, over = islands("a", "b", sockets=True), threading.Event()

    def stops(collectives, names):
        group.before_status["b"] = lambda: over.wait(20.0)
        over.wait(20.0)
        raise Died

    def sums(collectives, names):
        try:
            return names_of(collectives, names)
        finally:
            group.members["b"].leave()
            over.set()

    commits = group.commit({"a": sums, "b": stops})
    assert commits["a"].names == ("a",)
    assert any("b has not answered for" in text for text in group.logged)


@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("cut", ["ab", "bc", "ac"])
def test_members_that_cannot_reach_each_other_commit_through_a_third(islands, monkeypatch, cut, sockets):
    """gloo connects every pair, and so none here: the third member's attempt with it ends when the others wait for sockets."""
    monkeypatch.setattr(commit_module, "_CONNECT_S", 1.0)
    group = islands("a", "b", "c", sockets=sockets, cut=cut)
    commits = group.commit(dict.fromkeys("abc", transports_of))
    assert {(one.names, one.result) for one in commits.values()} == {(("a", "b", "c"), "SocketGroup")}
    assert {one.attempts for one in commits.values()} == {1}, group.logged
    again = group.commit(dict.fromkeys("abc", transports_of))
    assert {one.attempts for one in again.values()} == {1}


# -------------------------------------------------------------------------------------------------------------- partitions

NEXT = StateVersion(4, 1000)


@pytest.fixture
def divided(islands):
    """Makes islands that have committed together, of which only some are left, unknown to whom the others are gone."""

    def make(together, left):
        group = islands(*together)
        assert {one.names for one in group.commit(dict.fromkeys(together, names_of)).values()} == {tuple(together)}
        for name in {*together} - {*left}:
            group.members[name].leave()
            group.silent |= {name}
        return group

    return make


@pytest.mark.parametrize(("together", "left"), [("ab", "a"), ("abc", "bc"), ("abcd", "ab"), ("abcd", "bcd")])
def test_the_majority_of_the_last_quorum_goes_on_and_of_two_halves_the_one_with_the_leader(divided, together, left):
    commits = divided(together, left).commit(dict.fromkeys(left, names_of), dict.fromkeys(left, NEXT))
    assert {one.names for one in commits.values()} == {tuple(left)}


@pytest.mark.parametrize(("together", "left", "ended"), [("ab", "b", "a"), ("abc", "c", "b"), ("abcd", "cd", "a")])
def test_a_minority_waits_until_enough_of_the_others_are_reported_to_have_ended(divided, together, left, ended):
    group = divided(together, left)
    with ThreadPoolExecutor(1) as pool:
        commits = pool.submit(group.commit, dict.fromkeys(left, names_of), dict.fromkeys(left, NEXT))
        for name in left:
            assert "took part in the last commit and cannot be reached" in group.wait_until_it_waits(name)
        assert not commits.done()
        group.ended |= {f"{ended}#1"}
        if len(together) - 1 < 2 * len(left):
            assert {one.names for one in commits.result(20.0).values()} == {tuple(left)}
            assert {group.statuses[name].waiting for name in left} == {""}
            return
        group.wait_until_it_waits(left[0])
        assert not commits.done(), "one of two is not the leader"
        group.ended |= {f"{name}#1" for name in {*together} - {*left}}
        assert {one.names for one in commits.result(20.0).values()} == {tuple(left)}


def test_a_member_on_this_machine_whose_address_refuses_connections_has_ended(divided):
    group = divided("abc", "c")
    with ThreadPoolExecutor(1) as pool:
        commits = pool.submit(group.commit, {"c": names_of}, {"c": NEXT})
        group.wait_until_it_waits("c")
        for name in "ab":
            group.servers[name].close()
        assert commits.result(20.0)["c"].names == ("c",)


def test_a_new_process_of_a_member_does_not_count_as_the_member(divided):
    group = divided("ab", "b")
    group.members["b"].leave()
    group.statuses["b"].process = "b#2.0"
    group.members["b"].join()
    group.protocols["b"].last_quorum = group.protocols["b"].last_quorum._replace(
        leader=group.protocols["b"].last_quorum.processes[1]
    )
    group.ended = {"b#1"}
    with ThreadPoolExecutor(1) as pool:
        commits = pool.submit(group.commit, {"b": names_of}, {"b": NEXT})
        assert "a took part in the last commit" in group.wait_until_it_waits("b")
        group.ended |= {"a#1"}
        assert commits.result(20.0)["b"].names == ("b",)


def test_a_minority_that_waits_catches_up_when_the_partition_heals(divided):
    group = divided("abc", "c")
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(group.commit, {"c": names_of}, {"c": NEXT})
        group.wait_until_it_waits("c")
        group.silent = {"b"}
        group.members["a"].join()
        ahead = pool.submit(group.commit, {"a": names_of}, {"a": StateVersion(9, 2000)})
        stale = waits.result(20.0)["c"]
        assert isinstance(stale, StaleState)
        assert (stale.version, stale.holders) == (StateVersion(9, 2000), (f"a#1.0@{group.statuses['a'].address}",))
        group.ended = {"b#1", "c#1"}
        assert ahead.result(20.0)["a"].names == ("a",)


def votes_and_misses_the_others(collectives, names):
    collectives.all_gather_numbers(1.0)
    if names == ("a", "b"):
        raise Disagreement("it received not all votes", [])
    return names


def test_an_island_that_voted_goes_on_only_if_the_other_voters_could_not_have(divided):
    group = divided("abc", "ab")
    versions = dict.fromkeys("abc", NEXT)
    with ThreadPoolExecutor(3) as pool:
        committed = pool.submit(group.protocols["a"].commit, proposes(names_of, NEXT))
        doubts = pool.submit(group.commit, {"b": votes_and_misses_the_others}, versions)
        assert committed.result(20.0).names == ("a", "b")  # it received all votes, and may go on alone: it leads
        group.members["a"].leave()
        group.silent = {"a"}
        group.members["c"].join()
        waits = pool.submit(group.commit, {"c": names_of}, versions)
        assert "a took part in the last commit" in group.wait_until_it_waits("b"), "two of three would be a majority"
        group.ended = {"a#1"}
        assert {one.result(20.0)[name].names for one, name in ((doubts, "b"), (waits, "c"))} == {("b", "c")}
