"""Inputs that no run can be made of: each ends with one sentence and exit code 2, soon, and leaves no folder behind."""

import resource
import subprocess
import sys
import time

import pytest

from atoll.runs.folder import LOOP_RECIPE, RunFolder
from tests.cli.test_main import SMALL, sets

DIGITS = "9" * 400
CPU_LIMIT_S, PATIENCE_S = 5.0, 60.0
"""What a refusal may compute. Seconds of the clock depend on what else the machine does: they are bounded far above."""
TOY, TEXT, DDP = ["run", "toy-sync"], ["run", "demo-diloco"], ["run", "demo-ddp"]
PROCESSES, ELASTIC, RAY = [*TOY, "--engine", "processes"], [*TOY, "--elastic"], ["run", "toy-async", "--engine", "ray"]

REFUSED = [
    # Numbers of 400 digits
    (TOY, f"cluster.link.latency_s={DIGITS}", "at most 31,622,400 seconds"),
    (TOY, f"optimizer.weight_decay={DIGITS}", "at most 1e+300"),
    (TOY, f"seed={DIGITS}", "seed=99999"),
    (TOY, f"train.steps={DIGITS}", "at most 1,000,000,000"),
    (TOY, f"model.hidden=-{DIGITS}", "at least -1,073,741,824"),
    # Times that a sum of virtual seconds cannot hold
    (TOY, "cluster.step_time_s=[1e308]", "step_time_s[0]=1e+308: it is at most 31,622,400 seconds"),
    (TOY, "cluster.step_time_s=[1e-320]", "at least 1e-09"),
    (TOY, "cluster.link.latency_s=1e308", "at most 31,622,400 seconds"),
    (TOY, "cluster.link.bandwidth_mbit_per_s=1e-320", "at least 1e-06"),
    (TOY, "cluster.inside.bandwidth_mbit_per_s=1e300", "at most 1,000,000,000,000 Mbit/s, or inf"),
    (["run", "toy-async"], "cluster.outages=[Outage(island=0, start_s=1e308)]", "at most 31,622,400 seconds"),
    (["run", "toy-async"], "algorithm.grace_s=1e300", "at most 31,622,400 seconds (a year), or inf"),
    # Counts
    (TOY, "cluster.threads_per_island=1000000", "at most 1,024 threads"),
    (TOY, "cluster.islands=1e9", "at most 65536"),
    (TOY, "train.batch_size=1e12", "at most 1,000,000,000"),
    (TOY, "train.batch_size=1e9", "the data have 4096 examples"),
    (TOY, "train.warm_start_steps=1e12", "at most 1,000,000,000"),
    (TEXT, "data.seq_len=1e12", "at most 1,000,000,000"),
    (TEXT, "data.seq_len=1e9", "Give more text, or lower seq_len"),
    (TEXT, "data.eval_batches=1e12", "at most 1,000,000,000"),
    (DDP, "algorithm.accumulation=1e12", "at most 1,000,000,000"),
    (DDP, "cluster.away=[Away(island=0, start=0, stop=1e9), Away(island=1, start=0, stop=1e9)]", "no island is left in round 0"),
    (TEXT, "model.width=1e9", "at most 1,048,576"),
    (TEXT, "model.layers=1e9", "at most 10,000"),
    # Files and tokenizers
    (TEXT, "data.corpus=files:/proc", "/proc belongs to /proc"),
    (TEXT, "data.corpus=files:/proc/self/environ", "/proc/self/environ belongs to /proc"),
    (TEXT, "data.corpus=files:~nobody-at-all/x", "~nobody-at-all/x: this path cannot be used"),
    (TEXT, f"data.corpus=files:{'x' * 300}", "File name too long"),
    (TEXT, "data.tokenizer=bpe:99999999999", "at most 1,048,576"),
    # Waits of processes
    (PROCESSES, "engine.step_delay=inf", "At most 86,400 s is possible"),
    (PROCESSES, "engine.start_timeout_s=inf", "at most 1,000,000 seconds"),
    (PROCESSES, "engine.exchange_timeout_s=1e300", "at most 1,000,000 seconds"),
    (PROCESSES, "engine.exchange_timeout_s=1e-320", "at least 0.001"),
    (ELASTIC, "engine.step_delay=1e300", "At most 86,400 s is possible"),
    (ELASTIC, "engine.start_timeout_s=inf", "at most 1,000,000 seconds"),
    (ELASTIC, "engine.quorum_timeout_s=1e300", "at most 1,000,000 seconds"),
    (ELASTIC, "engine.quorum_timeout_s=nan", "at most 1,000,000 seconds"),
    (ELASTIC, "engine.heartbeat_timeout_s=inf", "at most 1,000,000 seconds"),
    (RAY, "engine.step_delay=inf", "At most 86,400 s is possible"),
    (RAY, "engine.save_every_s=1e300", "at most 1,000,000 seconds"),
    (RAY, "engine.hub_timeout_s=inf", "at most 1,000,000 seconds"),
    # Addresses
    (ELASTIC, "engine.listen=256.1.1.1:0", "this machine cannot listen there"),
    (ELASTIC, "engine.listen=192.0.2.1:7000", "this machine cannot listen there (Cannot assign requested address)"),
    (ELASTIC, "engine.listen=..:7000", "over IPv4"),
    (RAY, "engine.address=127.0.0.1:99999", "nothing listens there"),
    (PROCESSES, "engine.nodes=2", "engine.address=none: with engine.nodes=2 it is HOST:PORT of the first machine"),
]
TINY = {
    "toy-sync": ["data=Gaussians(examples=4096, clusters_per_class=1, dimensions=8)", "model.hidden=4"],
    "toy-async": ["model.hidden=4"],
    "demo-diloco": ["data.limit_bytes=60000"],
    "demo-ddp": [*SMALL, "cluster.islands=2"],
}


@pytest.mark.parametrize(("command", "setting", "says"), REFUSED, ids=[setting[:60] for _, setting, _ in REFUSED])
def test_bad_settings_are_refused_with_one_sentence_and_leave_no_folder(atoll, tmp_path, monkeypatch, command, setting, says):
    monkeypatch.chdir(tmp_path)
    began_s, computed_s = time.monotonic(), time.process_time()
    code, out, err = atoll(*command, *sets(*TINY[command[1]], setting))
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert len(err) < 500
    assert says in err
    assert list(tmp_path.iterdir()) == []
    assert time.process_time() - computed_s < CPU_LIMIT_S
    assert time.monotonic() - began_s < PATIENCE_S


def ended(arguments, folder):
    """This Python's process with these arguments, and the seconds that it and its processes computed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=PATIENCE_S, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def loading_s(tmp_path_factory):
    """How long a command computes that only loads recipes: mostly imports."""
    return ended(["-m", "atoll", "show", "demo-diloco"], tmp_path_factory.mktemp("loading"))[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--join", "nowhere.invalid:7000", *sets("engine.network=trusted")], "no run answers there"),
        (["run", "--join", "127.0.0.1:1"], "let the joiner wait: --set engine.join_timeout_s=600"),
        (["run", "--join", "[::1]:7000"], "over IPv4"),
        (["run", "demo-diloco", *sets("data.tokenizer=bpe:99999999999")], "at most 1,048,576"),
        (["run", "toy-sync", "--seed", DIGITS], "seed=99999"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else " ".join(value)[:40],
)
def test_the_command_itself_ends_with_one_sentence_and_leaves_no_folder(tmp_path, loading_s, arguments, says):
    """In processes of their own: a joiner ends its process, and a library may abort it."""
    done, computed_s = ended(["-m", "atoll", *arguments], tmp_path)
    assert computed_s < CPU_LIMIT_S + 2 * loading_s
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_delta_of_any_size_may_be_accepted():
    from atoll.engines.elastic.spec import Elastic

    assert Elastic(max_delta_ratio=float("inf")).max_delta_ratio == float("inf")


@pytest.mark.parametrize(
    "command",
    [
        ("export", "FOLDER", "--out", "model"),
        ("generate", "FOLDER"),
        ("evaluate", "FOLDER", "--on", "stdlib"),
        ("replay", "FOLDER"),
        ("run", "--resume", "FOLDER"),
        ("run", "--resume", "FOLDER", "--extend", 10),
        ("run", "FOLDER/run.json"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_a_command_that_needs_a_model_says_that_the_folder_is_of_an_own_loop(atoll, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    record = {"recipe": LOOP_RECIPE, "algorithm": "DiLoCo(inner_steps=10)", "finish": "average"}
    folder = RunFolder.create(tmp_path / "logged", record, ["train.py"]).path
    code, _, err = atoll(*(str(word).replace("FOLDER", str(folder)) for word in command))
    assert code == 2
    assert f"{folder} has the log of an own loop. Its script has the model, saves it, and trains on" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logged"]
