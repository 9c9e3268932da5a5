"""Errors about failed processes: which failed first, why, and how to resume the run."""

import os
import signal
import sys
from dataclasses import replace

import pytest

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.liveness import PEER_MISSING
from atoll.engines.processes import launch
from atoll.engines.processes.launch import LaunchedRanks, RankFailure, why
from atoll.engines.processes.rank import rank_log_path
from atoll.engines.processes.spec import Processes
from atoll.engines.rank_store import open_store
from atoll.engines.run_lifecycle import RunRequest
from atoll.runs.folder import RunFolder
from atoll.testing.simulated_runs import Recorder, Regression

STOPPED = RankFailure(-signal.SIGTERM, 101, by_launcher=True)


def log(folder, rank, *lines):
    path = rank_log_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_a_killed_rank_is_named_and_not_the_ranks_that_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not receive from rank 1 within 60 s.")
    for code in (PEER_MISSING, 1):  # in our words, or in a library's
        failures = {0: RankFailure(code, 100), 1: RankFailure(-signal.SIGKILL, 101), 2: STOPPED}
        assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: it was killed by SIGKILL.")


def test_a_rank_that_the_launcher_killed_is_not_named(tmp_path):
    log(tmp_path, 1, "error: the disk is full.")
    failures = {0: RankFailure(-signal.SIGKILL, 105, by_launcher=True), 1: RankFailure(2, 100), 2: STOPPED}
    assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: the disk is full.")


def test_a_rank_with_an_error_of_its_own_is_named_and_not_the_ranks_that_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not receive from rank 2 within 60 s.")
    log(tmp_path, 2, "error: the loss is nan on island 2 in round 1.")
    text = why({0: RankFailure(PEER_MISSING, 100), 1: STOPPED, 2: RankFailure(2, 100)}, tmp_path)
    assert "rank 2 has failed" in text
    assert "the loss is nan on island 2 in round 1. " in text


def test_of_several_ranks_that_missed_a_peer_the_first_is_named(tmp_path):
    for rank in (0, 1):
        log(tmp_path, rank, f"error: rank {rank} could not receive from rank 2 within 3 s.")
    missed = {0: RankFailure(PEER_MISSING, 101), 1: RankFailure(PEER_MISSING, 100)}
    text = why({**missed, 2: RankFailure(-signal.SIGTERM, 90, by_launcher=True)}, tmp_path)
    assert "rank 1 has failed" in text
    assert "could not receive from rank 2" in text


@pytest.mark.parametrize(("saved", "says"), [(True, "Resume: atoll run --resume"), (False, "There is no checkpoint yet.")])
def test_the_error_states_whether_the_run_can_resume(tmp_path, saved, says):
    (tmp_path / "checkpoints" / ("00000004" if saved else ".00000004.saving")).mkdir(parents=True)
    assert says in why({0: RankFailure(1, 100)}, tmp_path)


def test_for_a_rank_without_a_recorded_error_its_log_is_named(tmp_path):
    assert str(rank_log_path(tmp_path, 3)) in why({3: RankFailure(1, 100)}, tmp_path)


def test_a_rank_that_a_user_ends_is_named_and_the_others_are_ended_by_the_launcher(tmp_path):
    ranks = LaunchedRanks()
    for _ in range(3):
        ranks.start([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], {})
    os.kill(ranks.running[1].pid, signal.SIGTERM)
    while not ranks.failures:
        ranks.poll()
    ranks.stop(signal.SIGTERM)
    assert not ranks.running
    assert {rank: failure.by_launcher for rank, failure in ranks.failures.items()} == {0: True, 1: False, 2: True}
    assert "rank 1 has failed, and the others were stopped: it was killed by SIGTERM" in why(ranks.failures, tmp_path)


def test_a_rank_that_ignores_its_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_SHUTDOWN_S", 0.2)
    ranks, pipe = LaunchedRanks(), tmp_path / "pipe"
    os.mkfifo(pipe)
    ignores = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').close(); time.sleep(60)"
    ranks.start([sys.executable, "-c", ignores, str(pipe)], {})
    pipe.read_text()  # returns when the rank has opened and closed it
    ranks.stop(signal.SIGTERM)
    assert (ranks.running, ranks.failures[0].exit_code, ranks.failures[0].by_launcher) == ({}, -signal.SIGKILL, True)


# ------------------------------------------------------------------------------------------------------- before ranks are started


def small():
    run = recipes.toy_sync()
    data = replace(run.data, examples=512, dimensions=16, clusters_per_class=1, eval_examples=128)
    return replace(run, model=replace(run.model, hidden=8), data=data, train=replace(run.train, steps=40))


def create(run, processes, path):
    with RunRequest(run=run, spec=Processes(processes=processes), out=path).open():
        return path


def test_processes_that_make_up_no_islands_do_not_resume_a_run(tmp_path):
    run = replace(recipes.demo_two_level(), data=replace(recipes.demo_two_level().data, limit_bytes=60_000))
    create(run, 4, tmp_path / "run")
    with pytest.raises(ConfigError, match="multiple"):
        atoll.resume(tmp_path / "run", engine=Processes(processes=3))


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    folder = create(small(), 2, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with RunFolder(folder).lock(), pytest.raises(ConfigError, match="in use by process"):
        atoll.resume(folder, engine=Processes(processes=3))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


@pytest.mark.parametrize("given", [{"workload": Regression()}, {"sinks": [Recorder()]}], ids=["workload", "sinks"])
def test_objects_of_this_process_cannot_be_given_to_others(tmp_path, monkeypatch, given):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        atoll.run(small(), engine=Processes(processes=2), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_run_resumes_on_its_own_engine(tmp_path):
    with RunRequest(run=small(), spec=None, out=tmp_path / "run").open():
        pass
    with pytest.raises(ConfigError, match="this run's engine is simulator"):
        atoll.resume(tmp_path / "run", engine=Processes(processes=2))


# -------------------------------------------------------------------------------------------------------------- several machines


def on_two_machines(node, path, **settings):
    given = {"network": "trusted", "nodes": 2, "node": node, "processes": 4, "address": "127.0.0.1:1", **settings}
    return RunRequest(run=small(), spec=Processes(**given), out=path)


def test_a_machine_starts_its_ranks_with_this_command_and_tells_the_first_that_they_have_ended(tmp_path, monkeypatch):
    started, said = [], []
    store, port = open_store("127.0.0.1")
    monkeypatch.setattr(launch, "run_ranks", lambda command, variables, folder: started.append((command, variables, folder)))
    request = replace(on_two_machines(1, tmp_path / "run", address=f"127.0.0.1:{port}"), log=said.append)
    assert launch.start(request) is None
    ((command, variables, folder),) = started
    assert (command, folder) == ([sys.executable, *sys.orig_argv[1:]], tmp_path / "run")
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in variables] == [
        ("2", "0", "4", "2"),
        ("3", "1", "4", "2"),
    ]
    assert said == [f"machine 1 of 2: 2 of 4 ranks; the ranks' store is at 127.0.0.1:{port}"]
    assert store.add(launch._ENDED, 0) == 1
    assert not folder.exists(), "rank 0 makes it"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"network": "loopback"}, "several machines.*engine.network=trusted"),
        ({"path": None}, "engine.nodes=2 without a folder.*--out"),
        ({"node": 0, "address": "192.0.2.1:29500"}, "engine.address=192.0.2.1:29500: this machine cannot listen there"),
    ],
)
def test_a_machine_refuses_what_no_rank_could_do(tmp_path, given, says):
    with pytest.raises(ConfigError, match=says):
        launch.start(on_two_machines(**{"node": 1, "path": tmp_path / "run", **given}))
