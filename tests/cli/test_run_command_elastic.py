"""`atoll run --engine elastic` and `atoll chaos` on real processes, some of which are killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager

import pytest

from atoll import recipes
from atoll.core.events import Attended, IslandJoined, IslandLeft, Leased, RoundFinished, RunFinished
from atoll.engines.elastic import launch
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous
from atoll.engines.elastic.run_identity import JoinFile, RunSecrets, run_id_of
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.elastic.supervisor import log_of
from atoll.engines.network_interfaces import free_port
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import read_events

PATIENCE_S = 180.0
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.warm_start_steps=3",
    "train.batch_size=8",
    "cluster.step_time_s=[1.0]",
    "keep.evaluate_every=20",
    "keep.save_every=4",
)
SETS = [part for setting in SETTINGS for part in ("--set", setting)]


@contextmanager
def running(*arguments, program=("-m", "atoll")):
    """The command, in a session and a folder of its own, where a joiner's log is; what is left of it is killed."""
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=folder.name,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        folder.cleanup()


def end_of(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def until(condition, what, process):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, f"it ended before there was {what}: {process.communicate()}"
        assert time.monotonic() < deadline_s, f"there was never {what}"
        time.sleep(0.02)


def rounds(folder):
    log = folder / "events.jsonl"
    return [event.round for event in read_events(log) if isinstance(event, RoundFinished)] if log.exists() else []


def process_of(folder, name):
    """The process that last began to write the log of this island."""
    lines = [line for line in log_of(folder, name).read_text().splitlines() if ", process " in line]
    return int(lines[-1].split(", process ")[1].split(",")[0])


def child_of(folder, word):
    """The process whose command line has this word and this folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().decode().split("\0")
        except OSError:
            continue
        if word in command and any(str(folder) in part for part in command):
            return int(pid), command
    raise AssertionError(f"there is no process {word} of {folder}")


def hurry(folder):
    """Islands that start after a restart of the rendezvous do not sleep."""
    join_info = folder / "join_info.json"
    info = json.loads(join_info.read_text())
    info["spec"]["step_delay"] = 0.0
    del info["blake2b"]
    join_info.write_text(json.dumps(info))


def events(folder, kind):
    return [event for event in read_events(folder / "events.jsonl") if isinstance(event, kind)]


def test_a_joiner_says_how_long_it_looks_for_the_run(monkeypatch, capsys):
    asked = []

    def fetch(address, timeout_s, run_id):
        asked.append(timeout_s)
        raise KeyboardInterrupt

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(launch, "fetch_join_info", fetch)
    monkeypatch.setattr(os, "_exit", end)  # which would end the tests
    monkeypatch.setenv("RUST_LOG", "warn")
    with pytest.raises(SystemExit, match="130"):
        launch.join_run("127.0.0.1:29400", ("engine.join_timeout_s=30",))
    assert "looking for the run at 127.0.0.1:29400 for at most 30 s; Ctrl-C ends it" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="130"):
        launch.join_run("127.0.0.1:29400", ())
    assert "looking" not in capsys.readouterr().err
    assert asked == [30.0, 0.0]


@pytest.mark.slow
def test_a_joiner_waits_for_a_run_that_starts_later(tmp_path):
    folder, address = tmp_path / "run", f"127.0.0.1:{free_port('127.0.0.1')}"
    late = ["--elastic", "--processes", 1, "--set", "engine.step_delay=0.2", "--set", f"engine.listen={address}", "--out", folder]
    with running("run", "--join", address, "--set", "engine.join_timeout_s=90") as joiner:
        assert f"looking for the run at {address} for at most 90 s" in joiner.stderr.readline()
        with running("run", "toy-sync", *SETS, "--set", "train.steps=400", *late) as process:
            until(lambda: rounds(folder) and events(folder, Attended)[-1].participating == 2, "a commit with the joiner", process)
            process.send_signal(signal.SIGINT)
            end_of(process)


@pytest.mark.slow
def test_islands_the_lighthouse_and_then_all_of_them_are_killed_and_another_joins(tmp_path):
    folder, steps = tmp_path / "run", 160
    arguments = [
        "run",
        "toy-sync",
        *SETS,
        "--set",
        f"train.steps={steps}",
        "--elastic",
        "--processes",
        2,
        "--set",
        "engine.step_delay=0.1",
    ]
    with running(*arguments, "--out", folder) as process:
        until(lambda: len(rounds(folder)) >= 2, "a round", process)
        os.kill(process_of(folder, "island-0001"), signal.SIGKILL)
        until(lambda: any(e.participating == 1 for e in events(folder, Attended)), "a commit without it", process)
        until(lambda: events(folder, Attended)[-1].participating == 2, "a commit with it again", process)
        hurry(folder)
        lighthouse, command = child_of(folder, "rendezvous")
        os.kill(lighthouse, signal.SIGKILL)
        seen = len(rounds(folder))
        until(lambda: len(rounds(folder)) >= seen + 2, "a commit after the lighthouse came back", process)
        with running("run", "--join", command[-2], "--set", "engine.devices=2") as newcomer:
            until(lambda: events(folder, Attended)[-1].participating == 3, "a commit of three", process)
            for name in ("island-0000", "island-0001"):
                os.kill(process_of(folder, name), signal.SIGKILL)
            newcomer.kill()
            code, _, err = end_of(process)
    assert code == 0, err
    assert err.count("has died (by SIGKILL) and is restarted") == 4
    logs = [log_of(folder, name).read_text() for name in ("island-0000", "island-0001")]
    assert any("from its checkpoint" in log for log in logs), "the second may fetch it from the first"
    (finished,) = events(folder, RunFinished)
    assert finished.local_updates == 2 * steps
    units = Counter(tuple(unit[1:]) for event in events(folder, Leased) for unit in event.delivered)
    assert len(units) == steps
    assert set(units.values()) == {1}, "every unit of data is in exactly one committed delta"
    assert rounds(folder) == list(range(1, len(rounds(folder)) + 1))
    assert {event.island for event in events(folder, IslandLeft)} >= {1}
    assert {event.island for event in events(folder, IslandJoined)} >= {0, 1}
    commits = [
        {
            line.split(" committed ")[1].split(",")[0]
            for line in log_of(folder, name).read_text().splitlines()
            if " committed " in line
        }
        for name in ("island-0000", "island-0001")
    ]
    shared = {line.rsplit(" as ", 1)[0] for line in commits[0]} & {line.rsplit(" as ", 1)[0] for line in commits[1]}
    assert len(shared) > 10
    for generation in shared:  # weights, momentum and account of both, to the bit
        assert {line for line in commits[0] if line.startswith(f"{generation} as ")} == {
            line for line in commits[1] if line.startswith(f"{generation} as ")
        }


def lines_of(process, log):
    """Collect the lines of a process's errors, which it would wait to write."""

    def read():
        for line in process.stderr:
            log.append(line)

    threading.Thread(target=read, daemon=True).start()
    return log


@pytest.mark.slow
@pytest.mark.parametrize(("has_copy", "number"), [(False, signal.SIGHUP), (True, signal.SIGTERM)])
def test_a_joiner_that_gets_a_signal_when_the_first_machine_is_lost_saves_the_state(tmp_path, has_copy, number):
    folder, rescue = tmp_path / "run", tmp_path / "rescue"
    saves = ["--out", rescue] if has_copy else ["--set", f"engine.rescue_dir={rescue}"]
    delay = ["--set", "engine.step_delay=0.1", "--set", "train.steps=4000"]
    with running("run", "toy-sync", *SETS, *delay, "--elastic", "--processes", 1, "--out", folder) as machine:
        until(lambda: len(rounds(folder)) >= 2, "a round", machine)
        address = child_of(folder, "rendezvous")[1][-2]
        with running("run", "--join", address, *saves) as joiner:
            until(lambda: events(folder, Attended)[-1].participating == 2, "a commit with the joiner", machine)
            for pid in (machine.pid, child_of(folder, "rendezvous")[0], process_of(folder, "island-0000")):
                os.kill(pid, signal.SIGKILL)
            joiner.send_signal(number)
            code, _, err = end_of(joiner)
    assert code == 130, err
    assert f"in {rescue}" in err
    last = events(rescue, Attended)[-1].round
    assert last >= rounds(folder)[-1] - 1
    assert any((rescue / "checkpoints").glob(f"*{last}")), "it need not train again what it had saved in its last interval"


SOON = """
from atoll.core.library_logs import quieten
quieten()
from atoll.engines.elastic import gateway_client
gateway_client._WRONG_S = 1.0
from atoll.cli.main import main
main()
"""


@pytest.mark.slow
def test_after_a_rotation_a_joiner_says_so_saves_the_state_and_ends_and_the_first_machine_goes_on(tmp_path):
    folder, rescue, file = tmp_path / "run", tmp_path / "rescue", tmp_path / "join.json"
    where = f"127.0.0.1:{free_port('127.0.0.1')}"
    secured = ["--set", f"engine.listen={where}", "--set", f"engine.advertise={where}"]
    delay = ["--set", "engine.step_delay=0.1", "--set", "train.steps=4000"]
    with running("run", "toy-sync", *SETS, *delay, *secured, "--elastic", "--processes", 1, "--out", folder) as machine:
        until(lambda: len(rounds(folder)) >= 2, "a round", machine)
        launch.invite_joiner(folder, file, None, rotate=False)
        joins = ["run", "--join", file, "--set", f"engine.rescue_dir={rescue}"]
        with running(*joins, program=["-c", SOON]) as joiner:
            until(lambda: events(folder, Attended)[-1].participating == 2, "a commit with the joiner", machine)
            launch.invite_joiner(folder, None, None, rotate=True)
            code, _, err = end_of(joiner)
        last = rounds(folder)[-1]
        until(lambda: rounds(folder)[-1] > last + 2, "a commit of the first machine alone", machine)
    assert code == 2, err
    assert f"the gateway at {where} shows a certificate that is not of " in err
    assert "ask for a new join file" in err
    assert err.rstrip().endswith("This island has found no gateway of its run for 1 s, and ends.")
    assert f"in {rescue}" in err
    assert rounds(rescue)
    assert "TCPStore" not in err
    assert len(err.splitlines()) < 20


@pytest.mark.slow
def test_when_the_first_machine_is_lost_for_good_the_run_goes_on_over_a_joiners_rendezvous_and_in_its_folder(tmp_path):
    first, second, steps = tmp_path / "first", tmp_path / "second", 300
    delay = ["--set", "engine.step_delay=0.1", "--set", f"train.steps={steps}", "--set", "keep.save_every=10"]
    with running("run", "toy-sync", *SETS, *delay, "--elastic", "--processes", 1, "--out", first) as machine:
        until(lambda: len(rounds(first)) >= 2, "a round", machine)
        address = child_of(first, "rendezvous")[1][-2]
        listens = ["--out", second, "--set", "engine.listen=127.0.0.1:0"]
        with running("run", "--join", address, *listens) as keeper, running("run", "--join", address) as other:
            logs = [lines_of(keeper, []), lines_of(other, [])]
            until(lambda: events(first, Attended)[-1].participating == 3, "a commit of three", machine)
            seen, island = len(rounds(first)), process_of(first, "island-0000")
            until(lambda: len(rounds(first)) >= seen + 8, "a commit that all have seen, with the standby", machine)
            for pid in (machine.pid, child_of(first, "rendezvous")[0], island):  # a machine that loses its power reports nothing
                os.kill(pid, signal.SIGKILL)
            lost = rounds(first)[-1]
            assert keeper.wait(PATIENCE_S) == 0, logs
            assert other.wait(PATIENCE_S) == 0, logs
    assert not (first / "final.safetensors").exists()
    (finished,) = events(second, RunFinished)
    assert finished.local_updates == steps
    attended = {event.round: event.participating for event in events(second, Attended)}
    alone = [there for number, there in attended.items() if number > lost + 2]
    assert {*alone[:-1]} == {2}, "the last round may have one unit"
    units = Counter(tuple(unit[1:]) for event in [*events(first, Leased), *events(second, Leased)] for unit in event.delivered)
    assert len(units) == steps // 2, "every unit of data was delivered"
    # Both logs have the commits in which both took part, and the same of them.
    commits = [{(event.round, event.epoch): event.digest for event in events(folder, Attended)} for folder in (first, second)]
    shared = commits[0].keys() & commits[1].keys()
    assert len(shared) > 3
    assert all(commits[0][version] == commits[1][version] for version in shared)
    assert [json.loads(line)["event"] for line in (second / "events.jsonl").read_text().splitlines()][:2] == [
        "RunStarted",
        "WarmStartFinished",
    ]
    assert any("runs a standby rendezvous at" in line for line in logs[0])
    assert not any("no island with the run's folder answers" in line for line in logs[1]), "the keeper has finished the run"


def test_a_run_that_was_stopped_continues_with_other_islands(atoll, tmp_path):
    folder = tmp_path / "run"
    arguments = [
        "run",
        "toy-sync",
        *SETS,
        "--set",
        "train.steps=40",
        "--elastic",
        "--processes",
        2,
        "--set",
        "engine.step_delay=0.1",
    ]
    with running(*arguments, "--out", folder) as process:
        until(lambda: len(rounds(folder)) >= 5, "a checkpoint", process)
        process.send_signal(signal.SIGINT)
        code, _, err = end_of(process)
    assert code == 130, err
    assert f"Resume: atoll run --resume {folder}" in err
    for word in ("rendezvous", "island"):
        with pytest.raises(AssertionError, match="there is no process"):
            child_of(folder, word)
    code, out, err = atoll("run", "--resume", folder, "--processes", 1, "--set", "engine.step_delay=0", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["local_updates"] == 80
    assert len({tuple(unit[1:]) for event in events(folder, Leased) for unit in event.delivered}) == 40


def test_what_elastic_islands_cannot_do_is_refused_and_leaves_no_folder(atoll, tmp_path):
    code, _, err = atoll("run", "demo-acco", "--elastic", "--processes", 2, "--out", tmp_path / "run")
    assert code == 2
    assert "each island holds a slice of its state" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--join", "localhost"], "--join localhost: it is HOST:PORT"),
        (["run", "toy-sync", "--set", "engine.devices=2"], "Simulator has no such setting"),
        (["run", "toy-sync", "--join", "127.0.0.1:1", "--set", "seed=1"], "recipe, seed=1 with --join"),
        (["run", "toy-sync", "--elastic", "--engine", "ray"], "--elastic with --engine ray"),
        (["run", "toy-sync", "--elastic", "--set", "engine.listen=0.0.0.0:7000"], "must be one that this machine has"),
        (["run", "toy-sync", "--elastic", "--set", "engine.listen='::1'"], "over IPv4"),
        (["run", "toy-sync", "--elastic", "--set", "engine.listen=192.0.2.7:7000"], "this machine cannot listen there"),
        (["run", "toy-sync", "--elastic", "--set", "engine.advertise=box"], "other machines dial HOST:PORT"),
        (["run", "--join", "192.0.2.7:7000"], "Run `atoll invite DIR` there"),
        (["run", "--join", "/nowhere/join.json"], "--join /nowhere/join.json: there is no file /nowhere/join.json."),
        (["run", "--join", "nothing.json"], "--join nothing.json: there is no file nothing.json. `atoll invite DIR` writes"),
        (["run", "--join", "127.0.0.1:1", "--set", "engine.listen=127.0.0.1:0"], "Add --out DIR"),
        (
            ["run", "--join", "127.0.0.1:1", "--out", "x", "--set", "engine.listen=192.0.2.7:7000"],
            "a standby rendezvous needs a join file that allows it",
        ),
        (["invite", "nowhere"], "nowhere is not a folder"),
        (["run", "toy-sync", "--elastic", "--set", "engine.heartbeat_timeout_s=0.2"], "at least 0.5"),
        (["chaos", "nowhere.json", "toy-sync"], "cannot be read"),
    ],
)
def test_an_impossible_command_is_refused_and_leaves_no_folder(atoll, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, _, err = atoll(*arguments)
    assert code == 2
    assert says in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("library", "arguments", "says"),
    [
        ("torchft", ["toy-async", "--elastic"], "has a hub and workers, and --engine elastic has rounds"),
        (
            "ray",
            ["toy-sync", "--engine", "ray"],
            "has rounds that all islands take part in, and --engine ray has a hub and workers",
        ),
    ],
)
def test_an_algorithm_that_an_engine_cannot_run_is_refused_before_a_missing_library(
    atoll, tmp_path, monkeypatch, library, arguments, says
):
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = atoll("run", *arguments, "--out", tmp_path / "run")
    assert code == 2
    assert says in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("victim", ["island-0002", "box-7-00c0ffee"])
def test_faults_of_a_process_that_the_run_does_not_start_are_refused_before_there_is_a_folder(atoll, tmp_path, victim):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"at_s": 1, "fault": "Kill", "victim": victim}]}))
    code, _, err = atoll("chaos", script, "toy-sync", "--processes", 2, "--out", tmp_path / "run")
    assert code == 2
    assert f"names {victim}; the run starts lighthouse, island-0000, island-0001" in err
    assert not (tmp_path / "run").exists()


def test_a_second_run_on_a_port_in_use_is_an_error_at_once_and_leaves_no_folder(atoll, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = atoll("run", "toy-sync", "--elastic", "--set", f"engine.listen={listen}", "--out", tmp_path / "run")
    assert code == 2
    assert f"engine.listen={listen}: this machine cannot listen there (Address already in use)" in err
    assert not (tmp_path / "run").exists()


def test_an_island_of_one_run_never_joins_another(tmp_path):
    """The rendezvous of run a has taken the port that run b thinks is its own."""
    folders = []
    for name in "ab":
        (tmp_path / name).mkdir()
        folders.append(tmp_path / name)
    run = Elastic(processes=1).fitted(recipes.ALL["toy-sync"]())
    info = JoinInfo(run, Elastic(processes=1), f"127.0.0.1:{free_port('127.0.0.1')}", run_id=run_id_of(folders[0]))
    with closing(Rendezvous(info, "127.0.0.1:0")) as rendezvous:
        island = [sys.executable, "-m", "atoll", "island", rendezvous.address, "--name", "island-0000", "--folder", str(folders[1])]
        with subprocess.Popen(island, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            code, err = process.wait(PATIENCE_S), process.stderr.read()
        assert RegistryClient(rendezvous.address).names() == [], "it has not even registered"
    assert code == 2
    assert f"belongs to another run ({info.run_id}, and not {run_id_of(folders[1])})" in err


def test_a_join_file_is_written_and_withdrawn_for_a_run_that_other_machines_may_join(atoll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, folder = recipes.ALL["toy-sync"](), tmp_path / "run"
    RunFolder.create(folder, run, ["test"])
    for spec, says in ((Elastic(), "join files admit no machine"), (Elastic(network="trusted"), "engine.network=trusted")):
        (folder / "join_info.json").write_text(JoinInfo(run, spec, "127.0.0.1:1").to_text())
        code, _, err = atoll("invite", folder)
        assert (code, says in err) == (2, True), err
    spec = Elastic(listen="0.0.0.0:7000", advertise="203.0.113.5:7000, box.example:7001")
    (folder / "join_info.json").write_text(JoinInfo(run, spec, "127.0.0.1:1", "127.0.0.1:2", run_id_of(folder)).to_text())
    code, out, err = atoll("invite", folder)
    assert code == 0, err
    path, about = out.splitlines()
    join = JoinFile.read(tmp_path / path)
    assert join.addresses == ("203.0.113.5:7000", "box.example:7001")
    assert f"id {join.credentials.identity}, dials 203.0.113.5:7000, box.example:7001" in about
    assert "PRIVATE" not in out
    code, out, err = atoll("invite", folder, "--standby", "203.0.113.6:7000", "--out", "standby.json")
    assert code == 0, err
    assert out.strip().endswith("--join standby.json --out COPY --set engine.listen=HOST:PORT")
    assert JoinFile.read(tmp_path / "standby.json").standby == "203.0.113.6:7000"
    assert atoll("invite", folder, "--standby", "203.0.113.6")[0] == 2
    assert atoll("invite", folder, "--standby", "203.0.113.6:7000", "--revoke", "x")[0] == 2
    standby = JoinFile.read(tmp_path / "standby.json").credentials.identity
    RunSecrets.revoke(folder, standby)  # a standby that may hold the run delays a rotation
    assert atoll("invite", folder, "--revoke", join.credentials.identity)[0] == 0
    assert {*RunSecrets.read(folder).revoked} == {standby, join.credentials.identity}
    assert atoll("invite", folder, "--rotate")[0] == 0
    assert RunSecrets.read(folder).credentials.authority != join.credentials.authority
    assert atoll("invite", folder, "--rotate", "--revoke", "x")[0] == 2
