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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import AsyncAlgorithm
from atoll.engines.elastic.island import Interpose, IslandProcess
from atoll.engines.elastic.membership import log_while_waiting, retry
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous, free_port
from atoll.engines.elastic.spec import Elastic, JoinInfo, check_address
from atoll.engines.elastic.state_version import refuse_unreplicated
from atoll.engines.elastic.supervisor import STATELESS, ProcessHooks, Supervisor
from atoll.engines.liveness import exit_with
from atoll.engines.run_lifecycle import Result, RunRequest, RunTask
from atoll.engines.spec import with_settings, write_spec
from atoll.runs.folder import RunFolder
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
    with request.open() as task:
        if not task.finished:
            supervise(task)
        return task.reopen()


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


OWN_SETTINGS = ("engine.devices", "engine.rescue_dir", "engine.listen")
"""Of a joiner."""
JOIN_TIMEOUT_S, LOCAL_TIMEOUT_S = 3600.0, 60.0
"""How long a joiner, and an island that the supervisor started, look for the run."""
_POLL_S = 0.2


def join_run(address: str, settings: Sequence[str], others: Sequence[str] = (), out: Path | None = None) -> None:
    """Be one more island of the run at this address, HOST:PORT, or at the first of several that answers. A joiner has settings of
    its own: `engine.devices`, by default as the run's islands have, `engine.rescue_dir`, and `engine.listen`. With `out` it keeps a
    copy of the run's folder there, and with `engine.listen`, too, it runs a standby rendezvous. Refuses all other settings, and the
    user's other options."""
    foreign = [setting for setting in settings if setting.partition("=")[0] not in OWN_SETTINGS]
    if others or foreign:
        raise ConfigError(
            f"{', '.join([*others, *foreign])} with --join: a joiner fetches the run from its address. Its own are --set "
            f"{' and '.join(OWN_SETTINGS)} alone. Leave out the others."
        )
    if out is None and any(setting.startswith("engine.listen=") for setting in settings):
        raise ConfigError("engine.listen with --join: a joiner listens for others if it keeps a copy of the run. Add --out DIR.")
    with_settings(Elastic(), settings)  # refuses impossible values before the joiner looks for the run
    check_address(address)
    # The run may be started after the joiner. A user who mistyped the address learns how long the joiner looks for it.
    log(f"looking for the run at {address} for at most {JOIN_TIMEOUT_S:.0f} s; Ctrl-C ends it")
    # Two containers on one machine's network may have the same host name and the same process id.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    run_island(address, name, None, settings=settings, out=out)


def run_island(
    address: str,
    name: str,
    folder: Path | None,
    *,
    settings: Sequence[str] = (),
    out: Path | None = None,
    interpose: Interpose | None = None,
    process: str | None = None,
) -> NoReturn:
    """Be the island of this name, unlike all others', until the run at this address is over, then end the process. An island that
    the supervisor started has the run's `folder`; a joiner may have settings of its own, and a folder `out` of its own."""
    if folder is not None:
        end_with_supervisor()
    os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every quorum
    try:
        join_info, address = fetch_join_info(address, LOCAL_TIMEOUT_S if folder is not None else JOIN_TIMEOUT_S)
        host = _host_towards(address)
        torch.set_num_threads(join_info.run.cluster.threads_per_island)
        log(f"{name} on {platform.node()} ({host}), process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        gc.freeze()  # each change of members collects garbage while others wait, and imported modules are none
        with ExitStack() as stack:
            own = with_settings(join_info.spec, settings) if folder is None else None
            assert own is None or isinstance(own, Elastic)
            if out is not None:
                folder = stack.enter_context(folder_copy(out, join_info))
            standby = None
            if own is not None and any(setting.startswith("engine.listen=") for setting in settings):
                first = join_info.first or (address, join_info.lighthouse)
                standby = Rendezvous(replace(join_info, lighthouse=f"{own.host}:{free_port(own.host)}", first=first), own.listen)
                stack.callback(standby.close)
                log(f"{name} runs a standby rendezvous at {standby.address}: atoll run --join {address},{standby.address}")
            island = IslandProcess(join_info, address, host, name, folder, log, interpose, own, process, standby)
            stack.push(lambda kind, error, trace: island.close(wait=kind is None))
            island.run()
    except NoState as error:  # another island may have the state that this one could not read
        exit_with(error, code=STATELESS)
    except CheckpointError as error:  # in the middle of the run: the supervisor restarts the island
        exit_with(error, code=1)
    except BaseException as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(0)  # threads of the communication may still wait for a peer


def run_rendezvous(join_info: Path, address: str) -> NoReturn:
    """Be the rendezvous of a run until this process is ended."""
    end_with_supervisor()
    info = JoinInfo.from_text(join_info.read_text("utf-8"))
    try:
        rendezvous = Rendezvous(info, address)
    except BaseException as error:
        exit_with(error)
    try:
        while True:
            signal.pause()
    finally:
        rendezvous.close()


@contextmanager
def folder_copy(path: Path, join_info: JoinInfo) -> Iterator[Path]:
    """A joiner's own folder of the run, new or from an earlier time, which no other process uses."""
    if path.is_dir() and any(path.iterdir()):
        folder = RunFolder.open(path)
        folder.same_run(join_info.run)
    else:
        folder = RunFolder.create(path, join_info.run, sys.argv)
    with folder.lock():
        # Resumed on this machine the run has one island at first, and listens where its user says.
        write_spec(folder.path, replace(join_info.spec, listen="127.0.0.1:0", processes=1))
        yield folder.path


def fetch_join_info(addresses: str, timeout_s: float) -> tuple[JoinInfo, str]:
    """What the run at the first of these addresses that answers is, and that address."""
    registries = {address: RegistryClient(address) for address in addresses.split(",")}

    def fetch() -> tuple[JoinInfo, str]:
        missing: ExchangeFailed | None = None
        for address, registry in registries.items():
            try:
                if (text := registry.join_info()) is not None:
                    return JoinInfo.from_text(text), address
                missing = ExchangeFailed(f"the run at {address} has published nothing for {timeout_s:.0f} s. Start it again.")
            except ExchangeFailed as error:
                missing = error
        assert missing is not None
        raise missing

    with log_while_waiting(log, f"waiting for the run at {addresses}"):
        return retry(fetch, ExchangeFailed, timeout_s, _POLL_S)


def end_with_supervisor() -> None:
    """End this process when the supervisor does, which holds the other end of its input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="orphan", daemon=True).start()


def log(text: str) -> None:
    with suppress(OSError):  # a log that cannot be written ends nothing
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201, the supervisor redirects it


def _host_towards(address: str) -> str:
    """The address of this machine on the route to the rendezvous."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        found: str = connection.getsockname()[0]
        return found
