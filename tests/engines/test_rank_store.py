"""The store of the ranks listens where it should, and processes on several machines need a network that the user trusts."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from atoll.core.errors import ConfigError
from atoll.engines.network_interfaces import free_port
from atoll.engines.rank_store import environment, find_store, on_loopback, open_store, refuse_untrusted_network, spans_machines
from tests.listening_sockets import listening_sockets

ONE_MACHINE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "first.example", "MASTER_PORT": "29500"}
SERVES = """
import sys
from atoll.engines.rank_store import find_store
first, rank, size = find_store(30.0)
again, _, _ = find_store(30.0)
first.set("a", "first"), again.set("a", "again")
print(rank, size, flush=True)
sys.stdin.read()
"""


def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_a_store_listens_on_its_address_alone():
    store, port = open_store("127.0.0.1")
    store.set("a", "b")
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port), "which a store on all interfaces answers"
    assert port in {found.port for found in listening_sockets(os.getpid()) if found.is_loopback}


@pytest.mark.parametrize(
    ("environment", "spans"),
    [
        ({}, False),
        (ONE_MACHINE, False),
        ({**ONE_MACHINE, "WORLD_SIZE": "4"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "first.example"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, False),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.3.2.1"}, False),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "first.example"}, False),
    ],
)
def test_torchruns_variables_tell_whether_there_are_several_machines(environment, spans):
    assert spans_machines(environment) is spans


def test_processes_on_several_machines_are_refused_unless_the_network_is_trusted():
    with pytest.raises(ConfigError, match=r"no authentication and no encryption.* give --set engine.network=trusted"):
        refuse_untrusted_network(spans=True, trusted=False, setting="--set engine.network=trusted")
    refuse_untrusted_network(spans=True, trusted=True, setting="")
    refuse_untrusted_network(spans=False, trusted=False, setting="")


def test_gloo_and_nccl_use_the_loopback_interface_and_the_users_variables_are_restored(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with on_loopback():
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback, loopback)
    assert (os.environ["GLOO_SOCKET_IFNAME"], "NCCL_SOCKET_IFNAME" in os.environ) == ("eth7", False)


def test_rank_0_hosts_the_store_on_loopback_where_no_launcher_does(monkeypatch):
    port = free_port("127.0.0.1")
    variables = {**ONE_MACHINE, "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", SERVES]
    environment = {**os.environ, **variables, "RANK": "0"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout.readline().split() == ["0", "2"]
        assert {(found.address, found.port) for found in listening_sockets(host.pid)} == {("127.0.0.1", port)}
        for name, value in {**variables, "RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        values = [find_store(30.0)[0].get("a").decode() for _ in range(2)]
        assert values == ["first", "again"], "each use has keys of its own"
        assert TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5)).get("atoll/1/a") == b"first"
        host.stdin.close()


def test_a_single_process_needs_no_socket(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    before = listening_sockets(os.getpid())
    store, rank, size = find_store(1.0)
    store.set("a", "b")
    assert (store.get("a"), rank, size) == (b"b", 0, 1)
    assert listening_sockets(os.getpid()) <= before


def test_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("ATOLL_TEST_KEPT", "before")
    monkeypatch.delenv("ATOLL_TEST_NEW", raising=False)
    with environment({"ATOLL_TEST_KEPT": "during", "ATOLL_TEST_NEW": "x"}):
        assert (os.environ["ATOLL_TEST_KEPT"], os.environ["ATOLL_TEST_NEW"]) == ("during", "x")
    assert (os.environ["ATOLL_TEST_KEPT"], "ATOLL_TEST_NEW" in os.environ) == ("before", False)
