"""Quorums leave out what is no island of the run, and the lighthouse kills no island. The quorum monitor: a member that answers is
alive, however late; a silent one aborts the exchange, so that no member waits. And the rule of who may go on in a partition: at
most one side, whatever the sides know."""

import http.client
import itertools
import json
import random
import socket
import subprocess
import sys
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from atoll.core.errors import ConfigError
from atoll.engines.elastic import quorum_monitor
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway_client import GatewayClient, GatewayNetwork
from atoll.engines.elastic.membership import Membership, MembershipLost
from atoll.engines.elastic.quorum import LastQuorum, Member
from atoll.engines.elastic.quorum_monitor import QuorumMonitor
from atoll.engines.elastic.rendezvous import Rendezvous
from atoll.engines.elastic.snapshot_server import IslandStatus, SnapshotServer, query_islands
from atoll.engines.elastic.spec import Elastic, JoinInfo, island_name
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.network_interfaces import free_port

HOST = "127.0.0.1"


class Group:
    """Knows when it was aborted."""

    def __init__(self):
        self.aborted = threading.Event()

    def recv(self, tensors, rank, tag):
        assert (rank, tag) == (1, 1), "from the silent member: another may have closed its connection"
        return self

    def wait(self, limit):
        self.aborted.set()
        raise RuntimeError("timed out")


@pytest.fixture(autouse=True)
def fast_probes(monkeypatch):
    monkeypatch.setattr(quorum_monitor, "PROBE_S", 0.01)


def monitor(address, group, silent_s=0.2):
    return QuorumMonitor({1: Member("b", address, True, 0.0)}, group, silent_s)


def test_a_member_that_accepts_and_does_not_answer_fails_and_is_named():
    group = Group()
    with socket.create_server((HOST, 0)) as silent, monitor(f"{HOST}:{silent.getsockname()[1]}", group) as one:
        assert group.aborted.wait(20.0)
    assert one.failed == "b"


def test_another_process_on_a_members_port_is_not_taken_for_it():
    group = Group()
    with closing(SnapshotServer(HOST, IslandStatus("another", True).to_json)) as server, monitor(server.address, group) as one:
        assert group.aborted.wait(20.0)
    assert one.failed == "b"


def test_a_member_that_answers_is_probed_again_and_again():
    probes, group = [], Group()
    enough = threading.Event()

    def status():
        probes.append(1)
        if len(probes) == 40:
            enough.set()
        return IslandStatus("b", True).to_json()

    server = SnapshotServer(HOST, status)
    with monitor(server.address, group, silent_s=20.0) as one:
        assert enough.wait(20.0)
    assert one.failed is None
    assert not group.aborted.is_set()
    server.close()


def test_no_member_fails_after_the_exchange():
    group = Group()
    with monitor(f"{HOST}:1", group) as one:
        pass
    one._fail(1, Member("b", "", True, 0.0))
    assert one.failed is None
    assert not group.aborted.is_set()


def test_an_ignored_member_may_be_silent_and_a_participant_may_not():
    group = Group()
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        members = {0: Member("a", f"{HOST}:1", True, 0.0), 1: Member("b", address, True, 0.0)}
        with QuorumMonitor(members, group, silent_s=0.2) as one:
            one.ignore([0])
            one._fail(0, members[0])
            assert one.failed is None
            assert group.aborted.wait(20.0)
    assert one.failed == "b"


def test_each_silent_member_aborts_the_exchange():
    group = Group()
    with QuorumMonitor({}, group, silent_s=0.2) as one:
        one.failed = "a"  # which has closed its connection, so that its abort had no effect
        one._fail(1, Member("b", "", True, 0.0))
    assert group.aborted.is_set()
    assert one.failed == "a"


def test_without_a_lighthouse_an_island_ends_and_says_how_long_it_waited():
    nowhere = f"{HOST}:{free_port(HOST)}"
    member = Membership(IslandStatus("a", True, f"{HOST}:1"), DirectNetwork(HOST, lighthouse=nowhere), 0.1, lambda text: None)
    with pytest.raises(MembershipLost, match=r"a waited 0 s for the lighthouse at 127\.0\.0\.1"):
        member.join()


@pytest.fixture
def quorum():
    """Islands a and b of one run, which have joined, and their lighthouse's address."""
    lighthouse = f"{HOST}:{free_port(HOST)}"
    info = JoinInfo(None, Elastic(quorum_timeout_s=1.0, heartbeat_timeout_s=0.8), lighthouse)
    rendezvous, logged = Rendezvous(info, f"{HOST}:0"), []
    network = DirectNetwork(HOST, lighthouse=lighthouse, run_id="run-1")
    members = [Membership(IslandStatus(name, True, f"{HOST}:1"), network, 10.0, logged.append) for name in "ab"]
    for member in members:
        member.join()
    yield SimpleNamespace(members=members, lighthouse=lighthouse, logged=logged)
    for member in members:
        member.leave()
    rendezvous.close()


def form(members):
    with ThreadPoolExecutor(len(members)) as pool:
        return [*pool.map(lambda member: member.form_quorum(StateVersion(0, 1), 0), members)]


@contextmanager
def stranger(lighthouse, name, bind=f"{HOST}:0"):
    """A process that the lighthouse takes for a member, and that claims to listen on 127.0.0.1. Gives a function that asks for a
    quorum, and returns the ids in it."""
    coordination = pytest.importorskip("torchft.coordination")
    second = timedelta(seconds=5)
    server = coordination.ManagerServer(name, f"http://{lighthouse}", HOST, bind, "", 1, second / 50, second, 0)
    own = f"http://{bind.partition(':')[0]}:{server.address().rpartition(':')[2]}"
    client = coordination.ManagerClient(own, connect_timeout=second)
    asked = {"group_rank": 0, "step": 1 << 60, "checkpoint_metadata": "", "shrink_only": False, "commit_failures": 0}
    try:
        yield lambda: client._quorum(**asked, timeout=second, init_sync=False).replica_ids
    finally:
        server.shutdown()


BAD_ADDRESSES = [
    "",
    "x",
    "x:0",
    ":1",
    f"{'a' * 64}:1",
    f"{HOST}:{'9' * 5000}",
    f"{HOST}:65536",
    f"{HOST}:\u00b2",
    "island:",
    "\udcff:1",
]


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "A:1",
        "",
        "a" * 500,
        "c:127.0.0.1:1:folder:1.0:5:run-2:c#1",
        "c:127.0.0.1:1:folder:inf:5:run-1:c#1",
        f"c:{'a' * 64}:1:folder:1.0:5:run-1:c#1",
        f"c:127.0.0.1:{'9' * 5000}:folder:1.0:5:run-1:c#1",
        "c:127.0.0.1:1:folder:1.0:65536:run-1:c#1",
    ],
    ids=lambda name: name[:60],
)
def test_an_id_that_is_no_island_of_the_run_is_ignored_with_one_line(quorum, name):
    with stranger(quorum.lighthouse, name) as ask, ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            asked = pool.submit(ask)
            found = form(quorum.members)
            assert name in asked.result(), "it is in the lighthouse's quorum"
            assert [one.names for one in found] == [("a", "b")] * 2
            assert [one.rank for one in found] == [0, 1]
            assert len({one.store for one in found}) == 1
            for member in quorum.members:
                member.abort()
    lines = [text for text in quorum.logged if text.startswith("ignores")]
    assert len(lines) == 2, "one for each island"


@pytest.fixture
def first_machine():
    """Islands of the machine with a run's gateway, which have joined, and their lighthouse. They reach each other on loopback, and
    nothing through the gateway, which does not exist."""
    lighthouse = f"{HOST}:{free_port(HOST)}"
    rendezvous, logged = Rendezvous(JoinInfo(None, Elastic(quorum_timeout_s=60.0), lighthouse), f"{HOST}:0"), []
    with ExitStack() as stack:
        stack.callback(rendezvous.close)
        members = []
        for name in map(island_name, range(2)):
            client, servers = GatewayClient(lambda: None, [f"{HOST}:1"], name), {"registry": f"{HOST}:1", "lighthouse": lighthouse}
            network = GatewayNetwork(client, "run-1", **servers, islands=2, refused=pytest.fail)
            status = IslandStatus(name, True, run="run-1", process=f"{name}#1.0")
            server = stack.enter_context(closing(SnapshotServer(HOST, status.to_json, network=network)))
            status.address = network.address_of(server.port)
            members.append(Membership(status, network, 10.0, logged.append))
            members[-1].join()
            stack.callback(members[-1].leave)

        def ignores(name):
            return any(text.startswith("ignores") and name[:60] in text for text in logged)

        yield SimpleNamespace(members=members, lighthouse=lighthouse, ignores=ignores)


def posing(first_machine, address):
    """The id of a member that claims the name of the first island, and to have joined long before it."""
    own = Member.from_replica_id(first_machine.members[0]._own_id)
    return replace(own, joined_s=0.0, address=address.format(port=own.address.rpartition(":")[2])).to_replica_id()


@pytest.mark.parametrize(
    "address",
    ["island:evil", "island:island-0000", f"{HOST}:1", "island:island-0000:1", "island:island-0000:{port}"],
    ids=["its own", "through the gateway", "dialled", "another port", "the island's"],
)
def test_a_member_that_poses_as_an_island_of_the_first_machine_ends_no_island_and_gets_no_place(first_machine, address):
    """With the process id of that island, too: the lighthouse tells it to all members."""
    name = posing(first_machine, address)
    with stranger(first_machine.lighthouse, name) as ask, ThreadPoolExecutor(1) as pool:
        asked, quorums = pool.submit(ask), form(first_machine.members)
        while not first_machine.ignores(name) and quorums[0].find_duplicate() is None:  # it may ask after them at first
            quorums = form(first_machine.members)
        assert name in asked.result(), "it is in the lighthouse's quorum"
    assert [{*one.names} for one in quorums] == [{"island-0000", "island-0001"}] * 2
    assert all(quorum.find_duplicate() is None for quorum in quorums)
    assert quorums[0].key == quorums[1].key
    assert first_machine.ignores(name)


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=lambda address: ascii(address)[:40])
def test_no_address_that_another_process_sends_ends_an_island(address):
    network = DirectNetwork(HOST, run_id="run-1")
    client, port = GatewayClient(lambda: None, [f"{HOST}:1"], "a"), address.rpartition(":")[2]
    local = GatewayNetwork(client, "run-1", registry=f"{HOST}:1", islands=1, refused=pytest.fail)
    for reached, where in ((network, address), (local, f"island:island-0000:{port}"), (local, f"island:{address}")):
        with pytest.raises(OSError):  # noqa: PT011 (an address that is none, or whose host is unknown)
            reached.dial(where, 0.1).close()
        assert query_islands({"x": where}, 0.1, reached) == {}
    for standby in (f"{address} {HOST}:1", f"{HOST}:1 {address}", f"{HOST}:1,{address} {HOST}:1"):
        with pytest.raises(ConfigError):
            network.place(standby)
    assert Member.from_replica_id(f"b:{address}:folder:1.0:5:run-1:b#1") is None
    status = IslandStatus("b", True, address, run="run-1")
    assert IslandStatus.from_text(json.dumps(status.to_json()).encode()) == (None if address else status)


def kill(lighthouse, replica_id):
    """The status with which the lighthouse answers the button on torchft's web page that ends the process of a manager."""
    host, _, port = lighthouse.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("POST", f"/replica/{urllib.parse.quote(replica_id, safe='')}/kill")
        with connection.getresponse() as answer:
            return answer.status


@pytest.mark.slow  # the lighthouse tries for 12 s to reach each manager
def test_the_lighthouses_kill_route_kills_no_island(quorum):
    """The managers of these islands are in this process."""
    form(quorum.members)
    with ThreadPoolExecutor(2) as pool:
        killed = [*pool.map(lambda member: kill(quorum.lighthouse, member._own_id), quorum.members)]
    assert killed == [500, 500], "it found the replica, and could not reach it"
    assert form(quorum.members)[0].names == ("a", "b")


VICTIM = """
import sys
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.membership import Membership
from atoll.engines.elastic.snapshot_server import IslandStatus
network = DirectNetwork("127.0.0.1", lighthouse=sys.argv[1], run_id="run-1")
member = Membership(IslandStatus("c", True, "127.0.0.1:1"), network, 20.0, lambda text: None)
member.join()
print(member._server.address().rpartition(":")[2], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow  # the lighthouse tries for 12 s to reach the manager
def test_a_member_that_registers_the_port_of_anothers_manager_does_not_kill_it(quorum):
    """Its own manager has the same port on another loopback address, and it claims to listen on 127.0.0.1."""
    command = [sys.executable, "-c", VICTIM, quorum.lighthouse]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        port = int(victim.stdout.readline())
        with stranger(quorum.lighthouse, "x", bind=f"127.0.0.2:{port}") as ask, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            form(quorum.members)
            assert "x" in asked.result()
            with suppress(http.client.HTTPException, OSError):  # of a manager that was killed
                kill(quorum.lighthouse, "x")
        assert victim.poll() is None
        victim.stdin.close()
        assert victim.wait(20) == 0


def test_a_manager_listens_on_a_random_loopback_address_only(quorum):
    addresses = set()
    for member in quorum.members:
        port = int(member._server.address().rpartition(":")[2])
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
        # In the kernel's table 0A is a listening socket, and 0100007F is 127.0.0.1.
        (local,) = [local for _, local, _, state, *_ in lines if state == "0A" and int(local[-4:], 16) == port]
        assert local[6:8] == "7F"
        addresses.add(local[:8])
    assert len(addresses) == 2
    assert "0100007F" not in addresses


# ------------------------------------------------------------------------------------------------------------ partitions

SIDES = st.lists(st.sampled_from(["one", "two", "three", "ended", "ended and known to one", "ended and known to all"]), max_size=9)


@given(SIDES, st.data())
def test_of_the_sides_of_a_partition_at_most_one_may_commit_whatever_ends_each_side_knows_of(where, data):
    """Each member is on a side, or has ended. The sides may know of different ends."""
    last = LastQuorum(tuple(map(str, range(len(where)))), data.draw(st.sampled_from([None, *map(str, range(len(where)))])))
    ended = [name for name, place in zip(last.processes, where, strict=True) if place.startswith("ended")]
    alive = [name for name in last.processes if name not in ended]
    may = []
    for side in ("one", "two", "three"):
        members = [name for name, place in zip(last.processes, where, strict=True) if place == side]
        known = data.draw(st.lists(st.sampled_from(ended))) if ended else []
        joiners = [f"joiner of {side}"] * data.draw(st.integers(0, 2))  # they never count
        may.append(last.allows([*members, *joiners], known) if alive else False)
    assert sum(may) <= 1


@given(st.integers(1, 9), st.data())
def test_the_survivors_of_members_that_were_all_reported_go_on(size, data):
    names = tuple(map(str, range(size)))
    survivors = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    last = LastQuorum(names, data.draw(st.sampled_from(names)))
    assert last.allows(survivors, ended={*names} - {*survivors})


@given(st.integers(1, 9), st.data())
def test_without_reported_ends_one_of_two_sides_always_goes_on(size, data):
    names = tuple(map(str, range(size)))
    one = data.draw(st.lists(st.sampled_from(names), unique=True))
    last = LastQuorum(names, data.draw(st.sampled_from([None, *names])))
    assert last.allows(one) != last.allows({*names} - {*one})


class Model:
    """Islands that commit in groups that a random partition forms, by the rule of the commit protocol. In each vote some
    participants receive all votes and commit, and the others are in doubt."""

    def __init__(self, size, rng):
        self.rng, self.epoch = rng, 0
        self.held = [(0, 0, LastQuorum(tuple(range(size))))] * size  # round, epoch, quorum
        self.doubts = [[] for _ in range(size)]

    def may_commit(self, group, newest, *, with_doubts):
        doubts = [last for one in group for at, last in self.doubts[one] if at > newest[:2]] if with_doubts else []
        return all(last.allows(group) for last in [newest[2], *doubts])

    def newest(self, group):
        return max((self.held[one] for one in group), key=lambda held: held[:2])

    def step(self, with_doubts):
        group = [one for one in range(len(self.held)) if self.rng.random() < 0.6]
        if not group:
            return
        newest = self.newest(group)
        for one in group:
            if self.held[one] != newest and self.rng.random() < 0.5:
                self.hold(one, newest)
        present = [one for one in group if self.held[one] == newest]
        if not self.may_commit(present, newest, with_doubts=with_doubts):
            return
        self.epoch += 1
        members = LastQuorum(tuple(present), self.rng.choice([None, *present]))
        after = (newest[0] + 1, self.epoch, members)
        received = [one for one in present if self.rng.random() < 0.7]
        for one in present:
            self.doubts[one].append((after[:2], members))
            if one in received:
                self.hold(one, after)

    def hold(self, one, state):
        self.held[one] = state
        self.doubts[one] = [doubt for doubt in self.doubts[one] if doubt[0] > state[:2]]

    def is_split(self, with_doubts):
        """Whether the islands can be divided into two sides that could both commit."""
        for places in itertools.product((0, 1), repeat=len(self.held)):
            sides = [[one for one, place in enumerate(places) if place == side] for side in (0, 1)]
            if all(side and self.may_commit(side, self.newest(side), with_doubts=with_doubts) for side in sides):
                return True
        return False


def split(seed, with_doubts):
    rng = random.Random(seed)
    model = Model(rng.randint(2, 6), rng)
    for _ in range(40):
        model.step(with_doubts)
        if model.is_split(with_doubts):
            return True
    return False


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 32))
def test_no_sequence_of_partitions_and_half_received_votes_lets_two_sides_commit(seed):
    assert not split(seed, with_doubts=True)


def test_without_the_doubts_of_half_received_votes_two_sides_could_commit():
    assert any(split(seed, with_doubts=False) for seed in range(20))
