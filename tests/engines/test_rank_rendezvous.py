"""Ranks wait for each other and say for whom; what one rank finds wrong, all raise."""

import platform
import threading

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from atoll.core.errors import AtollError, ConfigError, ExchangeFailed
from atoll.engines import rank_rendezvous
from atoll.engines.network_interfaces import NetworkInterface
from atoll.engines.rank_rendezvous import exchange_interface, wait_for_all, wait_for_keys
from atoll.engines.rank_store import INTERFACES

HERE = NetworkInterface("lo", "127.0.0.1")  # stands for the interface between two machines


def test_ranks_that_have_not_started_are_named():
    store, said = HashStore(), []
    for rank in (0, 3):
        with pytest.raises(ExchangeFailed, match="which have not started"):
            wait_for_all(store, rank, 4, 0.02, said.append)
    with pytest.raises(ExchangeFailed, match=r"rank 1 waited 0.02 s for rank 2 of 4.*ranks 0, 1, 3 are here"):
        wait_for_all(store, 1, 4, 0.02, said.append)
    wait_for_all(store, 2, 4, 0.02, said.append)
    assert said == []


def test_ranks_that_were_started_for_different_numbers_are_all_refused_with_one_sentence(monkeypatch):
    """The second machine was started for four ranks, so that its first is rank 2. A rank whose number another has finds the store
    of a second use."""
    launch, errors = HashStore(), {}

    def start(name, rank, size):
        try:
            wait_for_all(PrefixStore(name, launch), rank, size, 60.0, print, launch)
        except ConfigError as error:
            errors[name, rank] = str(error)

    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    waiting = threading.Thread(target=start, args=("use 1", 0, 2))
    waiting.start()
    while not launch.check(["launch/0"]):
        pass
    start("use 1", 2, 4)
    waiting.join()
    start("use 2", 0, 2)
    here = platform.node()
    assert set(errors) == {("use 1", 0), ("use 1", 2), ("use 2", 0)}
    (problem,) = set(errors.values())
    assert problem.startswith(f"{here} was started for 2 processes on 2 machines, and {here} for 4 processes on 2 machines. Give")


def test_ranks_with_other_numbers_of_machines_are_refused(monkeypatch):
    launch = HashStore()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    wait_for_all(launch, 0, 1, 1.0, print, launch)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"for 1 processes on 1 machine, and .* for 1 processes on 3 machines"):
        wait_for_all(launch, 0, 1, 1.0, print, launch)


def test_a_rank_says_whom_it_waits_for_again_and_again(monkeypatch):
    monkeypatch.setattr(rank_rendezvous, "WAIT_LOG_S", 0.03)
    store, said = HashStore(), []
    store.set("there/1", "")
    assert wait_for_keys(store, {rank: f"there/{rank}" for rank in range(3)}, "to begin", 0.2, said.append) == [0, 2]
    assert len(said) >= 2
    assert set(said) == {"waiting for ranks 0, 2 to begin (0 s of at most 0 s)"}


@pytest.fixture
def together(monkeypatch):
    """Two ranks in threads, on different machines as far as they know: each one's interface variables, or its error."""
    monkeypatch.setattr(rank_rendezvous, "machine", lambda: threading.current_thread().name)
    for name in (*INTERFACES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def enter():
        store, ends = HashStore(), {}

        def run(rank):
            try:
                with exchange_interface(store, rank, 2, spans=True, limit_s=20.0, log=said.append):
                    ends[rank] = "entered"
            except AtollError as error:
                ends[rank] = error

        said = []
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends, sorted(said)

    return enter


def test_ranks_connect_once_before_gloo_does_and_say_over_which_interface(together, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "first.example")
    monkeypatch.setattr(rank_rendezvous, "route_to", lambda host: HERE)
    ends, said = together()
    assert ends == {0: "entered", 1: "entered"}
    assert [line.partition(" on ")[0] for line in said] == ["rank 0", "rank 1"]
    assert all("exchanges over lo (127.0.0.1) (it routes to the other machines" in line for line in said)


def test_a_rank_that_another_cannot_connect_to_is_every_ranks_error(together, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "first.example")
    monkeypatch.setattr(rank_rendezvous, "route_to", lambda host: HERE)

    def refuse(address, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(rank_rendezvous.socket, "create_connection", refuse)
    ends, _ = together()
    for error in ends.values():
        assert isinstance(error, ExchangeFailed)
        for text in ("cannot connect to rank", "Connection refused", "export GLOO_SOCKET_IFNAME=NAME", "atoll doctor"):
            assert text in str(error)


def test_a_rank_without_a_route_is_every_ranks_error(together, monkeypatch):
    routes = {"MainThread": None}
    monkeypatch.setenv("MASTER_ADDR", "first.example")
    found = iter([HERE, None, None, None])
    monkeypatch.setattr(rank_rendezvous, "route_to", lambda host: next(found, routes["MainThread"]))
    ends, _ = together()
    assert {type(error) for error in ends.values()} == {ExchangeFailed}
    assert all("has no route to other ranks (127.0.0.1)" in str(error) for error in ends.values())


@pytest.mark.parametrize(("name", "says"), [("no-such-0", "has no such interface"), ("lo", "has this interface for itself alone")])
def test_an_interface_of_the_user_that_no_other_machine_reaches_is_refused(together, monkeypatch, name, says):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    ends, _ = together()
    for error in ends.values():
        assert isinstance(error, ConfigError)
        assert f"GLOO_SOCKET_IFNAME={name}: " in str(error)
        assert says in str(error)


def test_a_group_of_the_users_own_without_an_address_is_left_to_gloo(together):
    assert together() == ({0: "entered", 1: "entered"}, [])


def test_processes_of_one_machine_exchange_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with exchange_interface(HashStore(), 0, 1, spans=False, limit_s=1.0, log=print):
        group = dist.ProcessGroupGloo(HashStore(), 0, 1)  # fails on an interface that does not exist
    assert group.size() == 1
