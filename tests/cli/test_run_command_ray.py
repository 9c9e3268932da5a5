"""`atoll run --engine ray` on a real Ray, whose hub and workers are killed."""

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
from typing import NamedTuple

import psutil
import pytest
import typer

from atoll.cli.run_command import interruptible
from atoll.core.events import (
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
from atoll.core.serialization import load_tree
from atoll.engines.network_interfaces import free_port
from atoll.engines.ray.spec import Ray
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import CHAOS_LOG, FaultScript, Freeze, Kill, TimedFault
from atoll.testing.chaos.ray_faults import HUB, ray_processes

pytestmark = pytest.mark.long_setup
PATIENCE_S = 180.0
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
    "algorithm.codec=int8",
    "train.fresh_optimizer=false",
    "train.batch_size=8",
    "train.warm_start_steps=3",
)
STRANGE = "strange.json"
"""A script with a victim that no run on Ray has."""
SETS = [part for setting in SETTINGS for part in ("--set", setting)]
STEPS, WORKERS = 120, 2
FAULTS = FaultScript(
    faults=(
        # A frozen worker computes nothing, so the run cannot end before the hub and the other worker are back.
        TimedFault(at_s=0.0, fault=Freeze(victim="worker-0", for_s=1000.0)),
        TimedFault(at_s=0.0, fault=Kill(victim="worker-1")),
        TimedFault(at_s=1.0, fault=Kill(victim=HUB)),
    )
)


@contextmanager
def started(*arguments, program=(sys.executable, "-m", "atoll"), says=subprocess.PIPE):
    """The command, in a session of its own; it and all processes that it started are killed at the end. Errors are written to
    `says`."""
    process = subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=says,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        processes = family(process.pid)
        if process.poll() is None:
            process.kill()
        process.communicate()
        for one in processes:
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
    """All events of this kind in a log."""
    path = folder / "logs" / f"{name}.log"
    return re.findall(pattern, path.read_text()) if path.exists() else []


def events(folder, *kinds):
    return [event for event in read_events(folder / "events.jsonl") if not kinds or isinstance(event, kinds)]


def beginning(folder, *more):
    """Arguments of a run of about 25 s. The delay is 0.3 s times `cluster.step_time_s` per step, on a machine of any speed, so an
    interruption after a few rounds is long before its end."""
    arguments = [
        "--set",
        f"train.steps={STEPS}",
        "--set",
        "keep.evaluate_every=40",
        "--processes",
        WORKERS,
        "--set",
        "engine.step_delay=0.3",
        "--set",
        "engine.devices=2",
    ]
    return ["run", "toy-async", *SETS, *arguments, "--engine", "ray", "--set", "engine.save_every_s=0.3", "--out", folder, *more]


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def a_cluster(tmp_path_factory):
    """The address of a Ray cluster on the loopback, with a token, and its process."""
    token, port = tmp_path_factory.mktemp("cluster") / "token", free_port("127.0.0.1")
    token.write_text("f" * 64)
    token.chmod(0o600)
    ray = Path(sys.executable).parent / "ray"
    where = ["--node-ip-address", "127.0.0.1", "--port", port, "--temp-dir", tempfile.mkdtemp()]
    least = ["--num-cpus", WORKERS, "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory", 2**27]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        environment.setenv("RAY_AUTH_MODE", "token")
        with started("start", "--head", "--block", *where, *least, program=(ray,)) as process:
            until(lambda: listens(port), "a cluster", process)
            yield f"127.0.0.1:{port}", process
    shutil.rmtree(where[-1], ignore_errors=True)


def text_of(folder):
    return (folder / "events.jsonl").read_text()


def listening_of(process):
    """What its processes listen on."""
    sockets = [(one, connection) for one in family(process.pid) for connection in one.net_connections("inet")]
    return {(one.name(), connection.laddr.ip) for one, connection in sockets if connection.status == psutil.CONN_LISTEN}


class Interrupted(NamedTuple):
    """A run whose hub and worker were killed, and that was then interrupted: its output, and what the test observed."""

    folder: Path
    code: int
    err: str
    listening: set
    token: tuple
    alive: list
    arrived: int


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run on a local Ray. The test kills a worker, then the hub, and sends SIGINT when both are replaced."""
    folder = tmp_path_factory.mktemp("ray") / "run"
    said = folder.parent / "said"
    with said.open("w") as says, started(*beginning(folder), says=says) as process:
        until(lambda: logged(folder, "hub", "saved round [1-9]"), "a checkpoint of some rounds", process)
        token, there, listening = folder / "ray_token", ray_processes(folder), listening_of(process)
        seen = token.stat().st_mode & 0o777, len(token.read_text())
        assert {name: one.poll() for name, one in there.items()} == dict.fromkeys(["hub", "worker-0", "worker-1"])
        chaos = FaultInjector(FAULTS, folder.parent / CHAOS_LOG)  # by a clock of the test's own: machines may be slow
        try:
            chaos.emit(next(event for event in events(folder, Arrived)))
            chaos.step(0.0, there)
            until(lambda: '"IslandLeft", "island": 1' in text_of(folder), "the hub to remove the worker", process)
            chaos.step(1.0, ray_processes(folder))
            until(lambda: len(logged(folder, "hub", "worker 1, incarnation")) > 1, "another hub and another worker", process)
        finally:
            chaos.close()
        until(lambda: '"Arrived"' in text_of(folder).partition('"HubRestarted"')[2], "more updates", process)
        for news in ("the hub replies again", "a new hub continues"):  # the client and an event report it, in any order
            until(lambda news=news: news in said.read_text(), f"the driving process to log: {news}", process)
        processes = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        code, *_ = end_of(process)
        _, alive = psutil.wait_procs(processes, timeout=20)
    return Interrupted(folder, code, said.read_text(), listening, seen, alive, len(events(folder, Arrived)))


@pytest.fixture(scope="module")
def survived(interrupted, a_cluster):
    """The same run, resumed to its end on an existing cluster with a fault script, without a noticeable delay; and its output."""
    folder = interrupted.folder
    script = folder.parent / "script.json"
    script.write_text(FaultScript(faults=(TimedFault(at_s=0.0, fault=Freeze(victim=HUB, for_s=0.2)),)).to_text())
    given = (f"engine.address={a_cluster[0]!r}", "engine.step_delay=0.005", "engine.hub_timeout_s=60")
    how = ["--processes", 1, *(part for setting in given for part in ("--set", setting))]
    with started("chaos", script, "--resume", folder, *how, "--json", "--quiet") as process:
        code, out, err = end_of(process)
    assert code == 0, err
    return folder, out, err


def test_ctrl_c_ends_all_processes_and_prints_how_to_resume(interrupted):
    assert interrupted.code == 130, interrupted.err
    assert f"Resume: atoll run --resume {interrupted.folder}" in interrupted.err
    assert "Traceback" not in interrupted.err
    assert not interrupted.alive, interrupted.alive


def test_a_run_continues_from_the_hubs_checkpoint(interrupted, survived):
    folder, *_ = survived
    arrived = events(folder, Arrived)
    assert 0 < interrupted.arrived < len(arrived)
    assert {event.island for event in arrived[interrupted.arrived :]} == {0}, "by one worker"
    lost = [event.lost_rounds for event in events(folder, HubRestarted)[1:]]
    assert sum(lost) <= WORKERS, "but for what was on its way when it was interrupted"


def test_a_cluster_that_exists_is_used_with_its_token_and_left_as_it_was(survived, a_cluster):
    address, cluster = a_cluster
    folder, *_ = survived
    assert json.loads((folder / "engine.json").read_text())["settings"]["address"] == address
    assert not (folder / "ray_token").exists(), "it has one of its own"
    assert cluster.poll() is None
    assert listens(int(address.rpartition(":")[2]))


def test_a_fault_script_is_injected_on_ray_and_its_cost_is_reported(survived):
    folder, _, err = survived
    actions = [json.loads(line) for line in (folder / CHAOS_LOG).read_text().splitlines()]
    assert [action["injected"]["victim"] for action in actions if "injected" in action] == [HUB]
    assert [action["reverted"] for action in actions if "reverted" in action] == [{"fault": "Freeze", "done": True}]
    report = err[err.index("faults") :].splitlines()
    assert report[0].split() == ["faults", "1", "Freeze"]
    assert f"with {STEPS * WORKERS} local updates: none twice" in report[1]
    assert f"{len(events(folder, HubRestarted))} restarts" in report[3]


def test_with_hub_and_worker_killed_a_run_ends_with_its_local_updates_and_takes_none_twice(survived):
    folder, out, err = survived
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


def test_deaths_of_hub_and_worker_are_logged_and_printed(interrupted, survived):
    folder, err = survived[0], interrupted.err
    restarted = events(folder, HubRestarted)[0]
    assert restarted.checkpoint is not None
    assert err.count("a new hub continues") == 1
    assert (
        len({event.island for event in events(folder, IslandLeft)} & {event.island for event in events(folder, IslandJoined)}) > 0
    )
    assert "worker 1 has died" in err
    assert "the hub replies again" in err
    assert logged(folder, "hub", r"restarted from checkpoint \d{8}")


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


def test_a_local_ray_listens_on_the_loopback_alone_and_only_its_owner_reads_the_token(interrupted):
    assert {"raylet", "gcs_server"} <= {name for name, _ in interrupted.listening}
    assert {ip for _, ip in interrupted.listening} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert interrupted.token == (0o600, 64)
    assert not (interrupted.folder / "ray_token").exists(), "it is gone with the Ray that it was made for"


@pytest.mark.slow
def test_a_run_whose_ray_loses_its_head_says_so_within_seconds_and_leaves_no_process_and_no_token(tmp_path):
    """Ray itself ends the driving process after 60 s, with a fatal error in its own log alone: the error is ours."""
    folder = tmp_path / "run"
    with started(*beginning(folder)) as process:
        until(lambda: logged(folder, "hub", "saved round [1-9]"), "a checkpoint of some rounds", process)
        there = family(process.pid)[1:]
        (head,) = (one for one in there if one.name() == "gcs_server")
        head.kill()
        code, _, err = end_of(process)
    assert (code, "Traceback" in err) == (2, False), err
    assert re.search(
        r"error: the head of the Ray cluster at 127\.0\.0\.1:\d+ does not answer any more.*resume the run with --resume", err
    )
    assert "the hub did not save" not in err
    gone, alive = psutil.wait_procs(there, timeout=10)
    assert (len(gone), alive) == (len(there), [])
    assert not (folder / "ray_token").exists()


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


def test_a_run_whose_checkpoints_are_removed_is_not_restarted_without_a_message(survived, atoll, tmp_path):
    folder = shutil.copytree(survived[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "final.safetensors").unlink()
    log = (folder / "events.jsonl").read_bytes()
    code, _, err = atoll("run", "--resume", folder)
    assert code == 2
    assert f"has no checkpoint, but its log has {len(events(folder, Arrived))} rounds" in err
    assert (folder / "events.jsonl").read_bytes() == log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_end_a_run_as_ctrl_c_does(number):
    before, stopped = signal.getsignal(number), []

    def run():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # a shell that closes repeats the terminal's signal
            stopped.append("its processes")

    with pytest.raises(typer.Exit), interruptible(None, Ray()):
        run()
    assert stopped == ["its processes"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "toy-sync", "--engine", "ray"], "DiLoCo has rounds that all islands take part in"),
        (["run", "toy-async", "--engine", "dist"], "Use --engine ray or simulator"),
        (["run", "--engine", "ray"], "no recipe was given"),
        (
            ["run", "toy-async", "--engine", "ray", "--processes", 3, "--set", "engine.max_workers=2"],
            "max_workers=2: at least engine.processes=3",
        ),
        (["run", "toy-async", "--engine", "ray", "--set", "engine.backend=gloo"], "Ray has no such setting"),
        (
            ["chaos", STRANGE, "toy-async", "--engine", "ray"],
            "the run starts hub, worker-0, worker-1, worker-2, worker-3.",
        ),
        (["chaos", STRANGE, "toy-async", "--engine", "ray", "--set", "engine.max_workers=5"], "worker-4. Name one of these"),
        (["chaos", STRANGE, "toy-async", "--engine", "sim"], "faults are injected into elastic runs and runs on Ray"),
        (["chaos", "nowhere", "toy-async", "--engine", "ray"], "nowhere cannot be read"),
        (["run", "toy-async", *SETS, "--set", "data.shards=1000", "--engine", "ray"], "shards=1000"),
    ],
)
def test_what_is_impossible_is_refused_and_leaves_no_folder(atoll, tmp_path, monkeypatch, arguments, says):
    (tmp_path / STRANGE).write_text(FaultScript(faults=(TimedFault(at_s=1.0, fault=Kill(victim="island-0000")),)).to_text())
    monkeypatch.chdir(tmp_path)
    code, _, err = atoll(*arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert [path.name for path in Path().iterdir()] == [STRANGE]


def test_without_ray_the_message_names_the_extra(atoll, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    code, _, err = atoll("run", "toy-async", *SETS, "--engine", "ray", "--out", tmp_path / "run")
    assert code == 2
    assert '[ray]"`' in err


def test_a_folder_stays_with_its_engine(survived, atoll, tmp_path):
    folder, *_ = survived
    code, _, err = atoll("run", "--resume", folder, "--engine", "dist")
    assert (code, "this run's engine is ray" in err) == (2, True)
    code, _, err = atoll("run", "--resume", folder, "--out", tmp_path / "new")
    assert (code, "in its own folder" in err) == (2, True)
