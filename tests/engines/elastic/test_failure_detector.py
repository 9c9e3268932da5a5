"""Whoever answers is there, however late; whoever does not is given up, and nobody waits for it any more."""

import socket
import threading
from contextlib import closing

import pytest

from atoll.engines.elastic import failure_detector as watching
from atoll.engines.elastic.failure_detector import Watch
from atoll.engines.elastic.membership import Member
from atoll.engines.elastic.snapshot_server import Pier

HOST = "127.0.0.1"


class Group:
    """Knows when it was ended."""

    def __init__(self):
        self.ended = threading.Event()

    def recv(self, tensors, rank, tag):
        assert (rank, tag) == (1, 1), "of whoever is silent: another may have closed its connection"
        return self

    def wait(self, limit):
        self.ended.set()
        raise RuntimeError("timed out")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(watching, "EVERY_S", 0.01)


def watch(address, group):
    return Watch({1: Member("b", address, True, 0.0)}, group, silent_s=0.2)


def test_one_that_accepts_and_says_nothing_is_given_up_and_named():
    group = Group()
    with socket.create_server((HOST, 0)) as silent, watch(f"{HOST}:{silent.getsockname()[1]}", group) as one:
        assert group.ended.wait(20.0)
    assert one.lost == "b"


def test_another_process_that_answers_where_one_was_is_not_taken_for_it():
    group = Group()
    with closing(Pier(HOST, lambda: {"name": "another"})) as pier, watch(pier.address, group) as one:
        assert group.ended.wait(20.0)
    assert one.lost == "b"


def test_one_that_answers_is_asked_again_and_again_and_nothing_happens():
    asked, group = [], Group()
    enough = threading.Event()

    def about():
        asked.append(1)
        if len(asked) == 40:
            enough.set()
        return {"name": "b"}

    pier = Pier(HOST, about)
    with watch(pier.address, group) as one:
        assert enough.wait(20.0)
    assert one.lost is None
    assert not group.ended.is_set()
    pier.close()


def test_after_the_exchange_nobody_is_given_up_any_more():
    group = Group()
    with watch(f"{HOST}:1", group) as one:
        pass
    one._end(1, Member("b", "", True, 0.0))
    assert one.lost is None
    assert not group.ended.is_set()


def test_whoever_was_left_out_may_be_silent_and_one_that_takes_part_may_not():
    group = Group()
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        members = {0: Member("a", f"{HOST}:1", True, 0.0), 1: Member("b", address, True, 0.0)}
        with Watch(members, group, silent_s=0.2) as one:
            one.leave_out([0])
            one._end(0, members[0])
            assert one.lost is None
            assert group.ended.wait(20.0)
    assert one.lost == "b"


def test_each_of_those_that_are_silent_ends_the_exchange():
    group = Group()
    with Watch({}, group, silent_s=0.2) as one:
        one.lost = "a"  # which has closed its connection, and so ended nothing
        one._end(1, Member("b", "", True, 0.0))
    assert group.ended.is_set()
    assert one.lost == "a"
