"""The quorum monitor: a member that answers is alive, however late; a silent one aborts the exchange, so that no member waits."""

import socket
import threading
from contextlib import closing

import pytest

from atoll.engines.elastic import membership
from atoll.engines.elastic.membership import Member, Membership, MembershipLost, QuorumMonitor
from atoll.engines.elastic.rendezvous import free_port
from atoll.engines.elastic.snapshot_server import IslandStatus, SnapshotServer

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
    monkeypatch.setattr(membership, "PROBE_S", 0.01)


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
    member = Membership(IslandStatus("a", True, f"{HOST}:1"), HOST, nowhere, 0.1, lambda text: None)
    with pytest.raises(MembershipLost, match=r"a waited 0 s for the lighthouse at 127\.0\.0\.1"):
        member.join()
