"""`atoll run --engine processes` on real processes, which are killed, stopped and interrupted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.core.events import Computed, RoundFinished, RunFinished, RunStarted, Saved
from atoll.core.serialization import load_tree
from atoll.engines.processes.rank import rank_log_path
from atoll.telemetry.event_log import read_events

pytestmark = pytest.mark.long_setup
PATIENCE_S = 180.0
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=20",
    "train.warm_start_steps=3",
    "train.batch_size=8",
    "keep.evaluate_every=4",
    "keep.save_every=2",
)
SETS = [part for setting in SETTINGS for part in ("--set", setting)]
ROUNDS = 10


def command(*arguments, **options):
    """Starts the command in a session of its own, as a shell would."""
    return subprocess.Popen(
        [sys.executable, "-m", "atoll", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def end_of(process):
    """Its exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"it did not end:\n{out}\n{err}") from None
    return process.returncode, out, err


@contextmanager
def started(*arguments):
    """A command that is ended afterwards, with all its processes, whatever happens."""
    process = command(*arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def until(condition, what):
    """Waits until there is something, and returns it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
    return found


def process_of(folder, rank):
    """The process of a rank, by its own log."""
    return int(re.findall(r"process (\d+)", rank_log_path(folder, rank).read_text())[-1])


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def weights(folder):
    return load_tree(folder / "final.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run by two processes of torchrun without a failure, and its output."""
    folder = tmp_path_factory.mktemp("processes") / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [
        "-m",
        "atoll",
        "run",
        "toy-sync",
        *SETS,
        "--engine",
        "dist",
        "--out",
        str(folder),
        "--json",
        "--set",
        "engine.start_timeout_s=99",
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------------- all is well


def test_a_run_leaves_events_figures_and_a_log_of_each_rank(finished):
    folder, out, err = finished
    summary = json.loads(out.splitlines()[-1])
    assert (summary["engine"], summary["islands"], summary["rounds"], summary["virtual_time_s"]) == ("processes", 2, ROUNDS, None)
    assert summary["wall_time_s"] > 0
    assert summary["tokens"] == 2 * 20 * 8
    events = list(read_events(folder / "events.jsonl"))
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    assert len([e for e in events if isinstance(e, RoundFinished)]) == len([e for e in events if isinstance(e, Saved)]) == ROUNDS
    assert sum(e.tokens for e in events if isinstance(e, Computed)) == summary["tokens"]
    assert weights(folder).digest() == summary["digest"]
    assert err.count(f"folder: {folder}") == 1, "one console"
    assert err.count("finished: val loss") == 1
    assert "an exchange may take" in err
    assert err.count("cluster.link, cluster.step_time_s: ignored") == 1
    assert err.count("outside of rounds a rank waits 99 s for the others (engine.start_timeout_s)") == 1
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in rank_log_path(folder, rank).read_text()


def test_a_finished_run_is_reported_compared_and_resumed_without_a_process(finished, atoll, tmp_path):
    folder, *_ = finished
    code, out, err = atoll("report", folder)
    assert code == 0, err
    assert "trace:" in out
    code, out, err = atoll("compare", folder, folder, "--out", tmp_path, "--json")
    assert code == 0, err
    assert [run["engine"] for run in json.loads(out.splitlines()[-1])["runs"]] == ["processes", "processes"]
    code, out, _ = atoll("run", "--resume", folder, "--json")
    assert (code, json.loads(out)["run_dir"]) == (0, str(folder))


def test_the_simulator_gives_the_same_weights(finished, atoll, tmp_path):
    _, out, _ = finished
    code, simulated, err = atoll(
        "run", "toy-sync", *SETS, "--set", "cluster.islands=2", "--out", tmp_path / "sim", "--json", "--quiet"
    )
    assert code == 0, err
    real, virtual = json.loads(out.splitlines()[-1]), json.loads(simulated.splitlines()[-1])
    for name in ("digest", "val_loss", "tokens", "sent_bytes_per_island", "local_updates", "outer_steps"):
        assert real[name] == virtual[name], name


# -------------------------------------------------------------------------------------------------------- a rank is missing


def beginning(folder, *more):
    """Arguments of a run that is slow enough to be caught in the middle."""
    return [
        "run",
        "toy-sync",
        *SETS,
        "--engine",
        "dist",
        "--processes",
        2,
        "--set",
        "engine.step_delay=0.3",
        "--out",
        folder,
        *more,
    ]


def caught(folder):
    """The processes of a run, once it has saved something."""
    until(lambda: rank_log_path(folder, 0).exists() and "saved round" in rank_log_path(folder, 0).read_text(), "a checkpoint")
    return [process_of(folder, rank) for rank in (0, 1)]


def test_when_a_rank_is_killed_it_is_named_at_once_and_as_many_processes_or_others_continue(finished, atoll, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    before = signal.getsignal(signal.SIGINT), "GLOO_SOCKET_IFNAME" in os.environ
    with started(
        *beginning(folder, "--set", "engine.start_timeout_s=88", "--set", f"engine.exchange_timeout_s={10 * PATIENCE_S}")
    ) as process:
        pids = caught(folder)
        busy, *_ = atoll("run", "--resume", folder, "--processes", 3)
        os.kill(pids[1], signal.SIGKILL)
        code, _, err = end_of(process)
    assert code == 2, err
    assert "rank 1 has failed, and the others were stopped: it was killed by SIGKILL." in err
    assert f"Resume: atoll run --resume {folder}" in err
    assert "Traceback" not in err
    assert not any(map(is_there, pids))
    assert (err.count(f"folder: {folder}\n"), err.count("cluster.link: ignored")) == (1, 1)
    assert all("88 s outside of rounds" in rank_log_path(folder, rank).read_text() for rank in (0, 1)), "all ranks log it"
    assert (busy, json.loads((folder / "engine.json").read_text())["settings"]["processes"]) == (2, 2), (
        "a folder in use is left as it is"
    )
    shutil.copytree(folder, other)

    code, out, err = atoll("run", "--resume", folder, "--set", "engine.step_delay=0", "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out)["run_dir"] == str(folder)
    assert weights(folder).equal(weights(finished[0])), "those of the run that nothing happened to"
    assert rounds_of(folder) == rounds_of(finished[0]), "and the log has every round once"

    code, out, err = atoll("run", "--resume", other, "--processes", 3, "--set", "engine.step_delay=0", "--quiet")
    assert code == 0, err
    assert (signal.getsignal(signal.SIGINT), "GLOO_SOCKET_IFNAME" in os.environ) == before, "the caller's own are left alone"
    assert [steps for steps, _ in rounds_of(other)] == [steps for steps, _ in rounds_of(finished[0])]
    assert {islands for _, islands in rounds_of(other)} == {2, 3}
    assert str(other) in out.replace("\n", "")
    code, out, err = atoll("report", other)
    assert code == 0, err
    assert "trace:" in out


@pytest.mark.parametrize(
    ("number", "exit_code", "says"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted. Resume", id="ctrl-c"),
        pytest.param(signal.SIGTERM, 2, "the run was stopped by SIGTERM. Resume", id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_processes_and_the_command_prints_how_to_resume(tmp_path, number, exit_code, says):
    folder = tmp_path / "run"
    with started(*beginning(folder)) as process:
        pids = caught(folder)
        os.killpg(process.pid, number)
        code, _, err = end_of(process)
    assert code == exit_code, err
    assert f"{says}: atoll run --resume {folder}" in err
    assert "Traceback" not in err
    assert not any(map(is_there, pids))


def test_a_rank_that_is_alive_and_silent_is_given_up_after_the_timeout(tmp_path):
    folder = tmp_path / "run"
    with started(*beginning(folder, "--set", "engine.exchange_timeout_s=3")) as process:
        (_, pid), log = caught(folder), rank_log_path(folder, 0)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "error:" in log.read_text(), "the other to give it up")
        os.kill(pid, signal.SIGKILL)  # who started it waits half a minute for it to end by itself
        code, _, err = end_of(process)
    assert code == 2, err
    assert re.search(r"rank 0 could not (receive from|send to) rank 1 within 3 s", err)


def rounds_of(folder):
    return [(event.steps, event.islands) for event in read_events(folder / "events.jsonl") if isinstance(event, RoundFinished)]


# ------------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "toy-sync", "--processes", 2], "--processes 2: --engine simulator runs in one process. Add --engine"),
        (["run", "toy-sync", "--set", "engine.step_delay=1"], "Simulator has no such setting"),
        (["run", "toy-async", "--engine", "dist", "--processes", 2], "AsyncLocalSGD has a hub"),
        (["run", "demo-two-level", "--engine", "dist", "--processes", 3], "devices_per_island=2"),
        (["run", "--engine", "dist"], "no recipe was given"),
        (["run", "toy-sync", *SETS, "--set", "data.shards=1000", "--engine", "dist", "--processes", 2], "shards=1000"),
        (["run", "toy-sync", "--engine", "dist", "--set", "engine.exchange_timeout_s=-1"], "exchange_timeout_s=-1.0"),
        (
            ["run", "toy-sync", "--engine", "dist", "--processes", 2, "--set", "engine.backend=nccl", "--set", "train.device=cpu"],
            "engine.backend=nccl connects GPUs",
        ),
    ],
)
def test_what_is_impossible_is_refused_and_leaves_no_folder(atoll, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, _, err = atoll(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert list(Path().iterdir()) == []


def test_a_folder_stays_with_its_engine(finished, atoll, tmp_path):
    folder, *_ = finished
    code, _, err = atoll("run", "--resume", folder, "--engine", "sim")
    assert (code, "this run's engine is processes" in err) == (2, True)
    code, _, err = atoll("run", "toy-sync", *SETS, "--out", tmp_path / "sim", "--quiet")
    assert code == 0, err
    code, _, err = atoll("run", "--resume", tmp_path / "sim", "--engine", "dist")
    assert (code, "this run's engine is simulator" in err) == (2, True)
    code, _, err = atoll("run", "--resume", folder, "--set", "seed=1")
    assert (code, "resumes with the settings that it began with" in err) == (2, True)
    code, _, err = atoll("run", "--resume", folder, "--out", tmp_path / "new")
    assert (code, "in its own folder" in err) == (2, True)
