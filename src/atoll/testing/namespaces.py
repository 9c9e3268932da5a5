"""Network namespaces joined by lines of chosen rates: really slow links on one machine.

Each namespace has one end of a veth pair and nothing else, so that what is sent in it reaches the others and nobody besides, and
addresses are its own. `tbf` shapes what each end sends. Names hold the id of the process that made them: what a process left behind
that was killed is removed by the next. Linux, as root, with `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
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

HEADER_BYTES = 66
"""Of Ethernet, IP and TCP with its time stamps: what each packet carries besides its payload."""
QUEUE_BYTES = 16_000_000
"""So much may wait in a shaper's queue: more than TCP has under way, so that nothing is dropped. A line that drops what comes too
fast has no rate of its own, since TCP then slows down and finds its way up again."""
_PREFIX = "atoll"


@dataclass(frozen=True)
class Counters:
    """What an end has sent so far."""

    sent_bytes: int
    sent_packets: int

    @staticmethod
    def read(device: str) -> Counters:
        """Of a device in this process's own namespace."""
        folder = Path("/sys/class/net") / device / "statistics"
        return Counters(*(int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")))

    def payload_since(self, before: Counters) -> int:
        """Bytes, headers taken off. A packet that the card would cut up has one header here, and is one packet."""
        sent, packets = self.sent_bytes - before.sent_bytes, self.sent_packets - before.sent_packets
        return sent - HEADER_BYTES * packets


@dataclass(frozen=True)
class Island:
    """A namespace, its end of the line, and its address."""

    name: str
    device: str
    address: str

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
        """A process in the namespace, whose output goes to `log` and whose errors go to the same with the suffix .err. It is told
        by the end of its standard input that nobody waits for it any more."""
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
        """The command that has the same done in the namespace. The process that it starts becomes the one asked for."""
        return [_tool("ip"), "netns", "exec", self.name, *command]

    def shape(self, mbit_per_s: float | None) -> None:
        """What it sends goes at this rate from now on; none: as fast as the machine can."""
        _do("ip", "-n", self.name, "link", "set", "dev", self.device, "gso_max_size", str(packet_bytes(mbit_per_s)))
        # Without a shaper there is nothing to remove, which tc calls an error.
        subprocess.run([_tool("tc"), "-n", self.name, "qdisc", "del", "dev", self.device, "root"], capture_output=True, check=False)
        if mbit_per_s is not None:
            shaper = [
                "tbf",
                "rate",
                f"{mbit_per_s * 1e6:.0f}bit",
                "burst",
                str(burst_bytes(mbit_per_s)),
                "limit",
                str(QUEUE_BYTES),
            ]
            _do("tc", "-n", self.name, "qdisc", "add", "dev", self.device, "root", *shaper)

    def silence(self) -> None:
        """What it sends is lost from now on, and nobody is told. `shape` ends it."""
        self.shape(None)
        _do("tc", "-n", self.name, "qdisc", "add", "dev", self.device, "root", "pfifo", "limit", "0")


def burst_bytes(mbit_per_s: float) -> int:
    """What may go at once after a pause: 4 ms of the rate, and no fewer than eighty packets: a timer that comes late on a busy
    machine would else leave the line idle.

    >>> [burst_bytes(rate) for rate in (10, 1000)]
    [120000, 500000]
    """
    return max(120_000, int(mbit_per_s * 1e6 / 8 / 250))


def packet_bytes(mbit_per_s: float | None) -> int:
    """What the kernel hands to the shaper as one packet at most: a millisecond of the rate. At 10 Mbit/s its usual 64 kB would keep
    the line for 50 ms, and acknowledgements that wait behind them would make both ends wait for each other.

    >>> [packet_bytes(rate) for rate in (10, 100, 1000, None)]
    [3028, 12500, 65536, 65536]
    """
    return 65_536 if mbit_per_s is None else min(65_536, max(2 * 1514, int(mbit_per_s * 1e6 / 8 / 1000)))


@contextmanager
def joined() -> Iterator[tuple[Island, Island]]:
    """Two namespaces with a line between them, which are removed whatever happens; also when this process is asked to end."""
    one, two = (Island(f"{_PREFIX}-{os.getpid()}-{end}", f"isle{end}", f"10.77.0.{end + 1}") for end in range(2))
    with _namespaces([one.name, two.name]):
        _join(one, two)
        for island in (one, two):
            _open(island)
        yield one, two


@contextmanager
def star(names: Sequence[str]) -> Iterator[dict[str, tuple[Island, Island]]]:
    """A namespace for each name, with a line to one in the middle, through which everybody reaches everybody. By the names both
    ends of each line: its own, and the one in the middle, which has no address. They are removed whatever happens."""
    middle, bridge = f"{_PREFIX}-{os.getpid()}-star", "middle"
    lines = {
        name: (
            Island(f"{middle}{n}", f"isle{n}", f"10.77.{n // 250}.{n % 250 + 1}"),
            Island(middle, f"line{n}", ""),
        )
        for n, name in enumerate(names)
    }
    with _namespaces([middle, *(own.name for own, _ in lines.values())]):
        _do("ip", "-n", middle, "link", "add", bridge, "type", "bridge")
        _do("ip", "-n", middle, "link", "set", bridge, "up")
        for own, far in lines.values():
            _join(own, far)
            _do("ip", "-n", middle, "link", "set", far.device, "master", bridge, "up")
            _open(own)
        yield lines


@contextmanager
def entered(island: Island) -> Iterator[None]:
    """This thread is in the namespace, and so is what it starts; afterwards it is where it was before."""
    with open("/proc/thread-self/ns/net") as before, open(f"/var/run/netns/{island.name}") as there:
        _move_to(there.fileno())
        try:
            yield
        finally:
            _move_to(before.fileno())


def _move_to(namespace: int) -> None:
    # Python has a call of its own for it, since 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise ConfigError(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}. It needs root.")


def why_not() -> str | None:
    """Why namespaces cannot be made here; none if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if _found(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with star(["one"]) as ends, entered(ends["one"][0]):  # all that is asked for anywhere
            ends["one"][0].silence()
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
                _remove(name)  # of a process that had this id before
                _do("ip", "netns", "add", name)
            yield
        finally:
            for name in names:
                _remove(name)


def _join(one: Island, two: Island) -> None:
    _do("ip", "link", "add", one.device, "netns", one.name, "type", "veth", "peer", "name", two.device, "netns", two.name)


def _open(island: Island) -> None:
    """It has its address, and takes what comes."""
    _do("ip", "-n", island.name, "address", "add", f"{island.address}/16", "dev", island.device)
    for device in ("lo", island.device):
        _do("ip", "-n", island.name, "link", "set", device, "up")


def _remove_leftovers() -> None:
    """Namespaces of processes that are no more."""
    listed = _do("ip", "netns", "list").split()
    for name in (word for word in listed if word.startswith(f"{_PREFIX}-")):
        owner = name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """A namespace and with it its end of the line, if it is there."""
    subprocess.run([_tool("ip"), "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by an exception for a while, so that what was made is removed on the way out. What
    somebody else has them do is left to that."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    fatal = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, end) for number in fatal}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"`{tool} {' '.join(arguments)}` failed: {done.stderr.strip()}. Network namespaces need root, and a kernel that has "
            f"them."
        )
    return done.stdout


def _tool(name: str) -> str:
    path = _found(name)
    if path is None:
        raise ConfigError(f"{name} cannot be found. Network namespaces are made with it: install iproute2.")
    return path


def _found(name: str) -> str | None:
    """These tools are often where only root looks."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
