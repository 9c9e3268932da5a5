"""No source executes what it receives or reads, and no stranger on another machine reaches a run of one machine. The sockets of
docs/security.md are those of test_security_sockets.py."""

import socket
import sys

import pytest

import atoll.testing.network_namespaces
from tests.dangerous_uses import dangers
from tests.listening_sockets import listening_sockets, sockets_until
from tests.test_security_sockets import PATIENCE_S, ROOT, SLOWLY, atoll_command, engine_arguments, running, trains

# ---------------------------------------------------------------------------------------------------------------- the sources

ENGINES = "src/atoll/engines"
A_DTYPE = "getattr(torch, NAME), of which only a dtype is taken"
OF_RAY = "getattr(torch, NAME) with a name that a holder of the token sends, who can send pickles anyway"
ALLOWED = {
    (f"{ENGINES}/processes/torch_checkpoint_files.py", "pickle"): "an Unpickler that is restricted to torch's index classes",
    (f"{ENGINES}/processes/torch_checkpoint_files.py", "torch as a value"): "vars(torch), of which only dtypes are taken",
    (f"{ENGINES}/rank_store.py", "TCPStore"): "with a socket of its own, on one address; and as a client",
    (f"{ENGINES}/rank_store.py", "rendezvous"): "between machines, where the user trusts the network",
    (f"{ENGINES}/elastic/rendezvous.py", "TCPStore"): "as a client",
    (f"{ENGINES}/elastic/membership.py", "TCPStore"): "as a client",
    (f"{ENGINES}/elastic/snapshot_server.py", "torch as a value"): A_DTYPE,
    ("src/atoll/core/serialization.py", "torch as a value"): A_DTYPE,
    (f"{ENGINES}/ray/hub_actor.py", "torch as a value"): "getattr(torch, NAME) with the name in the hub's own settings",
    (f"{ENGINES}/ray/messages.py", "torch as a value"): OF_RAY,
    (f"{ENGINES}/ray/bootstrap.py", "sys.modules"): "whether the caller has imported ray",
    ("src/atoll/cli/recipe_settings.py", "sys.modules"): "whether the caller has imported the module that a run names",
    ("src/atoll/replica/flat_parameters.py", "sys.modules"): "whether the caller has imported FSDP",
    ("src/atoll/__init__.py", "importlib.import_module"): "modules of atoll, by a table in the source",
    ("src/atoll/core/config/json_records.py", "importlib.import_module"): "modules of atoll, by the files of the package",
    ("src/atoll/core/config/json_records.py", "sys.modules"): "a dataclass of a module that the caller has imported",
    ("src/atoll/core/optional_imports.py", "importlib.import_module"): "libraries that callers name in their source",
    (f"{ENGINES}/run_lifecycle.py", "importlib.import_module"): "atoll's engine of the name that an engine's class has",
    **{
        (
            "examples/finetune_huggingface.py",
            f"transformers.{name}.from_pretrained",
        ): "of a folder that the script has just exported"
        for name in ("AutoModelForCausalLM", "AutoTokenizer")
    },
    **{
        (f"{ENGINES}/user_code.py", name): "the file or module that the user names in --workload; never one that a message names"
        for name in (
            "importlib.import_module",
            "importlib.util.spec_from_file_location",
            "importlib.util.module_from_spec",
            "sys.modules",
        )
    },
}
"""What a file may use, and why."""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("import transformers\ntransformers.AutoConfig.from_pretrained(a)", ["transformers.AutoConfig.from_pretrained"]),
        ("import transformers\ntransformers.AutoConfig.from_pretrained(a, trust_remote_code=False)", []),
        ("from pickle import loads", ["pickle"]),
        ("from torch.distributed import broadcast_object_list", ["broadcast_object_list"]),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", ["all_gather_object"]),
        ("import torch\ntorch.load(path)", ["torch.load"]),
        ("import torch\ntorch.load(path, weights_only=False)", ["torch.load"]),
        ("import torch\ntorch.load(path, weights_only=True)", []),
        ("eval(text)", ["eval"]),
        ("model.eval()", []),
        ("import yaml\nyaml.load(text)", ["yaml.load"]),
        ("import yaml\nyaml.safe_load(text)", []),
        ("numpy.load(path, allow_pickle=True)", ["allow_pickle"]),
        ("subprocess.run(text, shell=True)", ["shell"]),
        ("from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs", ["torch.distributed.elastic"]),
        ("from torch.distributed import launcher", ["torch.distributed.launcher"]),
        ("dist.TCPStore(host, port, is_master=True)", ["TCPStore"]),
        ("model.rendezvous = 1\nprint(model.rendezvous)", []),
        ("def compile(model): ...\ncompile(model)", []),
        ("def train(compile):\n    if compile: ...", []),
        ("import os\nos.environ['A'] = os.path.join(a, b)", []),
    ],
)
def test_dangers_are_found(source, found):
    assert dangers(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch import load\nload(path)", "torch.load"),
        ("from torch import load as read\nread(path, weights_only=False)", "torch.load"),
        ("import torch as t\nt.load(path)", "torch.load"),
        ("import torch\nt = torch\nt.load(path)", "torch.load"),
        ("import torch\nlast = first = torch\nother = last\nother.load(path)", "torch.load"),
        ("import torch\nread = torch.load\nread(path)", "torch.load"),
        ("import torch, functools\nread = functools.partial(torch.load, weights_only=False)", "torch.load"),
        ("import torch\ntorch.serialization.load(path)", "torch.load"),
        ("from torch import serialization as s\ns.load(path)", "torch.load"),
        ("import torch.serialization as s\ns.load(path)", "torch.load"),
        ("import torch\ngetattr(torch, 'load')(path)", "torch.load"),
        ("import torch\nread = getattr(torch, 'load', None)\nread(path)", "torch.load"),
        ("import torch\nfor read in (torch.load,):\n    read(path)", "torch.load"),
        ("import torch\ntorch.load(path, **{'weights_only': False})", "torch.load"),
        ("import torch\ngetattr(torch, name)(path)", "torch as a value"),
        ("import torch\nvars(torch)['load'](path)", "torch as a value"),
        ("import torch\nread(torch, path)", "torch as a value"),
        ("import torch\nself.t = torch", "torch as a value"),
        ("from torch import *\nload(path)", "torch.*"),
        ("import torch\ntorch.hub.load(name)", "torch.hub"),
        ("import torch\ntorch.distributed.rpc.rpc_sync(name)", "torch.distributed.rpc"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(state)", "torch.distributed.checkpoint.load"),
        ("import torch.distributed as dist\ngetattr(dist, 'all_gather_object')(a, b)", "all_gather_object"),
        ("import torch.distributed as dist\nopened = getattr(dist, 'TCPStore')", "TCPStore"),
        ("from torch.distributed import TCPStore as Store\nStore(host, port)", "TCPStore"),
        ("from os import system\nsystem(text)", "os.system"),
        ("from os import system as run\nrun(text)", "os.system"),
        ("import os as o\no.popen(text)", "os.popen"),
        ("import posix\nposix.system(text)", "os.system"),
        ("import importlib\nimportlib.import_module('pickle').loads(data)", "pickle"),
        ("from importlib import import_module as take\nread = take('pickle').loads", "pickle"),
        ("import importlib\nimportlib.import_module('torch').load(path)", "torch.load"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("from importlib import import_module as take\ntake(name)", "importlib.import_module"),
        ("__import__('pickle').loads(data)", "pickle"),
        ("__import__(name)", "__import__"),
        ("import builtins\nbuiltins.eval(text)", "eval"),
        ("run = eval\nrun(text)", "eval"),
        ("import sys\nsys.modules['pickle'].loads(data)", "sys.modules"),
        ("import sys\nsys.modules.get('pickle').loads(data)", "sys.modules"),
        ("import torch\ntorch.load.__call__(path)", "torch.load"),
        ("class Model:\n    compile: bool = False\n    def eval(self): ...\neval(text)", "eval"),
        ("def train(eval): ...\neval(text)", "eval"),
        ("from yaml import load\nload(text)", "yaml.load"),
        ("import subprocess as s\ns.getoutput(text)", "subprocess.getoutput"),
        ("import subprocess\nsubprocess.run(text, **{'shell': True})", "shell"),
        ("import numpy as np\nnp.load(path, None, True)", "allow_pickle"),
    ],
)
def test_dangers_are_found_under_other_names(source, found):
    assert found in dangers(source)


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
