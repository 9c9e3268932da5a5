"""Starts a local Ray or joins a Ray cluster. Only this module imports Ray.

Ray reads its authentication settings from the environment when it is first imported, so this module sets them before the import. A
local Ray listens on the loopback interface alone, has a new token in a file that only its owner can read, and no dashboard. An
existing cluster is joined with its user's token, and beyond the loopback interface only if the user trusts its network.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.optional_imports import require
from atoll.engines.network_interfaces import LOOPBACK, is_loopback
from atoll.engines.point_to_point import first_sentence
from atoll.engines.rank_store import environment

TOKEN = "ray_token"
"""File in the run's folder with the token of the run's local Ray."""
TRUSTED = (
    "the network of the Ray cluster is trusted: Ray encrypts nothing by default, so everyone on that network can read and change "
    "this run, and read the cluster's token, whose holders execute commands on the cluster's machines"
)
"""What a trusted network means, for the console."""
_AUTH_MODE = "RAY_AUTH_MODE"
_LOCAL = {
    _AUTH_MODE: "token",
    # Despite its name, this setting makes Ray use the loopback address for this machine.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_CONNECT_S = 5.0
_LOOK_EVERY_S = 1.0
_HEAD_PATIENCE_S = 3.0
_LEAST_STORE_BYTES = 128 * 2**20
_STORE_SHARE = 0.3  # of the machine's memory, which is Ray's default


def library() -> Any:
    """The module `ray`."""
    return require("ray", extra="ray", purpose="--engine ray and what runs on it")


def check_installed() -> None:
    """Refuses to go on without Ray, and does not import it: its environment may not be ready."""
    if find_spec("ray") is None:
        library()


@contextmanager
def own_ray(*, cpus: int, gpus: int, store_bytes: int, folder: Path, trusted: bool = False) -> Iterator[Any]:
    """A local Ray with room for `cpus` processes and its token in `folder`; or the Ray that this process is connected to."""
    if _is_connected():
        ray = library()
        check_network(ray.get_runtime_context().gcs_address, trusted=trusted, default_mode="disabled")
        yield ray
        return
    with _new_token(folder) as token, environment({**_LOCAL, "RAY_AUTH_TOKEN_PATH": str(token)}):
        ray, capacity_bytes = library(), store_capacity(store_bytes)
        _reload_token()
        try:
            settings = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": capacity_bytes}
            _connect(ray, address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **settings)
        except ValueError as error:
            raise ConfigError(
                f"Ray could not start with an object store of {capacity_bytes} bytes: {first_sentence(str(error))}. Free some "
                f"memory and space in /dev/shm, or start Ray yourself and set engine.address."
            ) from error
        head = ClusterHead(ray)
        try:
            yield ray
        finally:
            if not head.answers():
                _kill_local_processes()
            ray.shutdown()


@contextmanager
def cluster(address: str, *, trusted: bool = False) -> Iterator[Any]:
    """A connection to an existing cluster."""
    if _is_connected():
        found = library().get_runtime_context().gcs_address
        if found != address:
            raise ConfigError(
                f"engine.address={address}: this process is already connected to Ray at {found}. Use that, or ray.shutdown() first."
            )
        check_network(address, trusted=trusted, default_mode="disabled")
        yield library()
        return
    host = check_reachable(address)
    check_network(address, trusted=trusted)
    settings = {_AUTH_MODE: os.environ.get(_AUTH_MODE, "token")}
    # Else Ray replaces a loopback address by the machine's network address, where a loopback cluster does not listen.
    with environment({**settings, **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if is_loopback(host) else {})}):
        ray = library()
        try:
            _connect(ray, address=address)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"engine.address={address}: Ray could not be joined there ({first_sentence(str(error))}). Check that it was "
                f"started by `RAY_AUTH_MODE=token ray start --head --node-ip-address HOST --port PORT`, that this machine is "
                f"one of its nodes, and that its token is in ~/.ray/auth_token here, or in the file that RAY_AUTH_TOKEN_PATH names."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def check_reachable(address: str) -> str:
    """Refuses an address where nothing listens, for which Ray would retry for minutes. Returns its host."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        resolved = _resolved(host)
        raise ConfigError(
            f"engine.address={address}: nothing listens there ({error}). {resolved}Give host and port of a Ray that was started by "
            f"`ray start --head --node-ip-address HOST --port PORT`, or leave it out to start one on this machine."
        ) from error
    return host


def is_beyond_loopback(address: str | None) -> bool:
    """Whether a cluster's HOST:PORT is one that other machines may reach. None is a Ray that atoll starts."""
    return address is not None and not is_loopback(address.rpartition(":")[0])


def check_network(address: str, *, trusted: bool, default_mode: str = "token") -> None:
    """Refuses a cluster beyond the loopback interface unless the user trusts its network, and one without authentication there.
    `default_mode` holds if the environment names none: Ray's own is "disabled"."""
    if not is_beyond_loopback(address):
        return
    if not trusted:
        raise ConfigError(
            f"Ray at {address}: other machines may reach it, and Ray encrypts nothing by default. If everyone on that network may "
            f"read and change the run, and execute commands on the cluster's machines, give --set engine.network=trusted; else use "
            f"a Ray on this machine, or --engine elastic."
        )
    if os.environ.get(_AUTH_MODE, default_mode).lower() == "disabled":
        raise ConfigError(
            f"Ray at {address}: without authentication ({_AUTH_MODE}=disabled, or not set when this process connected) everyone "
            f"who reaches it executes commands there. Start the cluster with {_AUTH_MODE}=token, and set it here too."
        )


def _resolved(host: str) -> str:
    """What a name that resolves to a loopback address means, for a message."""
    with suppress(OSError, UnicodeError):
        if is_loopback(found := socket.gethostbyname(host)) and not is_loopback(host):
            return f"{host} is {found} here, where a cluster of several machines does not listen: use the head's IP address. "
    return ""


class ClusterHead:
    """Watches the head of a Ray cluster, its process `gcs_server`. Without it Ray starts nothing any more, and after 60 s ends this
    process without a message of atoll."""

    def __init__(self, ray: Any, log: Callable[[str], object] = lambda line: None) -> None:
        self._log = log
        self.address: str = ray.get_runtime_context().gcs_address
        self._looked_s = self._answered_s = time.monotonic()
        self._logged = False

    def check(self) -> None:
        """Connect to the head, once a second. Raises ExchangeFailed if it has not answered for some seconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if self.answers():
            self._answered_s, self._logged = now_s, False
            return
        if not self._logged:
            self._logged = True
            self._log(f"the head of the Ray cluster at {self.address} does not answer; the run ends if that goes on")
        if now_s - self._answered_s > _HEAD_PATIENCE_S:
            raise ExchangeFailed(
                f"the head of the Ray cluster at {self.address} does not answer any more: its process gcs_server has died, or this "
                f"machine is cut off from it. The run cannot go on without it. Start the cluster again if it is your own, and "
                f"resume the run with --resume."
            )

    def answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_LOOK_EVERY_S).close()
        except OSError:
            return False
        return True


def _kill_local_processes() -> None:
    """Kill all processes of a local Ray whose head is lost: some of them would wait for the head for ever."""
    psutil = require("psutil", extra="ray", purpose="--engine ray and what runs on it")
    node = require("ray._private.worker", extra="ray", purpose="--engine ray and what runs on it")._global_node
    processes = []
    for info in (info for infos in node.all_processes.values() for info in infos):
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(info.process.pid)
            processes += [parent, *parent.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_CONNECT_S)


def _is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _connect(ray: Any, **settings: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, configure_logging=True, logging_level=logging.ERROR, **settings)
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the program's handler


def store_capacity(wanted_bytes: int) -> int:
    """The capacity of the object store, within Ray's limits. Ray spills objects beyond it to disk."""
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_LEAST_STORE_BYTES, min(wanted_bytes, int(_STORE_SHARE * all_bytes)))


def _reload_token() -> None:
    """Drops the token of an earlier run in this process, which Ray has cached."""
    raylet = require("ray._raylet", extra="ray", purpose="--engine ray and what runs on it")
    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:
        raise ConfigError(
            "Ray was imported without its token authentication, and cannot turn it on any more. Set RAY_AUTH_MODE=token in the "
            "environment of this process, or import ray after atoll has started it."
        )
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _new_token(folder: Path) -> Iterator[Path]:
    """A file with a new token that only its owner can read. It is removed at the end."""
    path = folder / TOKEN
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
