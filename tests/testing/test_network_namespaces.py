"""Links between network namespaces: created, shaped, cut, and removed."""

import signal
import subprocess
import sys

import pytest

from atoll.testing import network_namespaces

UNAVAILABLE = network_namespaces.unavailable_reason()
as_root = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


def made():
    """The names of all network namespaces there are."""
    return {line.split()[0] for line in network_namespaces._do("ip netns list").splitlines() if line}


@as_root
def test_namespaces_are_removed_after_an_error():
    names = []

    def fail():
        with network_namespaces.linked_pair() as ends:
            names.extend(end.name for end in ends)
            assert set(names) <= made()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(names) == 2
    assert not set(names) & made()


@as_root
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_namespaces_are_removed_after_a_signal_or_when_the_next_ones_are_made(end):
    text = (
        "import sys\nfrom atoll.testing import network_namespaces\n"
        "with network_namespaces.linked_pair() as (one, _):\n    print(one.name, flush=True)\n    sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", text], text=True, **pipes) as other:
        name = other.stdout.readline().strip()
        assert name in made()
        other.send_signal(end)
        other.wait()
    assert (name in made()) == (end == signal.SIGKILL)
    with network_namespaces.linked_pair():
        assert name not in made()


def reaches(one, two):
    """Whether a packet from one reaches the other and returns."""
    found = network_namespaces._tool("ip")
    ask = "import socket, sys\nsocket.create_connection((sys.argv[1], 4711), timeout=0.3)"
    listen = "import socket, sys\ndoor = socket.create_server((sys.argv[1], 4711))\nprint(flush=True)\nsys.stdin.read()"
    there = [found, "netns", "exec", two.name, sys.executable, "-c", listen, two.address]
    with subprocess.Popen(there, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        here = [found, "netns", "exec", one.name, sys.executable, "-c", ask, two.address]
        asked = subprocess.run(here, capture_output=True, check=False)
        other.stdin.close()
    return asked.returncode == 0


@as_root
def test_a_cut_link_carries_nothing_until_it_is_restored():
    with network_namespaces.linked_pair() as (one, two):
        link = network_namespaces.ShapedLink([one, two])
        found = [reaches(one, two)]
        link.cut()
        found.append(reaches(one, two))
        link.restore()
        found.append(reaches(one, two))
    assert found == [True, False, True]


@as_root
def test_in_a_star_all_reach_each_other_except_over_a_cut_link_and_between_a_separated_pair():
    with network_namespaces.star_network(["a", "b", "c"]) as ends:
        a, b, c = (own for own, _ in ends.values())
        link = network_namespaces.ShapedLink(ends["a"])
        found = [reaches(a, b)]
        link.cut()
        found += [reaches(b, a), reaches(b, c)]
        link.restore()
        found.append(reaches(b, a))
        link.cut(one_way=True)
        found += [reaches(a, b), reaches(b, c)]
        link.restore()
        other = network_namespaces.ShapedLink(ends["b"])
        for apart in (True, False):
            link.separate(other, apart=apart)
            found += [reaches(a, b), reaches(a, c)]
        neighbours = network_namespaces._do(f"ip -n {a.name} neigh show").splitlines()
    assert len(neighbours) == 2
    assert all(entry.endswith("PERMANENT ") for entry in neighbours)  # others share one table of the kernel, which overflows
    assert found == [True, False, True, True, False, True, False, True, True, True]
    assert not {end.name for pair in ends.values() for end in pair} & made()


@as_root
def test_a_thread_and_its_processes_enter_a_namespace_and_leave_it():
    def devices():
        return subprocess.run([network_namespaces._tool("ip"), "link"], capture_output=True, text=True, check=True).stdout

    def fail_inside(end):
        with network_namespaces.inside_namespace(end):
            seen.append(devices())
            raise ZeroDivisionError

    before, seen = devices(), []
    with network_namespaces.linked_pair() as (one, _):
        with pytest.raises(ZeroDivisionError):
            fail_inside(one)
        assert one.device in seen[0]
    assert devices() == before


@as_root
@pytest.mark.skipif(network_namespaces._found("nft") is None, reason="nft cannot be found: install nftables")
def test_a_site_behind_nat_reaches_the_public_machine_and_is_not_reached_by_it():
    with network_namespaces.site_behind_nat() as (public, other, site):
        assert reaches(site, public)
        assert reaches(site, other)
        assert reaches(public, other)
        assert not reaches(public, site)
