"""Launching an elastic run: this process supervises the rendezvous and the islands of this machine until the run is finished."""

from __future__ import annotations

import gc
import os
import platform
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed, is_disk_full
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm
from atoll.engines.elastic.island import Interpose, IslandProcess
from atoll.engines.elastic.membership import log_while_waiting, retry
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous, free_port
from atoll.engines.elastic.spec import Elastic, JoinInfo, check_address
from atoll.engines.elastic.state_version import refuse_unreplicated
from atoll.engines.elastic.supervisor import STATELESS, ProcessHooks, Supervisor
from atoll.engines.liveness import exit_with, write_log_line
from atoll.engines.run_lifecycle import Result, RunRequest, RunTask
from atoll.engines.spec import read_spec, with_settings, write_spec
from atoll.runs.validation import check_devices_share_batch
from atoll.telemetry.sinks import Fanout


def start(request: RunRequest) -> Result:
    if request.workload is not None:
        raise ConfigError(
            "a user's workload lives in this process, and the islands that it starts would not have it. Use --engine processes "
            "under torchrun, or leave the workload out."
        )
    if request.run is not None and not isinstance(request.run.algorithm, AsyncAlgorithm):  # the spec refuses those
        algorithm: Any = request.run.resolved.algorithm
        refuse_unreplicated(algorithm, algorithm.init(Tree.of({"w": torch.zeros(1)}), SimpleNamespace(rank=0, size=1)))
    spec = request.spec if request.spec is not None or request.out is None else read_spec(request.out)
    if isinstance(spec, Elastic):
        check_own_address(spec)
    with request.open() as task:
        if not task.finished:
            supervise(task)
        return task.reopen()


def check_own_address(spec: Elastic) -> None:
    """Refuse to listen on an address that is not this machine's, before the run has a folder."""
    try:
        socket.create_server((spec.host, 0)).close()
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"engine.listen={spec.listen}: this machine cannot listen there ({why}). Give one of its own IPv4 "
            f"addresses or its name, or leave it out for islands on this machine alone."
        ) from error


def joining_line(address: str) -> str:
    """How to join the run.

    >>> joining_line("127.0.0.1:7000")
    'join this run: atoll run --join 127.0.0.1:7000 (on this machine alone; set engine.listen to let other machines join)'
    """
    alone = address.startswith(("127.", "localhost:"))
    note = " (on this machine alone; set engine.listen to let other machines join)" if alone else ""
    return f"join this run: atoll run --join {address}{note}"


def supervise(task: RunTask) -> None:
    """Start the islands of this machine, restart those that die, and return when the run is finished."""
    spec = task.spec
    assert isinstance(spec, Elastic)
    check_devices_share_batch(task.run, spec.devices)
    # The run's work stays divided by the planned islands. Its port stays the same, so that joiners find it again, if it is free.
    listen = f"{spec.host}:{free_port(spec.host, spec.port)}"
    spec = replace(spec, processes=spec.processes or task.run.cluster.islands, listen=listen)
    task = replace(task, spec=spec)
    write_spec(task.folder.path, spec)
    with Fanout(list(task.sinks)) as sink:
        if task.run.train.warm_start_steps:  # once, before the islands that all start from it
            task.preparation.warm_start(task.folder.warm_start, sink)
        with task.injecting(ProcessHooks()) as hooks:
            supervisor = Supervisor(task, sink, hooks)
            task.log(hooks.joining or joining_line(supervisor.address))
            supervisor.run()


LOCAL_TIMEOUT_S = 60.0
"""How long an island that the supervisor started looks for the run."""
_JOINERS_OWN = ("engine.devices", "engine.join_timeout_s")
_POLL_S = 0.2


def join_run(address: str, settings: Sequence[str], others: Sequence[str] = ()) -> None:
    """Be one more island of the run at this address, HOST:PORT. A joiner has two settings of its own: `engine.devices`, by default
    as the run's islands have, and `engine.join_timeout_s`. Refuses all other settings, and the user's other options."""
    foreign = [setting for setting in settings if setting.partition("=")[0] not in _JOINERS_OWN]
    if others or foreign:
        raise ConfigError(
            f"{shown_text(', '.join([*others, *foreign]))} with --join: a joiner fetches the run from its address. Its own "
            f"settings are {' and '.join(_JOINERS_OWN)}. Leave out the others."
        )
    spec = with_settings(Elastic(), settings)
    assert isinstance(spec, Elastic)
    check_address(address)
    if spec.join_timeout_s:
        log(f"looking for the run at {address} for at most {spec.join_timeout_s:g} s; Ctrl-C ends it")
    # Two containers on one machine's network may have the same host name and the same process id.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    own_devices = any(setting.startswith("engine.devices=") for setting in settings)
    run_island(address, name, None, devices=spec.devices if own_devices else None, join_timeout_s=spec.join_timeout_s)


def run_island(
    address: str,
    name: str,
    folder: Path | None,
    *,
    devices: int | None = None,
    interpose: Interpose | None = None,
    join_timeout_s: float = LOCAL_TIMEOUT_S,
) -> NoReturn:
    """Be the island of this name, unlike all others', until the run at this address is over, then end the process. A joiner has no
    `folder`, and looks for the run for `join_timeout_s`."""
    if folder is not None:
        end_with_supervisor()
    os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every quorum
    try:
        join_info = fetch_join_info(address, join_timeout_s) if folder is not None else _find_run(address, join_timeout_s)
        host = _host_towards(address)
        torch.set_num_threads(join_info.run.cluster.threads_per_island)
        log(f"{name} on {platform.node()} ({host}), process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        gc.freeze()  # each change of members collects garbage while others wait, and imported modules are none
        with ExitStack() as stack:
            island = IslandProcess(join_info, address, host, name, folder, log, interpose, devices)
            stack.push(lambda kind, error, trace: island.close(wait=kind is None))
            island.run()
    except NoState as error:  # another island may have the state that this one could not read
        exit_with(error, sys.stderr, code=STATELESS)
    except CheckpointError as error:  # in the middle of the run: the supervisor restarts the island
        exit_with(error, sys.stderr, code=1)
    except BaseException as error:
        exit_with(error, sys.stderr, code=1 if is_disk_full(error) else None)
    sys.stdout.flush()
    os._exit(0)  # threads of the communication may still wait for a peer


def run_rendezvous(join_info: Path, address: str) -> NoReturn:
    """Be the rendezvous of a run until this process is ended."""
    end_with_supervisor()
    info = JoinInfo.from_text(join_info.read_text("utf-8", errors="replace"))
    try:
        rendezvous = Rendezvous(info, address)
    except BaseException as error:
        exit_with(error, sys.stderr)
    try:
        while True:
            signal.pause()
    finally:
        rendezvous.close()


def fetch_join_info(address: str, timeout_s: float) -> JoinInfo:
    """What the run at this address is."""
    registry = RegistryClient(address)

    def fetch() -> JoinInfo:
        text = registry.join_info()
        if text is None:
            raise ExchangeFailed(f"the run at {address} has published nothing for {timeout_s:.0f} s. Start it again.")
        return JoinInfo.from_text(text)

    with log_while_waiting(log, f"waiting for the run at {address}"):
        return retry(fetch, ExchangeFailed, timeout_s, _POLL_S)


def _find_run(address: str, timeout_s: float) -> JoinInfo:
    """What a joiner's run is. A mistyped address ends the joiner at once, unless the user lets it wait."""
    try:
        return fetch_join_info(address, timeout_s)
    except ExchangeFailed as error:
        why = str(error.__cause__ or error)
        raise ConfigError(
            f"--join {address}: no run answers there ({why}). Give the address that the run printed when it started; if it may "
            f"appear later, let the joiner wait: --set engine.join_timeout_s=600."
        ) from error


def end_with_supervisor() -> None:
    """End this process when the supervisor does, which holds the other end of its input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="orphan", daemon=True).start()


def log(text: str) -> None:
    write_log_line(sys.stderr, text)  # the supervisor redirects it


def _host_towards(address: str) -> str:
    """The address of this machine on the route to the rendezvous."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        found: str = connection.getsockname()[0]
        return found
