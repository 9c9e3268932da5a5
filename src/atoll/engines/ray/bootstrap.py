"""Ray itself: the one place that imports it, and how it is started or joined.

Ray reads from the environment, when it is first imported, whether callers must know a token, and where the token is. So this sets
these before the import. A Ray of our own listens on this machine's loopback alone, with a token that is made for it and lies in a
file that only its owner reads; it has no dashboard. A cluster that exists is joined with the token that its user has for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require

TOKEN = "ray_token"
"""The file with the token of a run's own Ray, in the run's folder."""
_LOCAL = {
    "RAY_AUTH_MODE": "token",
    # Ray calls it a cluster for one machine; then addresses of this machine are the loopback's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONNECT_S = 5.0
_LEAST_STORE_BYTES = 128 * 2**20
_STORE_SHARE = 0.3  # of the machine's memory, as Ray itself takes where nobody asks


def library() -> Any:
    """The library."""
    return require("ray", extra="ray", purpose="--engine ray and what runs on it")


def check_installed() -> None:
    """Refuse what needs the library where there is none, without importing it: its environment may not be ready."""
    if find_spec("ray") is None:
        library()


@contextmanager
def own_ray(*, cpus: int, gpus: int, store_bytes: int, folder: Path) -> Iterator[Any]:
    """A Ray on this machine, for as long as this is open. One that this process is connected to already is used as it is.

    Args:
        cpus: for how many processes there is to be room.
        gpus: of this machine.
        store_bytes: what the object store must hold at least.
        folder: where its token lies.
    """
    if _is_connected():
        yield library()
        return
    with _new_token(folder) as token, _environment({**_LOCAL, "RAY_AUTH_TOKEN_PATH": str(token)}):
        ray, room_bytes = library(), store_room(store_bytes)
        _take_token()
        try:
            _connect(
                ray,
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=room_bytes,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
            )
        except ValueError as error:
            raise ConfigError(
                f"Ray could not be started with an object store of {room_bytes} bytes: {_first_sentence(error)}. Make room in "
                f"memory and in /dev/shm, or start Ray yourself and give its --ray-address."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """A cluster that exists, for as long as this is open."""
    if _is_connected():
        yield _connected_to(address)
        return
    host = reachable(address)
    wanted = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    # Else Ray takes the loopback for the address that the machine has in its network, where a cluster on the loopback is not.
    with _environment({**wanted, **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if host in _LOOPBACK else {})}):
        ray = library()
        try:
            _connect(ray, address=address)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"--ray-address {address}: Ray could not be joined there ({_first_sentence(error)}). See that it was started "
                f"by `RAY_AUTH_MODE=token ray start --head --node-ip-address HOST --port PORT`, that this machine is one of its "
                f"nodes, and that its token is in ~/.ray/auth_token here, or in the file that RAY_AUTH_TOKEN_PATH names."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _connected_to(address: str) -> Any:
    """The library, if this process is connected to that very cluster."""
    ray = library()
    found = ray.get_runtime_context().gcs_address
    if found != address:
        raise ConfigError(
            f"--ray-address {address}: this process is connected to Ray at {found} already. Give that one, or ray.shutdown() first."
        )
    return ray


def reachable(address: str) -> str:
    """The host of an address at which somebody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ray-address {address}: nothing answers there ({error}). Give host and port of a Ray that was started by `ray start "
            f"--head --node-ip-address HOST --port PORT`, or leave it out to start one on this machine."
        ) from error
    return host


def _is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _connect(ray: Any, **settings: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, configure_logging=True, logging_level=logging.ERROR, **settings)
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has put its own in the place of one that the program has


def store_room(wanted_bytes: int) -> int:
    """How large the object store is to be: as wanted, but not so that Ray refuses. What does not fit it puts on the disk."""
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_LEAST_STORE_BYTES, min(wanted_bytes, int(_STORE_SHARE * all_bytes)))


def _take_token() -> None:
    """Ray keeps in mind the token that it read first, of an earlier run in this process."""
    inside = require("ray._raylet", extra="ray", purpose="--engine ray and what runs on it")
    if inside.get_authentication_mode() != inside.AuthenticationMode.TOKEN:
        raise ConfigError(
            "Ray was imported before, without its token authentication, and cannot turn it on any more. Set RAY_AUTH_MODE=token "
            "in the environment of this process, or import ray after atoll has started it."
        )
    inside.AuthenticationTokenLoader.instance().reset_cache()


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0]


@contextmanager
def _new_token(folder: Path) -> Iterator[Path]:
    """A file with a new token, which only its owner can read; it is removed with the Ray that it was made for."""
    path = folder / TOKEN
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """For a while, and for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
