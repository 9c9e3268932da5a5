"""`atoll run --engine dist` as a person meets it: real processes, which are killed, stopped and interrupted."""

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

from atoll.cli import main as cli
from atoll.events import Computed, RoundFinished, RunFinished, RunStarted, Saved
from atoll.runs.launch import log_of
from atoll.telemetry import read_events
from atoll.tensorfile import load_tree

PATIENCE_S = 60.0
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=20",
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
    """A command that is gone afterwards, with all its processes, whatever happens."""
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
    """The process of a rank, once it has said so."""
    log = log_of(folder, rank)
    return lambda: log.exists() and (found := re.findall(r"process (\d+)", log.read_text())) and int(found[-1])


def saved_since(folder, count):
    """Whether there are as many reports of a checkpoint in the first rank's log."""
    return lambda: log_of(folder, 0).exists() and log_of(folder, 0).read_text().count("saved round") >= count


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
    """A run by two processes that nothing happened to, and what was said of it."""
    folder = tmp_path_factory.mktemp("processes") / "run"
    code, out, err = end_of(command("run", "toy-sync", *SETS, "--engine", "dist", "--processes", 2, "--out", folder, "--json"))
    assert code == 0, err
    return folder, out, err


@pytest.fixture
def atoll(monkeypatch, capsys):
    """Calls the command in this process; gives its exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


# ----------------------------------------------------------------------------------------------------------- all is well


def test_a_run_leaves_events_figures_and_a_log_of_each_rank(finished):
    folder, out, err = finished
    summary = json.loads(out.splitlines()[-1])
    assert (summary["engine"], summary["islands"], summary["rounds"], summary["virtual_time_s"]) == ("dist", 2, ROUNDS, None)
    assert summary["wall_time_s"] > 0
    assert summary["tokens"] == 2 * 20 * 8
    events = list(read_events(folder / "events.jsonl"))
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    assert len([e for e in events if isinstance(e, RoundFinished)]) == len([e for e in events if isinstance(e, Saved)]) == ROUNDS
    assert sum(e.tokens for e in events if isinstance(e, Computed)) == summary["tokens"]
    assert weights(folder).digest() == summary["digest"]
    assert f"folder: {folder}" in err
    assert "cluster.link, cluster.step_time_s: ignored" in err
    assert err.count("an exchange may take") >= 1
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in log_of(folder, rank).read_text()


def test_a_finished_run_is_reported_compared_and_resumed_without_a_process(finished, atoll, tmp_path):
    folder, *_ = finished
    code, out, err = atoll("report", folder)
    assert code == 0, err
    assert "trace:" in out
    code, out, err = atoll("compare", folder, folder, "--out", tmp_path, "--json")
    assert code == 0, err
    assert [run["engine"] for run in json.loads(out.splitlines()[-1])["runs"]] == ["dist", "dist"]
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


def test_torchrun_starts_a_run_as_well(finished, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "atoll", "run", "toy-sync", *SETS, "--engine", "dist", "--out", str(tmp_path / "run"), "--json"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["digest"] == weights(finished[0]).digest()
    assert done.stderr.count("finished: val loss") == 1, "one console"


# ------------------------------------------------------------------------------------------------------ somebody is missing


def test_a_run_is_interrupted_killed_and_stopped_and_goes_on_each_time(finished, tmp_path):
    """One run, in four sittings: each start costs seconds. Each is slow enough to be caught in the middle."""
    folder = tmp_path / "run"
    interrupt("run", "toy-sync", *SETS, "--engine", "dist", "--processes", 2, "--out", folder, "--pace", 0.3, folder=folder)
    kill("run", "--resume", folder, "--pace", 0.3, folder=folder)
    shutil.copytree(folder, tmp_path / "other")
    stop("run", "--resume", folder, "--limit", 1.0, "--pace", 0.3, folder=folder)

    code, _, err = end_of(command("run", "--resume", folder, "--pace", 0, "--limit", 60, "--quiet"))
    assert code == 0, err
    assert weights(folder).equal(weights(finished[0])), "those of the run that nothing happened to"
    assert steps_of(folder) == steps_of(finished[0]), "and the log has every round once"

    other = tmp_path / "other"
    code, _, err = end_of(command("run", "--resume", other, "--processes", 3, "--pace", 0, "--quiet"))
    assert code == 0, err
    assert [steps for steps, _ in steps_of(other)] == [steps for steps, _ in steps_of(finished[0])]
    assert steps_of(other)[-1][1] == 3
    assert weights(other).is_finite()


def steps_of(folder):
    return [(event.steps, event.islands) for event in read_events(folder / "events.jsonl") if isinstance(event, RoundFinished)]


def interrupt(*arguments, folder):
    """Ctrl-C in the terminal reaches all processes."""
    with started(*arguments) as process:
        until(saved_since(folder, 1), "a checkpoint")
        pids = [process_of(folder, rank)() for rank in (0, 1)]
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = end_of(process)
    assert code == 130, err
    assert f"Go on: atoll run --resume {folder}" in err
    assert "Traceback" not in err
    assert not any(map(is_there, pids))


def kill(*arguments, folder):
    """A rank dies without a word."""
    before = log_of(folder, 0).read_text().count("saved round")
    with started(*arguments) as process:
        until(saved_since(folder, before + 1), "another checkpoint")
        pids = [process_of(folder, rank)() for rank in (0, 1)]
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        code, _, err = end_of(process)
    assert code == 2, err
    assert "rank 1 has failed" in err
    assert "killed by SIGKILL" in err
    assert f"Go on: atoll run --resume {folder}" in err
    assert "Traceback" not in err
    assert time.monotonic() - began < 20
    assert not any(map(is_there, pids))


def stop(*arguments, folder):
    """A rank is there and says nothing: the other gives it up when the limit is over."""
    before = log_of(folder, 0).read_text().count("saved round")
    with started(*arguments) as process:
        until(saved_since(folder, before + 1), "another checkpoint")
        pid, log = process_of(folder, 1)(), log_of(folder, 0)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: "error:" in log.read_text(), "the other to give it up")
        assert time.monotonic() - began < 20
        os.kill(pid, signal.SIGKILL)
        code, _, err = end_of(process)
    assert code == 2, err
    assert re.search(r"rank 0 could not (hear from|send to) rank 1 within 1 s", err)


# ------------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "toy-sync", "--processes", 2], "--processes: for real processes. Add --engine dist"),
        (["run", "toy-sync", "--limit", 3, "--pace", 1], "--pace, --limit: for real processes"),
        (["run", "toy-async", "--engine", "dist", "--processes", 2], "AsyncLocalSGD has a hub"),
        (["run", "demo-two-level", "--engine", "dist", "--processes", 3], "devices_per_island=2"),
        (["run", "--engine", "dist"], "no recipe was given"),
        (["run", "toy-sync", *SETS, "--set", "data.shards=1000", "--engine", "dist", "--processes", 2], "shards=1000"),
        (["run", "toy-sync", "--engine", "dist", "--processes", 2, "--limit", -1], "limit_s=-1.0"),
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
    assert (code, "one of real processes" in err) == (2, True)
    code, _, err = atoll("run", "toy-sync", *SETS, "--out", tmp_path / "sim", "--quiet")
    assert code == 0, err
    code, _, err = atoll("run", "--resume", tmp_path / "sim", "--engine", "dist")
    assert (code, "a simulated one" in err) == (2, True)
    code, _, err = atoll("run", "toy-sync", "--resume", folder)
    assert (code, "goes on as it began" in err) == (2, True)
    code, _, err = atoll("run", "--resume", folder, "--out", tmp_path / "new")
    assert (code, "in its own folder" in err) == (2, True)
