"""Launching an elastic run: this process supervises the rendezvous and the islands of this machine until the run is finished."""

from __future__ import annotations

import gc
import os
import platform
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed, is_disk_full
from atoll.core.flat_tree import Tree
from atoll.core.library_logs import quieten
from atoll.core.optional_imports import require
from atoll.core.protocols import AsyncAlgorithm, Workload
from atoll.core.serialization import load_tree
from atoll.core.verified_files import expanded
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayNetwork, joiner_network, local_network
from atoll.engines.elastic.gateway_protocol import WrongGateway
from atoll.engines.elastic.gpu_claims import claim_devices
from atoll.engines.elastic.island import COMMITTED, FolderLost, Interpose, IslandOutput, IslandProcess
from atoll.engines.elastic.leader_event_log import refuse_folders
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous, check_free
from atoll.engines.elastic.retry import retry
from atoll.engines.elastic.run_identity import JoinFile, RunSecrets, run_id_of
from atoll.engines.elastic.spec import Elastic, JoinInfo, check_address
from atoll.engines.elastic.standby_rendezvous import SecuredStandby, TrustedStandby
from atoll.engines.elastic.state_version import refuse_unreplicated
from atoll.engines.elastic.supervised_process import RESCUED, STATELESS
from atoll.engines.elastic.supervisor import ProcessHooks, Supervisor
from atoll.engines.liveness import append_log_line, exit_with, interrupted_by_signals, log_while_waiting, write_log_line
from atoll.engines.network_interfaces import LOOPBACK, free_port, is_dialled, is_loopback
from atoll.engines.run_lifecycle import Result, RunRequest, RunTask
from atoll.engines.spec import read_spec, with_settings, write_spec
from atoll.engines.user_code import LoopMember, LoopWorkload, load_user_code
from atoll.runs.folder import RunFolder
from atoll.runs.settings_validation import check_devices_share_batch
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.sinks import Fanout
from atoll.telemetry.summary import read_summary


def start(request: RunRequest) -> Result:
    """Of a user's loop the result has no module: this process does not have its model."""
    if request.workload is not None and not request.code:
        raise ConfigError(
            "a user's workload lives in this process, and the islands that it starts would not have it. Name a function that every "
            'island calls for it: workload="FILE.py:NAME"; or use --engine processes under torchrun.'
        )
    loop = request.workload if isinstance(request.workload, LoopWorkload) else None
    if request.run is not None and not isinstance(request.run.algorithm, AsyncAlgorithm):  # the spec refuses those
        algorithm: Any = request.run.resolved.algorithm
        names = ["w", *(f"layers.{number}.w" for number in range(getattr(algorithm, "fragments", 0)))]
        params = Tree.of({name: torch.zeros(1) for name in names})
        refuse_unreplicated(algorithm, algorithm.init(params, SimpleNamespace(rank=0, size=1)))
    spec = request.spec if request.spec is not None or request.out is None else read_spec(request.out)
    if isinstance(spec, Elastic):  # before there is a folder
        if request.run is not None:  # libraries are of no use to a run that these islands cannot carry out
            spec.fitted(request.run)
        check_platform()
        # Processes of an interrupted run may still have its port: `supervise` waits for that.
        check_free(spec.listen, any_port=request.run is None)
        if spec.secured:
            require("cryptography.x509", extra="torchft", purpose="elastic runs across machines")
    with request.open() as task:
        if not task.finished:
            supervise(task)
        if not loop:
            return task.reopen()
        return Result(read_summary(task.folder.path), loop.module(), load_tree(task.folder.final), task.folder.path)


def check_platform() -> None:
    """Refuses another system than Linux, and an environment without torchft."""
    if sys.platform != "linux":
        raise ConfigError(
            f"elastic runs need Linux, and this is {sys.platform}, for which torchft has no build. Use another engine, or a "
            f"container with Linux."
        )
    quieten()
    for library in ("torchft.coordination", "xxhash"):
        require(library, extra="torchft", purpose="elastic runs")


def joining_lines(spec: Elastic, folder: Path, address: str) -> str:
    """How to join the run at this address, and what its network means.

    >>> joining_lines(Elastic(), Path("run"), "127.0.0.1:7000")
    'join this run: atoll run --join 127.0.0.1:7000 (on this machine alone; set engine.listen to let other machines join)'
    """
    if spec.secured:
        where = ", ".join(spec.addresses)
        return f"join this run: `atoll invite {folder}` here writes FILE; copy it; `atoll run --join FILE` there dials {where}"
    if is_loopback(spec.host):
        return f"join this run: atoll run --join {address} (on this machine alone; set engine.listen to let other machines join)"
    return (
        f"join this run: atoll run --join {address} --set engine.network=trusted\n"
        f"engine.network=trusted: every machine that reaches the ports of {spec.host} can read, replace and stop this run"
    )


def supervise(task: RunTask) -> None:
    """Start the islands of this machine, restart those that die, and return when the run is finished."""
    spec = task.spec
    assert isinstance(spec, Elastic)
    check_devices_share_batch(task.run, spec.devices)
    refuse_folders(task.folder)
    # The run's work stays divided by the planned islands.
    spec = replace(spec, processes=spec.processes or task.run.cluster.islands)
    write_spec(task.folder.path, spec)
    spec = replace(spec, listen=_listen_address(spec, task.folder.path))
    if spec.secured:
        RunSecrets.create(task.folder.path)
    task = replace(task, spec=spec)
    with Fanout(list(task.sinks)) as sink:
        if task.run.train.warm_start_steps:  # once, before the islands that all start from it
            task.preparation.warm_start(task.folder.warm_start, sink)
        with task.injecting(ProcessHooks()) as hooks:
            supervisor = Supervisor(task, sink, hooks)
            task.log(hooks.joining or joining_lines(spec, task.folder.path, supervisor.address))
            supervisor.run()


def _listen_address(spec: Elastic, folder: Path) -> str:
    """Where the run listens. A port that the user chose must be free; else the run keeps its former port if it is free, so that
    joiners find a resumed run again."""
    if spec.port:
        retry(lambda: check_free(spec.listen), ConfigError, _PORT_LIMIT_S, _POLL_S)
        return spec.listen
    former = JoinInfo.former(folder)
    return f"{spec.host}:{free_port(spec.host, former.spec.port if former and former.spec.host == spec.host else 0)}"


LOCAL_TIMEOUT_S = 60.0
"""How long an island that the supervisor started looks for the run."""
_PORT_LIMIT_S = 2.0
"""How long processes of an interrupted run may still have its port when it is resumed."""
_REVOKED_S, _REVOKED_KNOWN_S = 0.5, 3.0
"""How often the list of revoked join files is published, and how long it may take until all islands have read it."""
_JOINERS_OWN = ("engine.devices", "engine.network", "engine.join_timeout_s", "engine.rescue_dir", "engine.listen")
_POLL_S = 0.2


def invite_joiner(folder: Path, out: Path | None, revoke: str | None, standby: str | None = None, *, rotate: bool) -> str:
    """Write a join file for the run in this folder, which may allow its machine to run a standby rendezvous at the address
    `standby`; or revoke one, or all. Returns what was done, in words."""
    RunFolder.open(folder)
    if (out is not None or standby is not None) + (revoke is not None) + rotate > 1:
        raise ConfigError("--revoke and --rotate exclude each other, --out and --standby. Use one of them.")
    if standby is not None and not is_dialled(standby):
        raise ConfigError(
            f"--standby {shown_text(standby)}: other machines dial the standby rendezvous at HOST:PORT, such as 203.0.113.6:29400."
        )
    info = JoinInfo.former(folder)
    if info is None:
        raise ConfigError(f"{folder} has no elastic run that was started with this version of atoll. Start it, then invite.")
    if not info.spec.secured:
        raise ConfigError(
            f"{folder} listens on {info.spec.listen} with engine.network={info.spec.network}, where join files admit no machine. "
            f"Resume it with --set engine.listen=HOST:PORT, an address that other machines reach, and engine.network=tls."
        )
    if rotate:
        if standbys := RunSecrets.create(folder).standbys:
            for identity in standbys:
                RunSecrets.revoke(folder, identity)
            time.sleep(_REVOKED_KNOWN_S)
        RunSecrets.rotate(folder)
        return "the run's certificates are new. Every join file written before is void."
    if revoke is not None:
        RunSecrets.revoke(folder, revoke)
        return f"the join file {revoke} is revoked."
    join = RunSecrets.invite(folder, info.spec.addresses, standby or "", info.run_digest)
    identity = join.credentials.identity
    path = out or Path(f"join-{identity}.json")
    join.write(path)
    more = " --out COPY --set engine.listen=HOST:PORT" if standby else ""
    return (
        f"{path}\nid {identity}, dials {', '.join(join.addresses)}. It holds a key: copy it over a secure channel, and use it "
        f"there with: atoll run --join {path.name}{more}"
    )


@dataclass(frozen=True)
class Joiner:
    """What an island that joins a run has of its own.

    Args:
        file: that admits it; None: it knows the run's address, on loopback or in a trusted network.
        timeout_s: how long it looks for the run.
        devices: of this island; None: as many as the run's islands have.
        rescue_dir: where it saves a state that it could not hand on; None: a folder in its working directory.
        out: a folder for a copy of the run's; None: it keeps none.
        standby: HOST:PORT of a standby rendezvous, which it runs beside its copy; None: it runs none.
    """

    file: JoinFile | None = None
    timeout_s: float = 0.0
    devices: int | None = None
    rescue_dir: str | None = None
    out: Path | None = None
    standby: str | None = None


class JoinerScreen:
    """What a joiner shows on its terminal: the progress of the run, and all lines of its log but those about single commits."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._console: ConsoleSink | None = None

    def open(self, recipe: str, folder: Path, name: str) -> ConsoleSink:
        """The joiner has found the run. From now on it also keeps a log, in this folder."""
        self._path = (folder / f"atoll-{name}.log").absolute()
        self.log(f"found the run of {recipe}, and joins it as {name}; log: {self._path}")
        self._console = ConsoleSink(recipe)
        return self._console

    def log(self, line: str) -> None:
        if self._path is not None:
            append_log_line(self._path, line)
        if not line.startswith(COMMITTED):
            with suppress(OSError):  # the terminal may be gone
                sys.stderr.write(f"{line}\n")

    def close(self, line: str = "") -> None:
        """The joiner ends, with this closing line if it has succeeded."""
        if self._console is not None:
            with suppress(OSError):
                self._console.close()
        if line:
            self.log(line)


def join_run(
    where: str, settings: Sequence[str], others: Sequence[str] = (), out: Path | None = None, code: str | None = None
) -> None:
    """Run one more island of the run that a join file admits to; or of the run at HOST:PORT, on loopback or in a trusted network,
    or at the first of several addresses that answers. A joiner has settings of its own: `engine.devices`, by default as the run's
    islands have, `engine.network`, `engine.join_timeout_s`, `engine.rescue_dir` and `engine.listen`. With `out` it keeps a copy of
    the run's folder there, and with `engine.listen`, too, it runs a standby rendezvous. `code` names the user's workload or loop,
    if the run has one. Refuses all other settings, and the user's other options."""
    foreign = [setting for setting in settings if setting.partition("=")[0] not in _JOINERS_OWN]
    if others or foreign:
        raise ConfigError(
            f"{shown_text(', '.join([*others, *foreign]))} with --join: a joiner fetches the run from its address. Its own "
            f"settings are {', '.join(_JOINERS_OWN[:-1])} and {_JOINERS_OWN[-1]}. Leave out the others."
        )
    given = {setting.partition("=")[0] for setting in settings}
    spec = with_settings(Elastic(), settings)
    assert isinstance(spec, Elastic)
    file = JoinFile.read(Path(where)) if os.path.isfile(where) else None
    if file is None and (where.endswith(".json") or "/" in where):
        raise ConfigError(
            f"--join {shown_text(where)}: there is no file {shown_text(where)}. `atoll invite DIR` writes join files."
        )
    if file is None:
        check_address(where)
        if spec.network == "tls" and not all(is_loopback(one.rpartition(":")[0]) for one in where.split(",")):
            raise ConfigError(
                f"--join {where}: another machine admits joiners by a join file. Run `atoll invite DIR` there, copy the file that "
                f"it writes, and use `--join FILE`; or, if the run has engine.network=trusted, add --set engine.network=trusted."
            )
    if "engine.listen" in given:
        _check_standby(spec, file, out)
    check_platform()
    address = ", ".join(file.addresses) if file else where
    if spec.join_timeout_s:
        log(f"looking for the run at {address} for at most {spec.join_timeout_s:g} s; Ctrl-C ends it")
    # Two containers on one machine's network may have the same host name and the same process id.
    name = re.sub(r"[^\w.-]", "-", f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}", flags=re.ASCII)
    devices = spec.devices if "engine.devices" in given else None
    standby = spec.listen if "engine.listen" in given else None
    joiner = Joiner(file, spec.join_timeout_s, devices, spec.rescue_dir, None if out is None else expanded(out), standby)
    with interrupted_by_signals():
        run_island(address, name, None, joiner=joiner, code=code)


def _check_standby(spec: Elastic, file: JoinFile | None, out: Path | None) -> None:
    """Refuse a standby rendezvous that could not take over."""
    if out is None:
        raise ConfigError("engine.listen with --join: a joiner listens for others if it keeps a copy of the run. Add --out DIR.")
    if not file.standby if file is not None else spec.secured:
        raise ConfigError(
            f"engine.listen={spec.listen} with --join: a standby rendezvous needs a join file that allows it. Write one with "
            f"`atoll invite DIR --standby HOST:PORT` on the machine with the run's folder; or, if the run has "
            f"engine.network=trusted, join by its address with --set engine.network=trusted."
        )
    check_free(spec.listen)


def run_island(
    address: str,
    name: str,
    folder: Path | None,
    *,
    joiner: Joiner | None = None,
    interpose: Interpose | None = None,
    process: str | None = None,
    code: str | None = None,
) -> NoReturn:
    """Run the island of this name, which no other island has, until the run at this address is over, then end the process. An
    island that the supervisor started has the run's `folder`; another one is a `joiner`. `code` names the user's workload or
    loop."""
    if folder is not None:
        end_with_supervisor()
    screen = JoinerScreen() if folder is None else None
    write_line: Callable[[str], object] = screen.log if screen is not None else log
    no_gateway: list[Exception] = []

    def refused(error: Exception) -> None:
        if not isinstance(error, WrongGateway):
            exit_with(error, sys.stderr)
        no_gateway.append(error)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # the island saves its state

    try:
        joiner = joiner or Joiner()
        join_info, network = find_run(address, name, folder, joiner, refused)
        torch.set_num_threads(join_info.run.cluster.threads_per_island)
        write_line(f"{name} on {platform.node()} ({network.host}), process {os.getpid()}, {torch.get_num_threads()} thread(s)")
        gc.freeze()  # each change of members collects garbage while others wait, and imported modules are none
        with ExitStack() as stack:
            own, standby = None, ""
            if folder is None:
                own = replace(join_info.spec, devices=joiner.devices or join_info.spec.devices, rescue_dir=joiner.rescue_dir)
                if joiner.out is not None:
                    folder = stack.enter_context(folder_copy(joiner.out, join_info))
                if joiner.standby is not None:
                    standby = stack.enter_context(open_standby(joiner, join_info, network, name, address, write_line))
            output = IslandOutput(write_line)
            if screen is not None:
                shown = screen.open(join_info.run.recipe, folder / "logs" if folder is not None else Path(), name)
                output = IslandOutput(write_line, shown)
            opened: list[IslandProcess] = []

            def open_island(workload: Workload | None) -> IslandProcess:
                island = IslandProcess(join_info, network, name, folder, output, interpose, own, process, standby, workload)
                stack.push(lambda kind, error, trace: island.close(wait=kind is None))
                opened.append(island)
                if mine is not None:
                    island.compare_code(digest)
                return island

            mine = load_user_code(code) if code is not None else None
            digest = "" if mine is None else mine.digest  # now: a loop opens its island later, and its file may change
            if mine is None or mine.loop is None:
                open_island(None if mine is None else mine.open()).run()
            else:
                run = join_info.run.resolved
                (device,), claims = claim_devices(run, name, 1)
                for claim in claims:
                    stack.enter_context(claim)
                member = LoopMember(run, open_island, name, device)
                mine.loop(member)
                member.check_entered()
        if screen is not None:
            copy = f", and in {folder}" if folder is not None else ""
            screen.close(f"finished: {name} {opened[0].outcome}. The results are in the run's own folder{copy}")
    except NoState as error:  # another island may have the state that this one could not read
        exit_with(error, sys.stderr, code=STATELESS)
    except FolderLost as error:
        exit_with(error, sys.stderr, code=RESCUED)
    except CheckpointError as error:  # in the middle of the run: the supervisor restarts the island
        exit_with(error, sys.stderr, code=1)
    except BaseException as error:
        if screen is not None:
            screen.close()
        why = no_gateway[0] if no_gateway else error
        exit_with(why, sys.stderr, code=1 if is_disk_full(error) else None)
    sys.stdout.flush()
    os._exit(0)  # threads of the communication may still wait for a peer


@contextmanager
def folder_copy(path: Path, join_info: JoinInfo) -> Iterator[Path]:
    """A joiner's own folder of the run, new or from an earlier time, which no other process uses."""
    if path.is_dir() and any(path.iterdir()):
        folder = RunFolder.open(path)
        folder.same_run(join_info.run)
        refuse_folders(folder)
    else:
        folder = RunFolder.create(path, join_info.run, sys.argv)
    with folder.lock():
        # Resumed on this machine the run has one island at first, and listens where its user says.
        write_spec(folder.path, replace(join_info.spec, listen=f"{LOOPBACK}:0", advertise="", processes=1))
        yield folder.path


@contextmanager
def open_standby(
    joiner: Joiner, join_info: JoinInfo, network: DirectNetwork, name: str, address: str, write_line: Callable[[str], object]
) -> Iterator[str]:
    """A rendezvous of the run beside its own at `address`, in this process. Gives its name."""
    assert joiner.standby is not None
    assert joiner.out is not None
    standby: TrustedStandby | SecuredStandby
    if joiner.file is not None and isinstance(network, GatewayNetwork):
        standby = SecuredStandby(joiner.standby, join_info, network, joiner.file, joiner.out, write_line)
        how = f"join files that `atoll invite` writes from now on name {standby.dialled}"
    else:
        standby = TrustedStandby(joiner.standby, join_info, network, joiner.out)
        how = f"atoll run --join {address},{standby.dialled}"
    with closing(standby):
        write_line(f"{name} runs a standby rendezvous at {standby.dialled}: {how}")
        yield standby.name


def run_rendezvous(join_info: Path, address: str) -> NoReturn:
    """Run the rendezvous of a run until this process is ended."""
    end_with_supervisor()
    gateway = None
    try:
        info = JoinInfo.from_text(join_info.read_bytes())
        rendezvous = Rendezvous(info, info.registry or address)
        if info.spec.secured:
            services = {"registry": info.registry, "lighthouse": info.lighthouse}
            ports = {name: int(where.rpartition(":")[2]) for name, where in services.items()}
            gateway = Gateway(lambda: RunSecrets.read(join_info.parent), address, ports, log)
    except BaseException as error:
        exit_with(error, sys.stderr)
    try:
        while gateway is None:
            signal.pause()
        while True:
            with suppress(ConfigError):  # what cannot be read now is read later
                rendezvous.set_revoked(RunSecrets.read(join_info.parent).revoked)
            time.sleep(_REVOKED_S)
    finally:
        if gateway is not None:
            gateway.close()
        rendezvous.close()


def find_run(
    address: str, name: str, folder: Path | None, joiner: Joiner, refused: Callable[[Exception], object]
) -> tuple[JoinInfo, DirectNetwork]:
    """What the run at this address is, and the network of its island of this name. A joiner has no `folder`, and may know several
    addresses. `refused` is called if the gateway refuses the island for good."""
    if folder is not None:
        registry, run_id = RegistryClient(address), run_id_of(folder)
        with log_while_waiting(log, f"waiting for the run at {address}"):
            retry(lambda: _check_run(address, registry.run_id(), run_id), ExchangeFailed, LOCAL_TIMEOUT_S, _POLL_S)
        info = JoinInfo.read(folder)  # every member can overwrite what the registry holds
        if info.spec.secured:
            return info, local_network(info, folder, name, refused)
        return info, DirectNetwork(_host_towards(address), address, info.lighthouse, info.run_id)
    try:
        if joiner.file is not None:
            joined = joiner_network(joiner.file, name, refused)
            run_id = joiner.file.credentials.run_id
            info, found = fetch_join_info(joined.registries, joiner.timeout_s, run_id, joined)
            if info.run_digest != joiner.file.run:
                joined.close()
                raise ConfigError(
                    f"--join {address}: what is published there is not the Run that the join file was written for. A member of the "
                    f"run may have overwritten it: resume the run, whose rendezvous then publishes what its folder holds; or write "
                    f"a new join file with `atoll invite DIR`, if the folder has another run now."
                )
            joined.use(found)
            return info, joined
        info, found = fetch_join_info(address, joiner.timeout_s, None)
    except ExchangeFailed as error:  # a mistyped address ends the joiner at once, unless the user lets it wait
        why = str(error.__cause__ or error)
        given = "Make a new join file if the run's address has changed" if joiner.file else "Give the address that the run printed"
        raise ConfigError(
            f"--join {address}: no run answers there ({why}). {given}; if it may appear later, let the joiner wait: --set "
            f"engine.join_timeout_s=600."
        ) from error
    return info, DirectNetwork(_host_towards(found), found, info.lighthouse, info.run_id)


def fetch_join_info(
    addresses: str, timeout_s: float, run_id: str | None = None, network: GatewayNetwork | None = None
) -> tuple[JoinInfo, str]:
    """What the run at the first of these addresses that answers is, and that address. Refuses another run than that of this
    id."""
    registries = {address: RegistryClient(address, network=network) for address in addresses.split(",")}

    def fetch() -> tuple[JoinInfo, str]:
        if network is not None:
            network.check()
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
        info, found = retry(fetch, ExchangeFailed, timeout_s, _POLL_S)
    if run_id is not None:
        _check_run(found, info.run_id, run_id)
    return info, found


def _check_run(address: str, found: str | None, run_id: str) -> None:
    """Refuse the rendezvous of another run. Raises ExchangeFailed if it has not published what run it is of."""
    if found is None:
        raise ExchangeFailed(f"the rendezvous at {address} has not published what run it is of. Start the run again.")
    if found != run_id:
        raise ConfigError(f"{address} belongs to another run ({found}, and not {run_id}). Set engine.listen to a free port.")


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
