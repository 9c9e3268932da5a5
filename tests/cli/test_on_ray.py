"""`atoll run --engine ray` as a person meets it: a real Ray, whose hub and workers are killed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from atoll.cli.on_ray import _terminable
from atoll.events import (
    Arrived,
    Dispatched,
    Evaluated,
    HubLoad,
    HubRestarted,
    IslandJoined,
    IslandLeft,
    RunFinished,
    RunStarted,
    Saved,
)
from atoll.telemetry import read_events
from atoll.tensorfile import load_tree
from atoll.testing.chaos import ray_processes

PATIENCE_S = 90.0
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=4",
    "algorithm.outer=DelayedNesterov(period=2)",
    "algorithm.weight=1/k",
    "algorithm.shards=deficit",
    "train.fresh_optimizer=false",
    "train.batch_size=8",
    "train.warm_start_steps=3",
)
SETS = [part for setting in SETTINGS for part in ("--set", setting)]
STEPS, WORKERS = 120, 2


@contextmanager
def started(*arguments, program=(sys.executable, "-m", "atoll")):
    """The command, in a session of its own; it is gone afterwards, with all that it started."""
    process = subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        everybody = family(process.pid)
        if process.poll() is None:
            process.kill()
        process.communicate()
        for one in everybody:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def family(pid):
    """A process and all that it has started."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_of(process):
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end:\n{out}\n{err}") from None
    return process.returncode, out, err


def until(condition, what, process):
    """Waits until there is something, and returns it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert process.poll() is None, f"it ended before {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


def logged(folder, name, pattern):
    """All that a log says of this kind."""
    path = folder / "logs" / f"{name}.log"
    return re.findall(pattern, path.read_text()) if path.exists() else []


def events(folder, *kinds):
    return [event for event in read_events(folder / "events.jsonl") if not kinds or isinstance(event, kinds)]


def beginning(folder, *more):
    """Arguments of a run that takes some seconds."""
    arguments = ["--set", f"train.steps={STEPS}", "--set", "keep.evaluate_every=40", "--processes", WORKERS, "--pace", 0.02]
    return ["run", "toy-async", *SETS, *arguments, "--engine", "ray", "--save-every", 0.3, "--out", folder, *more]


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """A run whose hub and one of whose workers were killed, what it said, what its processes listened on, and its token's mode."""
    folder = tmp_path_factory.mktemp("ray") / "run"
    with started(*beginning(folder, "--json")) as process:
        until(lambda: logged(folder, "hub", "saved round [1-9]"), "a checkpoint of some rounds", process)
        listening = {
            (one.name(), connection.laddr.ip)
            for one in family(process.pid)
            for connection in one.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        token = folder / "ray_token"
        mode, length = token.stat().st_mode & 0o777, len(token.read_text())
        there = ray_processes(folder)
        assert {name: one.poll() for name, one in there.items()} == dict.fromkeys(["hub", "worker-0", "worker-1"])
        slow, dead = there["worker-0"].pid, there["worker-1"].pid
        os.kill(slow, signal.SIGSTOP)  # so that there is something left to do when the other has come back
        os.kill(dead, signal.SIGKILL)
        until(lambda: len(logged(folder, "worker-1", r"process (\d+)")) > 1, "another worker", process)
        until(lambda: len(logged(folder, "hub", r"worker 1, life")) > 1, "it to come", process)
        os.kill(ray_processes(folder)["hub"].pid, signal.SIGKILL)
        os.kill(slow, signal.SIGCONT)
        code, out, err = end_of(process)
    assert code == 0, err
    return folder, out, err, (listening, mode, length)


def test_with_hub_and_worker_killed_a_run_ends_with_its_local_updates_and_takes_none_twice(survived):
    folder, out, err, _ = survived
    summary = json.loads(out.splitlines()[-1])
    assert (summary["engine"], summary["islands"], summary["virtual_time_s"]) == ("ray", WORKERS, None)
    assert summary["local_updates"] == STEPS * WORKERS
    arrived = events(folder, Arrived)
    assert sum(event.steps for event in arrived) == STEPS * WORKERS
    assert [event.version for event in arrived] == list(range(1, len(arrived) + 1)), "every update is the hub's next"
    assert max(Counter((event.island, event.round) for event in arrived).values()) == 1
    begun = {event.round: event for event in events(folder, Dispatched)}
    read = Counter(
        (begun[event.round].shard, begun[event.round].start + step) for event in arrived for step in range(begun[event.round].steps)
    )
    assert max(read.values()) == 1, "and no batch is in two of them"
    assert load_tree(folder / "final.safetensors").digest() == summary["digest"]
    assert "Traceback" not in err


def test_what_died_is_in_the_log_and_was_said(survived):
    folder, _, err, _ = survived
    assert len(events(folder, HubRestarted)) == 1
    restarted = events(folder, HubRestarted)[0]
    assert restarted.checkpoint is not None
    assert (
        len({event.island for event in events(folder, IslandLeft)} & {event.island for event in events(folder, IslandJoined)}) > 0
    )
    assert "worker 1 is gone" in err
    assert "the hub answers again" in err
    assert logged(folder, "hub", r"goes on from checkpoint \d{8}")


def test_the_log_has_one_clock_and_all_that_a_run_reports(survived):
    folder, *_ = survived
    found = events(folder)
    assert isinstance(found[0], RunStarted)
    assert isinstance(found[-1], RunFinished)
    for kind in (Dispatched, Arrived, Evaluated, Saved, HubLoad):
        assert events(folder, kind), kind.__name__
    times = [event.wall_time_s for event in found if isinstance(event, Arrived)]
    assert times == sorted(times)
    assert all(event.virtual_time_s is None for event in found if hasattr(event, "virtual_time_s"))
    last = events(folder, Evaluated)[-1]
    assert (last.local_updates, last.loss) == (STEPS * WORKERS, found[-1].val_loss)


def test_nothing_listens_on_another_interface_and_the_token_is_its_owners(survived):
    folder, _, _, (listening, mode, length) = survived
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening}
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert (mode, length) == (0o600, 64)
    assert not (folder / "ray_token").exists(), "it is gone with the Ray that it was made for"


def test_its_log_is_replayed_to_the_same_weights(survived, atoll):
    folder, *_ = survived
    code, out, err = atoll("replay", folder, "--json", "--quiet")
    found = json.loads(out)
    assert code == 0, err
    assert (found["local_updates"], found["agrees"]) == (STEPS * WORKERS, True)
    assert found["same_bits"], found


def test_a_finished_run_is_reported_compared_and_resumed_without_ray(survived, atoll, tmp_path):
    folder, *_ = survived
    code, out, err = atoll("report", folder)
    assert code == 0, err
    assert "trace:" in out
    assert "asynchrony.png" in out
    code, out, err = atoll("compare", folder, folder, "--out", tmp_path, "--json")
    assert code == 0, err
    code, out, _ = atoll("run", "--resume", folder, "--json")
    assert (code, json.loads(out)["run_dir"]) == (0, str(folder))


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_in_silence(survived, atoll, tmp_path):
    folder = shutil.copytree(survived[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "final.safetensors").unlink()
    log = (folder / "events.jsonl").read_bytes()
    code, _, err = atoll("run", "--resume", folder)
    assert code == 2
    assert f"has no checkpoint, but its log has {len(events(folder, Arrived))} rounds" in err
    assert (folder / "events.jsonl").read_bytes() == log


def test_ctrl_c_ends_all_processes_and_the_run_goes_on_from_the_hubs_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with started(*beginning(folder)) as process:
        until(lambda: logged(folder, "hub", "saved round [1-9]"), "a checkpoint of some rounds", process)
        everybody = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        code, _, err = end_of(process)
        assert code == 130, err
        assert f"Go on: atoll run --resume {folder}" in err
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(everybody, timeout=20)
        assert not alive, alive
    before = len(events(folder, Arrived))
    with started("run", "--resume", folder, "--pace", 0, "--processes", 2, "--json", "--quiet") as process:
        code, out, err = end_of(process)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["local_updates"] == STEPS * WORKERS
    arrived = events(folder, Arrived)
    assert 0 < before < len(arrived)
    assert [event.version for event in arrived] == list(range(1, len(arrived) + 1))
    assert {event.island for event in arrived[before:]} <= {0, 1}


def test_sigterm_ends_a_run_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), _terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def a_cluster(tmp_path, monkeypatch):
    """The address of a Ray cluster on the loopback, with a token, and its process."""
    token, port = tmp_path / "token", free_port()
    token.write_text("f" * 64)
    token.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray = Path(sys.executable).parent / "ray"
    where = ["--node-ip-address", "127.0.0.1", "--port", port, "--temp-dir", tempfile.mkdtemp()]
    least = ["--num-cpus", 2, "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory", 2**27]
    with started("start", "--head", "--block", *where, *least, program=(ray,)) as process:
        until(lambda: listens(port), "a cluster", process)
        yield f"127.0.0.1:{port}", process
    shutil.rmtree(where[-1], ignore_errors=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_a_cluster_that_exists_is_used_with_its_token_and_left_as_it_was(a_cluster, tmp_path):
    address, cluster = a_cluster
    few = ["--set", "train.steps=16", "--set", "keep.evaluate_every=16", "--processes", 1, "--limit", 20]
    where = ["--engine", "ray", "--ray-address", address, "--out", tmp_path / "run"]
    with started("run", "toy-async", *SETS, *few, *where, "--json", "--quiet") as process:
        code, out, err = end_of(process)
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["engine"], summary["local_updates"]) == ("ray", 16)
    assert not (tmp_path / "run" / "ray_token").exists(), "it has one of its own"
    assert cluster.poll() is None
    assert listens(int(address.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "toy-sync", "--engine", "ray"], "DiLoCo has rounds that all islands take part in"),
        (["run", "toy-async", "--engine", "dist"], "Use --engine ray or sim"),
        (["run", "--engine", "ray"], "no recipe was given"),
        (["run", "toy-async", "--processes", 3, "--workers-most", 2], "most=2: at least as many as there are workers"),
        (["run", "toy-async", "--engine", "ray", "--save-every", 0], "save_every_s=0.0: it is more than 0 seconds"),
        (["run", "toy-async", "--engine", "dist", "--ray-address", "127.0.0.1:1"], "another --engine with a run on Ray"),
        (["run", "toy-async", "--engine", "ray", "--backend", "gloo"], "Leave them out"),
        (["run", "toy-async", *SETS, "--set", "data.shards=1000", "--engine", "ray"], "shards=1000"),
    ],
)
def test_what_is_impossible_is_refused_and_leaves_no_folder(atoll, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, _, err = atoll(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert list(Path().iterdir()) == []


def test_without_ray_the_message_names_the_extra(atoll, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    code, _, err = atoll("run", "toy-async", *SETS, "--engine", "ray", "--out", tmp_path / "run")
    assert code == 2
    assert 'pip install "atoll[ray]"' in err


def test_a_folder_stays_with_its_engine(survived, atoll, tmp_path):
    folder, *_ = survived
    code, _, err = atoll("run", "--resume", folder, "--engine", "dist")
    assert (code, "another --engine" in err) == (2, True)
    code, _, err = atoll("run", "toy-async", "--resume", folder)
    assert (code, "goes on as it began" in err) == (2, True)
    code, _, err = atoll("run", "--resume", folder, "--out", tmp_path / "new")
    assert (code, "in its own folder" in err) == (2, True)
