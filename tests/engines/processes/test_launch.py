"""Errors about failed processes: which failed first, why, and how to resume the run."""

import signal
from dataclasses import replace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.liveness import PEER_MISSING
from atoll.engines.processes.launch import why
from atoll.engines.processes.rank import rank_log_path
from atoll.engines.processes.spec import Processes
from atoll.engines.run_lifecycle import RunRequest
from atoll.runs.folder import RunFolder
from atoll.testing.simulated_runs import Recorder, Regression


def failure(rank, exitcode, timestamp=100):
    failed = ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file="none")
    failed.timestamp = timestamp
    return failed


def log(folder, rank, *lines):
    path = rank_log_path(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_a_killed_rank_is_named_and_not_the_ranks_that_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not hear from rank 1 within 60 s.")
    for code in (PEER_MISSING, 1):  # in our words, or in a library's
        failures = {0: failure(0, code), 1: failure(1, -signal.SIGKILL, 101), 2: failure(2, -signal.SIGTERM)}
        assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: it was killed by SIGKILL.")


def test_a_rank_that_the_agent_killed_is_not_named(tmp_path):
    log(tmp_path, 1, "error: the disk is full.")
    failures = {0: failure(0, -signal.SIGKILL, 105), 1: failure(1, 2, 100), 2: failure(2, -signal.SIGTERM, 105)}
    assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: the disk is full.")


def test_a_rank_with_an_error_of_its_own_is_named_and_not_the_ranks_that_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not hear from rank 2 within 60 s.")
    log(tmp_path, 2, "error: the loss is nan on island 2 in round 1.")
    text = why({0: failure(0, PEER_MISSING), 1: failure(1, -signal.SIGTERM), 2: failure(2, 2)}, tmp_path)
    assert "rank 2 has failed" in text
    assert "the loss is nan on island 2 in round 1. " in text


def test_of_several_ranks_that_missed_a_peer_the_first_is_named(tmp_path):
    for rank in (0, 1):
        log(tmp_path, rank, f"error: rank {rank} could not hear from rank 2 within 3 s.")
    missed = {0: failure(0, PEER_MISSING, 101), 1: failure(1, PEER_MISSING, 100)}
    text = why({**missed, 2: failure(2, -signal.SIGTERM, 90)}, tmp_path)
    assert "rank 1 has failed" in text
    assert "could not hear from rank 2" in text


@pytest.mark.parametrize(("saved", "says"), [(True, "Resume: atoll run --resume"), (False, "There is no checkpoint yet.")])
def test_the_error_states_whether_the_run_can_resume(tmp_path, saved, says):
    (tmp_path / "checkpoints" / ("00000004" if saved else ".00000004.saving")).mkdir(parents=True)
    assert says in why({0: failure(0, 1)}, tmp_path)


def test_for_a_rank_without_a_recorded_error_its_log_is_named(tmp_path):
    assert str(rank_log_path(tmp_path, 3)) in why({3: failure(3, 1)}, tmp_path)


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
