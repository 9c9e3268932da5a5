"""No source executes what it receives or reads, and no stranger on another machine reaches a run of one machine. The sockets of
docs/security.md are those of test_security_sockets.py."""

import ast
import re
import socket
import sys

import pytest

import atoll.testing.network_namespaces
from tests.listening_sockets import listening_sockets, sockets_until
from tests.test_security_sockets import PATIENCE_S, ROOT, SLOWLY, atoll_command, engine_arguments, running, trains

# ---------------------------------------------------------------------------------------------------------------- the sources

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Their readers execute what they read."""
TORCH = {
    "torch.distributed.elastic": "its launcher unpickles what it finds in its store",
    "torch.distributed.launcher": "its launcher unpickles what it finds in its store",
    "torch.distributed.checkpoint.state_dict_saver": "it gathers pickled objects",
    "torch.distributed.checkpoint.state_dict_loader": "it unpickles the index of a checkpoint",
    "torch.distributed.rpc": "it unpickles functions",
    "torch.multiprocessing": "its queues unpickle",
    "multiprocessing": "its queues and listeners unpickle",
}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"}
LISTENERS = {"rendezvous", "TCPStore"}
"""torch's functions that open a store, on all interfaces where they are told to."""
KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}
READS_MODELS = (".from_pretrained", ".from_config")
"""Of transformers: without a word on a model's code they ask the user whether to run it."""
ALLOWED = {
    ("src/atoll/engines/processes/torch_checkpoint_files.py", "pickle"): "an Unpickler that is restricted to torch's index classes",
    ("src/atoll/engines/rank_store.py", "TCPStore"): "with a socket of its own, on one address; and as a client",
    ("src/atoll/engines/rank_store.py", "rendezvous"): "between machines, where the user trusts the network",
    ("src/atoll/engines/elastic/rendezvous.py", "TCPStore"): "as a client",
    ("src/atoll/engines/elastic/membership.py", "TCPStore"): "as a client",
}
"""What a file may use, and why."""


def dangers(source):
    """What a source uses that may execute its input, or listen on all interfaces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in imported(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from {name for alias in node.names for name in imported(f"{node.module}.{alias.name}")}
            yield from (alias.name for alias in node.names if is_object_collective(alias.name))
        elif isinstance(node, ast.Attribute) and is_object_collective(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {one.arg: ast.unparse(one.value) for one in node.keywords}
            if name in CALLS:
                yield name
            if name.rpartition(".")[2] in LISTENERS:
                yield name.rpartition(".")[2]
            if name == "torch.load" and given.get("weights_only") != "True":
                yield name
            if name.startswith("transformers.") and name.endswith(READS_MODELS) and given.get("trust_remote_code") is None:
                yield name
            yield from (word for word in KEYWORDS if given.get(word, "False") != "False")


def imported(name):
    for module in (*MODULES, *TORCH):
        if name == module or name.startswith(f"{module}."):
            yield module


def is_object_collective(name):
    return re.fullmatch(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?", name) is not None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("transformers.AutoConfig.from_pretrained(a)", ["transformers.AutoConfig.from_pretrained"]),
        ("transformers.AutoConfig.from_pretrained(a, trust_remote_code=False)", []),
        ("from pickle import loads", ["pickle"]),
        ("from torch.distributed import broadcast_object_list", ["broadcast_object_list"]),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", ["all_gather_object"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("eval(text)", ["eval"]),
        ("model.eval()", []),
        ("yaml.load(text)", ["yaml.load"]),
        ("yaml.safe_load(text)", []),
        ("numpy.load(path, allow_pickle=True)", ["allow_pickle"]),
        ("subprocess.run(text, shell=True)", ["shell"]),
        ("from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs", ["torch.distributed.elastic"]),
        ("from torch.distributed import launcher", ["torch.distributed.launcher"]),
        ("dist.TCPStore(host, port, is_master=True)", ["TCPStore"]),
    ],
)
def test_dangers_are_found(source, found):
    assert list(dangers(source)) == found


def test_no_source_executes_what_it_receives_or_reads():
    paths = [path for folder in ("src/atoll", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {(str(path.relative_to(ROOT)), name) for path in paths for name in dangers(path.read_text("utf-8"))}
    assert found - ALLOWED.keys() == set(), "use JSON and safetensors, with checks"
    assert ALLOWED.keys() - found == set(), "these are not used any more: remove them from the list"


# ----------------------------------------------------------------------------------------------------------- another machine


@pytest.fixture
def two_machines():
    reason = atoll.testing.network_namespaces.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with atoll.testing.network_namespaces.linked_pair() as pair:
        yield pair


@pytest.mark.slow
def test_a_stranger_on_another_machine_reaches_no_port_of_a_run_on_one_machine(tmp_path, two_machines):
    """From there a stranger once put a pickle into the launcher's store, which executed it."""
    here, there = two_machines

    def reached(port):
        with atoll.testing.network_namespaces.inside_namespace(there):
            try:
                socket.create_connection((here.address, port), timeout=5).close()
            except ConnectionRefusedError:
                return False
            return True

    command = atoll_command(*engine_arguments(tmp_path / "run", "toy-sync", "processes", *SLOWLY, "engine.processes=2"))
    with atoll.testing.network_namespaces.inside_namespace(here), socket.create_server(("", 0)) as open_to_all:
        assert reached(open_to_all.getsockname()[1]), "the machines are connected"
        with running(command) as process:
            seen = sockets_until(process.pid, trains(process, tmp_path / "run"), PATIENCE_S)
            now = listening_sockets(process.pid)
            assert len(now) >= 3
            assert not [one for one in now if reached(one.port)]
    assert all(one.is_loopback for one in seen), "not at any time"


# ------------------------------------------------------------------------------------------------------------ several machines

JOINS = "import sys, atoll; print(*atoll.join(limit_s=60, trusted_network=sys.argv[1] == 'trusted'))"


def on_both(machines, command_of, log):
    """Runs a command on each machine; the exit code and the output of each."""
    logs, started = [log / f"machine-{rank}.log" for rank in range(len(machines))], []
    for rank, machine in enumerate(machines):
        variables = {"GLOO_SOCKET_IFNAME": machine.device, "OMP_NUM_THREADS": "1"}
        started.append(machine.start(command_of(rank), variables, logs[rank]))
    for process in started:
        process.communicate(timeout=PATIENCE_S)
    outputs = [path.read_text() + path.with_suffix(".err").read_text() for path in logs]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_processes_of_an_own_loop_on_two_machines_join_only_on_a_trusted_network(tmp_path, two_machines):
    def command_of(rank, trust):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
        assigned = [f"{name}={value}" for name, value in variables.items()]
        return ["env", *assigned, f"MASTER_ADDR={two_machines[0].address}", sys.executable, "-c", JOINS, trust]

    for code, output in on_both(two_machines, lambda rank: command_of(rank, "no"), tmp_path):
        assert code == 1
        assert "give trusted_network=True to atoll.join and atoll.islands" in output
    joined = on_both(two_machines, lambda rank: command_of(rank, "trusted"), tmp_path)
    assert [(code, output.splitlines()[0]) for code, output in joined] == [(0, "0 2"), (0, "1 2")]
    assert "everyone on it can read and change this run" in joined[0][1]


TRAINS = """
import sys, torch, atoll
import torch.distributed as dist
trust, address, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.islands(model, optimizer, atoll.DiLoCo(inner_steps=1), trusted_network=trust == "trusted") as islands:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained", islands.rounds)
"""


@pytest.mark.slow
def test_islands_in_a_users_own_group_on_two_machines_train_only_on_a_trusted_network(tmp_path, two_machines):
    def command_of(rank, trust):
        return [sys.executable, "-c", TRAINS, trust, f"{two_machines[0].address}:29500", str(rank)]

    for code, output in on_both(two_machines, lambda rank: command_of(rank, "no"), tmp_path):
        assert code == 1
        assert "this run has processes on several machines" in output
    trained = on_both(two_machines, lambda rank: command_of(rank, "trusted"), tmp_path)
    assert [(code, "trained 1" in output) for code, output in trained] == [(0, True), (0, True)], trained


@pytest.mark.slow
def test_a_run_of_torchrun_on_two_machines_trains_only_on_a_trusted_network(tmp_path, two_machines):
    first = two_machines[0].address

    def command_of(rank, *more):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", rank]
        torchrun += ["--master-addr", first, "--master-port", 29500, "-m", "atoll"]
        steps = ("train.steps=4", "algorithm.inner_steps=2", *more)
        return [*map(str, torchrun + engine_arguments(tmp_path / "run", "toy-sync", "processes", *steps))]

    for code, output in on_both(two_machines, command_of, tmp_path):
        assert code != 0
        assert "give --set engine.network=trusted" in output
    assert not (tmp_path / "run").exists()
    trusted = on_both(two_machines, lambda rank: command_of(rank, "engine.network=trusted"), tmp_path)
    assert [code for code, _ in trusted] == [0, 0], trusted
    assert trusted[0][1].count("engine.network=trusted: the network between the machines is trusted: everyone on it can read") == 1
