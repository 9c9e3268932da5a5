"""Network namespaces with links of chosen rates: really slow links on one machine.

Each namespace has one end of a veth pair and its own addresses, so its traffic reaches only the other namespaces. `tbf` shapes what
each end sends. Namespace names contain the id of the process that created them, and the next process removes the namespaces of a
killed one. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from atoll.core.errors import ConfigError

QUEUE_BYTES = 16_000_000
"""Length of a shaper's queue: more than TCP has in flight, so the shaper drops nothing. If it did, TCP's back-off would set the
rate."""
_PREFIX = "atoll"
_NOBODY = "02:00:00:00:00:99"
"""A hardware address that no end has."""


@dataclass(frozen=True)
class NetworkNamespace:
    """A network namespace, its end of the link, and its address."""

    name: str
    device: str
    address: str

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
        """Starts a process in the namespace. Its output goes to `log`, its errors to the same path with the suffix .err. End of
        file on its standard input means that its parent has ended."""
        with log.open("w") as output, log.with_suffix(".err").open("w") as errors:
            return subprocess.Popen(
                self.inside(command),
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                text=True,
            )

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in the namespace, by exec: the process id stays the same."""
        return [_tool("ip"), "netns", "exec", self.name, *command]

    def shape(self, mbit_per_s: float | None) -> None:
        """Limits the rate of what this end sends; None: no limit."""
        _do(f"ip -n {self.name} link set dev {self.device} gso_max_size {packet_bytes(mbit_per_s)}")
        _do(f"tc -n {self.name} qdisc del dev {self.device} root", may_fail=True)  # fails if there is no shaper to remove
        if mbit_per_s is not None:
            shaper = f"tbf rate {mbit_per_s * 1e6:.0f}bit burst {burst_bytes(mbit_per_s)} limit {QUEUE_BYTES}"
            _do(f"tc -n {self.name} qdisc add dev {self.device} root {shaper}")

    def drop_packets(self) -> None:
        """Drops every packet that this end sends, until `shape`."""
        self.shape(None)
        _do(f"tc -n {self.name} qdisc add dev {self.device} root pfifo limit 0")

    def keep_from_resending(self) -> None:
        """Has TCP send nothing twice that is only late or in another order, as on a busy machine: bytes on a link that loses no
        packet are then those of the payload. For connections that are made from now on."""
        _do(f"ip -n {self.name} route change {self._network} dev {self.device} rto_min 60s")
        settings = {"early_retrans": 0, "recovery": 0, "sack": 0, "max_reordering": 1_000_000, "reordering": 1_000_000}
        pairs = " ".join(f"net.ipv4.tcp_{name}={number}" for name, number in settings.items())
        _do(f"ip netns exec {self.name} {_tool('sysctl')} -q -w {pairs}")

    @property
    def _network(self) -> str:
        return str(ipaddress.ip_network(f"{self.address}/16", strict=False))

    @property
    def hardware_address(self) -> str:
        """Of this end, made from its address."""
        return ":".join(["02", "00", *(f"{int(part):02x}" for part in self.address.split("."))])

    def bring_up(self) -> None:
        """Assigns the addresses and brings the devices up."""
        _do(f"ip -n {self.name} link set {self.device} address {self.hardware_address}")
        _do(f"ip -n {self.name} address add {self.address}/16 dev {self.device}")
        for device in ("lo", self.device):
            _do(f"ip -n {self.name} link set {device} up")


class ShapedLink:
    """A link with these ends, to be cut, shaped and restored. At first it has no limit."""

    def __init__(self, ends: Sequence[NetworkNamespace]) -> None:
        self._ends = tuple(ends)
        self.restore()

    def cut(self, *, one_way: bool = False) -> None:
        """Drop all packets; one way: only those that the first end sends."""
        self._ends[0].drop_packets()
        for end in self._ends[1:]:
            end.shape(None) if one_way else end.drop_packets()

    def separate(self, other: ShapedLink, *, apart: bool) -> None:
        """Whether packets between the first end of this link and that of another are lost: they go to a machine that does not
        exist."""
        for here, there in ((self._ends[0], other._ends[0]), (other._ends[0], self._ends[0])):
            hardware_address = _NOBODY if apart else there.hardware_address
            _do(f"ip -n {here.name} neigh replace {there.address} dev {here.device} lladdr {hardware_address} nud permanent")

    def shape(self, mbit_per_s: float | None) -> None:
        for end in self._ends:
            end.shape(mbit_per_s)

    def restore(self) -> None:
        self.shape(None)


def burst_bytes(mbit_per_s: float) -> int:
    """Size of a burst after a pause: 4 ms of the rate, at least 80 packets, since a late timer on a busy machine would leave the
    link idle.

    >>> [burst_bytes(rate) for rate in (10, 1000)]
    [120000, 500000]
    """
    return max(120_000, int(mbit_per_s * 1e6 / 8 / 250))


def packet_bytes(mbit_per_s: float | None) -> int:
    """Largest packet that the kernel hands to the shaper: 1 ms of the rate. At 10 Mbit/s the default of 64 kB would occupy the link
    for 50 ms, and acknowledgements queued behind it would stall both ends.

    >>> [packet_bytes(rate) for rate in (10, 100, 1000, None)]
    [3028, 12500, 65536, 65536]
    """
    return 65_536 if mbit_per_s is None else min(65_536, max(2 * 1514, int(mbit_per_s * 1e6 / 8 / 1000)))


@contextmanager
def linked_pair() -> Iterator[tuple[NetworkNamespace, NetworkNamespace]]:
    """Two namespaces with a link between them. They are removed at the end, also on SIGTERM and SIGHUP."""
    one, two = (NetworkNamespace(f"{_PREFIX}-{os.getpid()}-{end}", f"isle{end}", f"10.77.0.{end + 1}") for end in range(2))
    with _namespaces([one.name, two.name]):
        _link(one, two)
        for end in (one, two):
            end.bring_up()
        yield one, two


@contextmanager
def star_network(names: Sequence[str]) -> Iterator[dict[str, tuple[NetworkNamespace, NetworkNamespace]]]:
    """A namespace for each name, with a link to a central bridge that connects all. Gives both ends of each link by name: its own,
    and the one at the bridge, which has no address. The namespaces are removed at the end, also on SIGTERM and SIGHUP."""
    center, bridge = f"{_PREFIX}-{os.getpid()}-star", "middle"
    links = {
        name: (
            NetworkNamespace(f"{center}{n}", f"isle{n}", f"10.77.{n // 250}.{n % 250 + 1}"),
            NetworkNamespace(center, f"line{n}", ""),
        )
        for n, name in enumerate(names)
    }
    with _namespaces([center, *(own.name for own, _ in links.values())]):
        _do(f"ip -n {center} link add {bridge} type bridge")
        _do(f"ip -n {center} link set {bridge} up")
        for own, far in links.values():
            _link(own, far)
            _do(f"ip -n {center} link set {far.device} master {bridge} up")
            own.bring_up()
        _add_neighbours([own for own, _ in links.values()])
        yield links


def _add_neighbours(ends: Sequence[NetworkNamespace]) -> None:
    """Enter the hardware addresses of all others at every end. All namespaces share the kernel's table of resolved addresses, which
    is too small for 32 of them, where each of 32 machines has a table of its own. Permanent entries do not count."""
    for end in ends:
        others = [other for other in ends if other is not end]
        lines = [f"neigh replace {o.address} dev {end.device} lladdr {o.hardware_address} nud permanent\n" for o in others]
        _do(f"ip -n {end.name} -batch -", given="".join(lines))


@contextmanager
def site_behind_nat() -> Iterator[tuple[NetworkNamespace, NetworkNamespace, NetworkNamespace]]:
    """Two public machines at 203.0.113.5 and 203.0.113.6, and a site at 192.168.7.2 behind a router that translates its addresses
    and admits no connection from outside. They are removed at the end, also on SIGTERM and SIGHUP. Needs `nft` and `sysctl`."""
    ends = [f"{_PREFIX}-{os.getpid()}-{end}" for end in ("public0", "public1", "router", "site")]
    router, site = ends[2], NetworkNamespace(ends[3], "isle2", "192.168.7.2")
    publics = [NetworkNamespace(end, f"isle{number}", f"203.0.113.{5 + number}") for number, end in enumerate(ends[:2])]
    outside, inside = NetworkNamespace(router, "outside", "203.0.113.9"), NetworkNamespace(router, "inside", "192.168.7.1")
    with _namespaces(ends):
        _do(f"ip -n {router} link add {outside.device} type bridge")
        for number, public in enumerate(publics):
            port = NetworkNamespace(router, f"port{number}", "")
            _link(public, port)
            _do(f"ip -n {router} link set {port.device} master {outside.device} up")
        _link(site, inside)
        for end in (*publics, outside, site, inside):
            end.bring_up()
        _do(f"ip -n {site.name} route add default via {inside.address}")
        _do(f"ip netns exec {router} {_tool('sysctl')} -q -w net.ipv4.ip_forward=1")
        for rule in (
            "add table ip nat",
            "add chain ip nat out { type nat hook postrouting priority 100 ; }",
            "add rule ip nat out oifname outside masquerade",
            "add table ip filter",
            "add chain ip filter forward { type filter hook forward priority 0 ; policy drop ; }",
            "add rule ip filter forward iifname inside accept",
            "add rule ip filter forward iifname outside oifname outside accept",  # a kernel may filter what a bridge forwards
            "add rule ip filter forward ct state established,related accept",
        ):
            _do(f"ip netns exec {router} {_tool('nft')} {rule}")
        yield publics[0], publics[1], site


@contextmanager
def inside_namespace(namespace: NetworkNamespace) -> Iterator[None]:
    """Moves this thread, and processes that it starts, into the namespace, and afterwards back."""
    with open("/proc/thread-self/ns/net") as before, open(f"/var/run/netns/{namespace.name}") as target:
        _enter(target.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:
    # os.setns exists since Python 3.12 only.
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise ConfigError(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}. Run as root.")


def unavailable_reason(*, nat: bool = False) -> str | None:
    """Why this machine cannot create namespaces, or with `nat` no `site_behind_nat`; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    for tools, packages in ((("ip", "tc"), "iproute2"), (("nft", "sysctl") if nat else (), "nftables and procps")):
        missing = [tool for tool in tools if _found(tool) is None]
        if missing:
            return f"{' and '.join(missing)} cannot be found: install {packages}"
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    try:
        with star_network(["one"]) as ends, inside_namespace(ends["one"][0]):  # every operation that this module offers
            ends["one"][0].drop_packets()
            ends["one"][1].shape(1000.0)
    except ConfigError as error:
        return str(error)
    return None


@contextmanager
def _namespaces(names: Sequence[str]) -> Iterator[None]:
    _remove_leftovers()
    with _ending_by_exception():
        try:
            for name in names:
                _remove(name)  # left behind by a process with the same id
                _do(f"ip netns add {name}")
            yield
        finally:
            for name in names:
                _remove(name)


def _link(one: NetworkNamespace, two: NetworkNamespace) -> None:
    _do(f"ip link add {one.device} netns {one.name} type veth peer name {two.device} netns {two.name}")


def _remove_leftovers() -> None:
    """Removes namespaces of processes that no longer exist."""
    listed = _do("ip netns list").split()
    for name in (word for word in listed if word.startswith(f"{_PREFIX}-")):
        owner = name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """Removes a namespace, if it exists, with its end of the link."""
    _do(f"ip netns delete {name}", may_fail=True)


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that namespaces are removed. Handlers that are already set stay."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    fatal = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, end) for number in fatal}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do(command: str, *, may_fail: bool = False, given: str = "") -> str:
    """The output of a command whose arguments have no spaces. It reads `given` from its standard input."""
    tool, *arguments = command.split()
    done = subprocess.run([_tool(tool), *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise ConfigError(
            f"`{command}` failed: {done.stderr.strip()}. Network namespaces need root, and a kernel with support for them."
        )
    return done.stdout


def _tool(name: str) -> str:
    path = _found(name)
    if path is None:
        package = {"nft": "nftables", "sysctl": "procps"}.get(name, "iproute2")
        raise ConfigError(f"{name} cannot be found, and network namespaces need it. Install {package}.")
    return path


def _found(name: str) -> str | None:
    """Looks in the sbin folders, too."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
