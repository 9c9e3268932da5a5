"""Which interface routes to another machine, as the kernel says."""

import socket
import sys
from pathlib import Path

import pytest

from atoll.engines.network_interfaces import beyond_loopback, free_port, interface_named, interface_of, network_interfaces, route_to
from atoll.testing import network_namespaces


def test_every_address_of_an_interface_is_found_again():
    for one in network_interfaces():
        assert one in network_interfaces()
        assert interface_of(one.address) is not None
        assert interface_named(one.name).name == one.name
    assert (interface_of("192.0.2.99"), interface_named("no-such-0")) == (None, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "no-such-host.invalid", "a" * 300, "\udcff"])
def test_loopback_addresses_and_unknown_names_have_no_route(host):
    assert route_to(host) is None


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or network_namespaces.unavailable_reason() is not None, reason="needs namespaces"
)
def test_the_route_is_the_interface_towards_the_other_machine_also_from_that_machine_itself():
    with network_namespaces.linked_pair() as (one, two), network_namespaces.inside_namespace(one):
        assert route_to(two.address) == route_to(one.address) == (one.device, one.address)
        assert route_to("198.51.100.7") is None
        assert beyond_loopback() == f"{one.device} ({one.address})"


def test_a_free_port_is_none_that_an_outgoing_connection_may_get():
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port("127.0.0.1")
    assert 1024 < port < outgoing
    assert free_port("127.0.0.1", port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert free_port("127.0.0.1", port) != port
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.99")
