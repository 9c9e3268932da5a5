"""docs/security.md has a row for every socket on which a run listens, and each row has a socket: the runs here are started with a
recorder of who opens a socket, and what it records is compared with the rows in both directions."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll.engines import machine_check
from atoll.engines.elastic import gateway, gateway_client, gateway_protocol, launch, rendezvous, snapshot_server
from atoll.engines.network_interfaces import free_port
from atoll.testing import network_namespaces
from tests.fuzzing import FUZZERS
from tests.listening_sockets import sockets_until

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
RECORDER = ROOT / "tests" / "socket_recorder"
PATIENCE_S = 180.0
SETTINGS = ("model.hidden=8", "data.examples=512", "data.dimensions=16", "data.clusters_per_class=1", "data.eval_examples=128")
SETTINGS += ("train.batch_size=8", "train.warm_start_steps=3", "train.steps=400", "cluster.step_time_s=[1.0]")
SLOWLY = ("engine.step_delay=0.05", "train.steps=20000")
TORCHRUN = "torch.distributed.run"

# --------------------------------------------------------------------------------------------------------------------- the page


class Row(NamedTuple):
    engine: str
    socket: str
    listens: str
    authentication: str
    encryption: str
    limits: str


def rows():
    """The rows of the page's table, by the beginnings of their first two cells in `OPENED_BY`."""
    lines = PAGE.partition("| engine | socket |")[2].partition("\n\n")[0].splitlines()[2:]
    found = {}
    for line in lines:
        row = Row(*re.split(r"\s*\|\s*", line)[1:-1])
        (name,) = (name for name in OPENED_BY if row.engine.startswith(name[0]) and row.socket.startswith(name[1]))
        assert name not in found, f"two rows of {name}"
        found[name] = row
    return found


def by(kind, frames, command=""):
    """Whether this constructor opened a recorded socket, for these functions of atoll, in a process of this command."""

    def opened(one):
        return one["kind"] == kind and frames in " ".join(one["frames"]) and command in one["command"]

    return opened


def never(one):
    return False


REGISTRY = "rank_store:open_store engines.elastic.rendezvous:__init__"
OPENED_BY = {
    ("simulator", "none"): never,
    ("processes", "store of the ranks"): by("socket", "rank_store:open_store engines.processes.launch:launch"),
    ("processes", "gloo, several"): by("ProcessGroupGloo", "engines.processes.rank"),
    ("processes", "NCCL"): never,
    ("several machines by `engine.nodes`", "store of the ranks"): by(
        "socket", "rank_store:open_store engines.processes.launch:launch_node"
    ),
    ("torchrun, on one machine", "torchrun's own store"): by("TCPStore", "", TORCHRUN),
    ("processes, several machines", "torchrun's rendezvous"): by("TCPStore", "", TORCHRUN),
    ("processes, several machines", "gloo and NCCL"): by("ProcessGroupGloo", "engines.processes.rank"),
    ("`atoll doctor", "answers one"): by("socket", "engines.machine_check:"),
    ("own loop", "store and gloo"): lambda one: "loop.topology:" in " ".join(one["frames"]),
    ("elastic", "registry"): by("socket", f"{REGISTRY} engines.elastic.launch:"),
    ("elastic", "torchft's lighthouse"): by("LighthouseServer", "engines.elastic.rendezvous:__init__ engines.elastic.launch:"),
    ("elastic", "torchft's manager"): by("ManagerServer", "engines.elastic.membership:"),
    ("elastic", "store of the process group"): by("socket", "rank_store:open_store engines.elastic.membership:"),
    ("elastic", "gloo, one per quorum"): by("ProcessGroupGloo", "engines.elastic.membership:"),
    ("elastic", "snapshot server"): by("socket", "engines.elastic.snapshot_server:"),
    ("elastic, several machines", "gateway"): by("socket", "engines.elastic.gateway:__init__ engines.elastic.launch:"),
    ("elastic, joiner with a join file", "forwarders"): by("socket", "engines.elastic.gateway_client:"),
    ("elastic, joiner with `engine.listen` and a join file", "gateway of a standby"): lambda one: (
        "engines.elastic.standby_rendezvous:__init__" in one["frames"] and not trusts(one)
    ),
    ("elastic, joiner with `engine.listen` (loopback", "standby rendezvous"): lambda one: (
        "engines.elastic.standby_rendezvous:__init__" in one["frames"] and trusts(one)
    ),
    ("ray", "a Ray that atoll starts"): lambda one: not one["frames"] and "ray" in one["command"],
    ("ray, existing cluster", "Ray"): never,
}
"""What opens the socket of a row. A key is the beginning of the row's first two cells."""
NOT_OPENED = {
    ("simulator", "none"): "test_the_simulator_opens_no_socket",
    ("processes", "NCCL"): "it needs GPUs",
    ("ray, existing cluster", "Ray"): "`ray start` opens its sockets, before atoll runs",
}
"""Rows that no run of these tests opens, and why."""
PROBES = "engines.network_interfaces:free_port", "engines.elastic.rendezvous:check_free"
"""They listen for a moment, to see whether a port is free, and accept nothing."""


def trusts(one):
    return "join-standby-trusted" in one["command"]


def allowed(listens, trusted, host):
    """The addresses and networks that a cell of the page allows. `host` is that of `engine.listen`, or in the other machines'
    network."""
    found = {"0.0.0.0", "::"} if "all interfaces" in listens else set()
    found |= {"127.0.0.1"} if listens.startswith("as processes") or "loopback interface" in listens else set()
    for clause in re.split(r";|, and ", listens):
        if trusted or "engine.network=trusted" not in clause:
            found.update(re.findall(r"`([0-9.:a-f/]+)`", clause))
            named = re.search(r"engine\.(?:listen|address)|island's address|its host|interface that routes|HOST:PORT", clause)
            found |= {host} if named else set()
    return found


def is_allowed(address, cell):
    return any(address == one or ("/" in one and ip_address(address) in ip_network(one)) for one in cell)


def test_every_row_of_the_page_has_a_socket_that_a_test_opens():
    assert rows().keys() == OPENED_BY.keys()
    assert {name for one in RUNS.values() for name in one} | NOT_OPENED.keys() == OPENED_BY.keys()


@pytest.mark.parametrize(
    ("text", "host", "trusted", "addresses"),
    [
        ("`127.0.0.1`, a free port", None, False, {"127.0.0.1"}),
        ("`127.0.0.1`; with `engine.network=trusted` the island's address", "10.0.0.1", False, {"127.0.0.1"}),
        ("`127.0.0.1`; with `engine.network=trusted` the island's address", "10.0.0.1", True, {"127.0.0.1", "10.0.0.1"}),
        ("a random address of `127.0.0.0/8`, always", None, False, {"127.0.0.0/8"}),
        ("all interfaces, `--master-port`", None, False, {"0.0.0.0", "::"}),
    ],
)
def test_a_cell_allows_the_addresses_that_it_names(text, host, trusted, addresses):
    assert allowed(text, trusted, host) == addresses


def test_an_address_is_allowed_by_its_name_or_its_network():
    assert [is_allowed(one, {"127.0.0.0/8", "10.0.0.1"}) for one in ("127.3.2.1", "10.0.0.1", "10.0.0.2")] == [True, True, False]


KIB, MINUTE_S = 1024, 60
LIMITS = {
    ("`atoll doctor", "answers one"): [
        machine_check._LINE_BYTES / KIB,
        machine_check._EXCHANGE_S,
        machine_check._ANSWER_S / MINUTE_S,
    ],
    ("elastic", "snapshot server"): [
        snapshot_server.MAX_CONNECTIONS,
        snapshot_server.MAX_WITHOUT_QUERY,
        snapshot_server._FIRST_LINE_S,
        inspect.signature(snapshot_server.SnapshotServer).parameters["limit_s"].default,
    ],
    ("elastic, several machines", "gateway"): [
        gateway.MAX_UNAUTHENTICATED,
        gateway_protocol.HANDSHAKE_S,
        gateway.MAX_CONNECTIONS,
        gateway_protocol.LINE_BYTES / KIB,
    ],
    ("elastic, joiner with a join file", "forwarders"): [gateway_client._MAX_FORWARDED],
}
"""The figures in the last cell of a row, in order."""
FIGURES = {
    r"each standby, of which there are at most (\d+)": rendezvous._MOST_STANDBYS,
    r"waits (\d+) s so that the islands know it": launch._REVOKED_KNOWN_S,
    r"fill the (\d+) places for connections without a certificate": gateway.MAX_UNAUTHENTICATED,
}
"""Further figures of the page."""


def test_the_limits_on_the_page_are_those_of_the_code():
    told = {name: list(map(int, re.findall(r"\d+", row.limits))) for name, row in rows().items()}
    assert {name: figures for name, figures in told.items() if figures} == LIMITS
    for pattern, value in FIGURES.items():
        assert list(map(int, re.findall(pattern, PAGE.replace("\n", " ")))) == [value], pattern


def test_the_page_has_the_number_of_inputs_of_each_fuzzer():
    table = PAGE.partition("| fuzzer |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [re.split(r"\s*\|\s*", line)[1:4] for line in table]
    assert told == [[name, f"{one.fast:,}", f"{one.slow:,}"] for name, one in FUZZERS.items()]


# ------------------------------------------------------------------------------------------------------------------- the sockets


class Recording:
    """The sockets that processes of this environment open, and who opened them."""

    def __init__(self, folder):
        self._log = folder / "sockets.jsonl"
        paths = [str(RECORDER), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "ATOLL_RECORDED_SOCKETS": str(self._log),
            "OMP_NUM_THREADS": "1",
        }

    def opened(self):
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def check(self, seen, expected, *, host=None, trusted=False, foreign=never):
        """Each socket seen was opened by what a row of the page names, at an address of that row, and each expected row has one.
        `foreign`: which of the seen sockets belong to processes of another program."""
        owners = {tuple(address): one for one in self.opened() for address in one["addresses"]}
        page, found = rows(), set()
        for one in seen:
            owner = owners.get((one.address, one.port))
            if owner is None and foreign(one):
                owner = {"kind": "of another program", "frames": [], "command": one.command}
            assert owner is not None, f"the recorder has no process that opened {one}"
            if owner["frames"] and owner["frames"][0] in PROBES:
                continue
            names = [name for name in expected if OPENED_BY[name](owner)]
            assert len(names) == 1, f"docs/security.md has no row for {one}, which {owner} opened: {names}"
            assert is_allowed(one.address, allowed(page[names[0]].listens, trusted, host)), (
                f"{one} is not where the row of {names[0]} says"
            )
            found.add(names[0])
        assert found == set(expected), f"rows without a socket: {set(expected) - found}"


@contextmanager
def running(command, environment=None, *, log=None, folder=None):
    """A process that is ended by SIGTERM afterwards, as a user would."""
    output = subprocess.PIPE if log is None else log.open("w")
    process = subprocess.Popen(
        [*map(str, command)],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if log is not None:
            output.close()


def atoll_command(*words):
    return [sys.executable, "-m", "atoll", *words]


def engine_arguments(folder, recipe, engine, *more):
    sets = [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]
    return ["run", recipe, *sets, "--engine", engine, "--out", folder]


def trains(process, folder, participating=1):
    """A condition that holds when the run has finished some rounds, the last with so many islands."""

    def condition():
        assert process.poll() is None, f"it ended before it trained: {process.communicate()}"
        log = folder / "events.jsonl"
        text = log.read_text() if log.exists() else ""
        attended = re.findall(r'"participating": (\d+)', text) or ["1"]
        return int(attended[-1]) >= participating and len(re.findall('"RoundFinished"|"Arrived"', text)) >= 3

    return condition


ELASTIC = [name for name in OPENED_BY if name[0] == "elastic"]
TORCHRUN_STORE, MESSAGES = (name for name in OPENED_BY if name[0] == "processes, several machines")
(NODES_STORE,) = (name for name in OPENED_BY if name[0].startswith("several machines by"))
(GATEWAY,) = (name for name in OPENED_BY if name[1] == "gateway")
(FORWARDERS,) = (name for name in OPENED_BY if name[1] == "forwarders")
(STANDBY,) = (name for name in OPENED_BY if name[1] == "gateway of a standby")
(TRUSTED_STANDBY,) = (name for name in OPENED_BY if name[1] == "standby rendezvous")
RUNS = {
    "processes": [("processes", "store of the ranks"), ("processes", "gloo, several")],
    "torchrun": [("torchrun, on one machine", "torchrun's own store"), ("processes", "gloo, several")],
    "several machines by torchrun": [TORCHRUN_STORE, MESSAGES],
    "several machines by engine.nodes": [NODES_STORE, MESSAGES],
    "doctor": [("`atoll doctor", "answers one")],
    "own loop": [("own loop", "store and gloo")],
    "elastic": ELASTIC,
    "elastic, trusted": [*ELASTIC, TRUSTED_STANDBY],
    "elastic, tls": [*ELASTIC, GATEWAY, FORWARDERS, STANDBY],
    "ray": [("ray", "a Ray that atoll starts")],
}
"""The rows whose sockets each run here opens."""


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path)


@pytest.fixture
def pair():
    reason = network_namespaces.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with network_namespaces.linked_pair() as both:
        yield both


def test_the_simulator_opens_no_socket(tmp_path, recording):
    command = atoll_command(*engine_arguments(tmp_path / "run", "toy-sync", "simulator", "train.steps=200000"))
    with running(command, recording.environment) as process:
        seen = sockets_until(process.pid, trains(process, tmp_path / "run"), PATIENCE_S)
    assert (seen, recording.opened()) == (set(), [])


def test_a_socket_without_a_row_fails_and_a_row_without_a_socket_too(recording):
    """The check itself: a process that opens what the page does not name."""
    text = "import socket, sys; opened = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", text], env=recording.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        seen = sockets_until(process.pid, lambda: True)
        process.stdin.close()
    assert len(seen) == 1
    with pytest.raises(AssertionError, match="has no row for"):
        recording.check(seen, RUNS["processes"])
    with pytest.raises(AssertionError, match="the recorder has no process that opened"):
        Recording(RECORDER).check(seen, RUNS["processes"])
    with pytest.raises(AssertionError, match="rows without a socket"):
        recording.check(set(), RUNS["processes"])


@pytest.mark.parametrize("engine", ["processes", pytest.param("elastic", marks=pytest.mark.slow)])
def test_an_engine_on_one_machine_opens_the_sockets_of_its_rows(tmp_path, recording, engine):
    command = atoll_command(*engine_arguments(tmp_path / "run", "toy-sync", engine, *SLOWLY, "engine.processes=2"))
    with running(command, recording.environment) as process:
        seen = sockets_until(process.pid, trains(process, tmp_path / "run", 1 + (engine == "elastic")), PATIENCE_S)
    recording.check(seen, RUNS[engine])


@pytest.mark.slow
def test_a_run_of_torchrun_on_one_machine_opens_the_sockets_of_its_rows(tmp_path, recording):
    ranks = ["-m", TORCHRUN, "--nproc-per-node", 2, "--master-port", free_port("127.0.0.1"), "-m", "atoll"]
    arguments = engine_arguments(tmp_path / "run", "toy-sync", "processes", *SLOWLY)
    with running([sys.executable, *ranks, *arguments], recording.environment) as process:
        seen = sockets_until(process.pid, trains(process, tmp_path / "run"), PATIENCE_S)
    recording.check(seen, RUNS["torchrun"])
    assert any(not one.is_loopback for one in seen), "torchrun's own store"


def test_a_machine_that_is_asked_listens_where_it_was_told_to(tmp_path, recording):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    text = f"from atoll.engines.machine_check import answer_machine; answer_machine({address!r}, {{}}, print)"
    with running([sys.executable, "-c", text], recording.environment) as process:
        seen = sockets_until(process.pid, lambda: bool(recording.opened()), PATIENCE_S)
        seen |= sockets_until(process.pid, lambda: True)
    recording.check(seen, RUNS["doctor"], host="127.0.0.1")


LOOP = """
import pathlib, sys, torch, atoll
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=1)) as islands:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    pathlib.Path(sys.argv[1]).touch()
    sys.stdin.read()
"""


@pytest.mark.slow
def test_an_own_loop_opens_the_sockets_of_its_row(tmp_path, recording):
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    flags, seen, started = [tmp_path / f"trained-{rank}" for rank in range(2)], set(), []
    for rank, flag in enumerate(flags):
        environment = {**recording.environment, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen([sys.executable, "-c", LOOP, str(flag)], env=environment, stdin=subprocess.PIPE))
    try:
        for process, flag in zip(started, flags, strict=True):
            seen |= sockets_until(process.pid, flag.exists, PATIENCE_S)
    finally:
        for process in started:
            process.stdin.close()  # they leave the block together
        for process in started:
            process.wait(60)
    recording.check(seen, RUNS["own loop"])


def node_words(way, rank, address, arguments):
    """The command of one of two machines."""
    if way == "engine.nodes":
        placed = ("engine.processes=2", "engine.nodes=2", f"engine.node={rank}", f"engine.address={address}:29500")
        return atoll_command(*arguments, *(part for setting in placed for part in ("--set", setting)))
    nodes = ["--nnodes", 2, "--nproc-per-node", 1, "--node-rank", rank, "--master-addr", address, "--master-port", 29500]
    return [sys.executable, "-m", TORCHRUN, *nodes, "-m", "atoll", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torchrun", "engine.nodes"])
def test_a_run_on_two_machines_opens_the_sockets_of_its_rows(tmp_path, recording, pair, way):
    arguments = engine_arguments(tmp_path / "run", "toy-sync", "processes", *SLOWLY, "engine.network=trusted")
    with ExitStack() as stack:
        started = []
        for rank, machine in enumerate(pair):
            command = map(str, node_words(way, rank, pair[0].address, arguments))
            started.append(stack.enter_context(running(machine.inside([*command]), recording.environment)))
        condition = trains(started[0], tmp_path / "run")
        seen = {
            machine.address: sockets_until(process.pid, condition, PATIENCE_S)
            for machine, process in zip(pair, started, strict=True)
        }
    # Ranks meet over a socket that is closed before the first round, so it is looked for among those that were recorded.
    meeting = [one for one in recording.opened() if "engines.rank_rendezvous:" in " ".join(one["frames"])]
    assert {address for one in meeting for address, _ in one["addresses"]} <= {machine.address for machine in pair}
    for host, sockets in seen.items():
        wanted = RUNS[f"several machines by {way}"][host != pair[0].address :]
        ports = {port for one in meeting for _, port in one["addresses"]}
        recording.check({one for one in sockets if one.port not in ports}, wanted, host=host, trusted=True)


def elastic_run(recording, pair, tmp_path, network):
    """A run on one machine and a joiner with a standby on the other: what they listen on, by machine."""
    here, there = (f"{machine.address}:29400" for machine in pair)
    folder, copy = tmp_path / "run", tmp_path / f"join-standby-{network}"
    arguments = engine_arguments(folder, "toy-sync", "elastic", *SLOWLY, "engine.processes=2", f"engine.listen={here}")
    sets = ["--set", f"engine.network={network}"]
    first = pair[0].inside([*map(str, atoll_command(*arguments, *sets))])
    with running(first, recording.environment, log=tmp_path / "first.log") as run:
        seen = {pair[0].address: sockets_until(run.pid, trains(run, folder, 2), PATIENCE_S)}
        joined = here
        if network == "tls":
            invite = pair[0].inside(
                [*map(str, atoll_command("invite", folder, "--standby", there, "--out", tmp_path / "join.json"))]
            )
            subprocess.run(invite, env=recording.environment, check=True, timeout=60)
            joined, sets = str(tmp_path / "join.json"), []
        words = ["run", "--join", joined, *sets, "--set", f"engine.listen={there}", "--out", str(copy)]
        with running(pair[1].inside(atoll_command(*words)), recording.environment, log=tmp_path / "second.log") as joiner:
            seen[pair[1].address] = sockets_until(joiner.pid, trains(run, folder, 3), PATIENCE_S)
            seen[pair[0].address] |= sockets_until(run.pid, lambda: True)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("network", ["trusted", "tls"])
def test_an_elastic_run_of_two_machines_opens_the_sockets_of_its_rows(tmp_path, recording, pair, network):
    seen = elastic_run(recording, pair, tmp_path, network)
    expected, trusted = RUNS[f"elastic, {network}"], network == "trusted"
    of_joiner = [name for name in expected if name not in (GATEWAY, ELASTIC[0], ELASTIC[1])]
    if not trusted:
        of_joiner.remove(("elastic", "gloo, one per quorum"))  # its quorums have a member beyond the gateway
    of_first = [name for name in expected if name not in (FORWARDERS, STANDBY, TRUSTED_STANDBY)]
    for machine, wanted in zip(pair, (of_first, of_joiner), strict=True):
        recording.check(seen[machine.address], wanted, host=machine.address, trusted=trusted)


@pytest.mark.slow
def test_a_ray_that_atoll_starts_opens_the_sockets_of_its_row(tmp_path, recording):
    settings = ["engine.step_delay=0.05", "cluster.islands=2", "train.steps=20000"]
    command = atoll_command(*engine_arguments(tmp_path / "run", "toy-async", "ray", *settings))
    with running(command, recording.environment) as process:
        seen = sockets_until(process.pid, trains(process, tmp_path / "run"), PATIENCE_S)
    recording.check(seen, RUNS["ray"], foreign=lambda one: "ray" in one.command)
    assert not [one for one in recording.opened() if one["frames"]], "atoll itself opens none"
