"""The store in which the processes of a run find each other, and the network that it may use.

A TCPStore that torch opens by itself listens on all interfaces, and torch's launcher executes what it finds in its own. The store
here listens on one address, and the processes of one machine use the loopback interface only. Nothing authenticates a peer or
encrypts a message on torch's transports, so the user must say that a network between machines is trusted.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous

from atoll.core.errors import ConfigError
from atoll.engines.network_interfaces import LOOPBACK, is_loopback

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The variable by which a launcher says that it hosts the store of the ranks."""
TRUSTED = (
    "the network between the machines is trusted: everyone on it can read and change this run, and torch's launcher executes what "
    "it receives"
)
"""What a trusted network means, for the console."""
_REQUEST_LIMIT_S = 5.0
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that choose the interfaces of gloo and NCCL."""


def open_store(host: str, port: int = 0, attempts: int = 3) -> tuple[TCPStore, int]:
    """A store in this process that listens on this address alone, and its port. Of about fifty stores that processes create within
    a second, torch's own client does not reach one: this tries again."""
    listener = socket.create_server((host, port), backlog=128)
    found, limit = int(listener.getsockname()[1]), timedelta(seconds=_REQUEST_LIMIT_S)
    try:
        # The store takes over the socket, and closes it.
        store = TCPStore(host, found, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach())
    except DistNetworkError:
        if attempts == 1:
            raise
        return open_store(host, port, attempts - 1)
    return store, found


def connect_store(host: str, port: int, timeout_s: float = _REQUEST_LIMIT_S) -> TCPStore:
    """The store that another process hosts at this address."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def spans_machines(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the processes that torchrun, or a tool that sets its variables, started run on several machines.

    >>> spans_machines({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    True
    >>> spans_machines({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})  # a tool that does not count the processes of a machine
    False
    """
    size, local_size = environment.get("WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "")
    if local_size.isdecimal():
        return int(size) > int(local_size)
    return int(size) > 1 and not is_loopback(environment.get("MASTER_ADDR", LOOPBACK))


def machine() -> str:
    """What distinguishes this machine, or this network namespace of it, from others that a group may have processes on."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return f"{boot.read_text().strip() if boot.exists() else platform.node()} {network.stat().st_ino if network.exists() else ''}"


def refuse_untrusted_network(*, spans: bool, trusted: bool, setting: str) -> None:
    """Refuse processes on several machines unless the user trusts the network between them. `setting` is how the user says so."""
    if spans and not trusted:
        unknown = "" if "LOCAL_WORLD_SIZE" in os.environ else " (or LOCAL_WORLD_SIZE, if all processes run on this machine)"
        raise ConfigError(
            f"this run has processes on several machines, and torch's transport between them has no authentication and no "
            f"encryption. If everyone on that network may read and change the run, give {setting}{unknown}; else use --engine "
            f"elastic."
        )


@contextmanager
def on_loopback() -> Iterator[None]:
    """gloo and NCCL listen on the loopback interface alone in groups that are created here. By default gloo listens on the address
    of the machine's name."""
    with environment(loopback_interfaces()):
        yield


def loopback_interfaces() -> dict[str, str]:
    """The variables with which gloo and NCCL use the loopback interface."""
    return dict.fromkeys(INTERFACES, "lo0" if sys.platform == "darwin" else "lo")


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, also for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_store(timeout_s: float) -> tuple[PrefixStore, int, int]:
    """The store of the processes that torchrun started, this process's rank and their number, by torchrun's variables.

    Processes may call this several times, all of them equally often: each time they find fresh keys. Raises RuntimeError if the
    store does not answer in time.
    """
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    port, has_host = int(os.environ["MASTER_PORT"]), os.environ.get(AGENT_STORE) == "True"
    found: Store
    if size == 1 and not has_host:
        found = _own_store()
    elif spans_machines():
        found, _, _ = next(rendezvous("env://", timeout=timeout))
    elif rank == 0 and not has_host:
        found = _hosted_store(port)
    else:
        found = connect_store(os.environ["MASTER_ADDR"] if has_host else LOOPBACK, port, timeout_s)
    found.set_timeout(timeout)
    return PrefixStore(f"atoll/{found.add(f'atoll/uses/{rank}', 1)}", found), rank, size


@cache
def _own_store() -> Store:
    return HashStore()


@cache
def _hosted_store(port: int) -> Store:
    """It lives as long as this process, since others may still read it, or look for it again."""
    return open_store(LOOPBACK, port)[0]
