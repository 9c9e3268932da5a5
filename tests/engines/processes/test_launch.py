"""What is said of processes that failed: which was the first, why, and how the run goes on."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from atoll.engines.processes.launch import last_words, why
from atoll.engines.processes.rank_log import MISSED_ANOTHER, log_of


def failure(rank, exitcode, timestamp=100):
    failed = ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file="none")
    failed.timestamp = timestamp
    return failed


def log(folder, rank, *lines):
    path = log_of(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_last_words_are_the_last_error_of_a_log(tmp_path):
    log(
        tmp_path,
        1,
        "12:00:00 rank 1 of 2 on here, process 7",
        "error: an old one.",
        "12:00:01 saved round 2",
        "error: the disk is full.",
        "bye",
    )
    assert last_words(log_of(tmp_path, 1)) == "the disk is full"
    assert last_words(log_of(tmp_path, 0)) == "", "without a log there are none"


def test_what_a_rank_said_before_it_was_started_again_are_not_its_last_words(tmp_path):
    log(tmp_path, 1, "error: the disk is full.", "12:00:05 rank 1 of 2 on here, process 8, 1 thread(s)", "12:00:06 saved round 3")
    assert last_words(log_of(tmp_path, 1)) == ""


def test_who_was_killed_is_named_and_not_those_who_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not hear from rank 1 within 60 s.")
    for code in (MISSED_ANOTHER, 1):  # in our words, or in a library's
        failures = {0: failure(0, code), 1: failure(1, -signal.SIGKILL, 101), 2: failure(2, -signal.SIGTERM)}
        assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: it was killed by SIGKILL.")


def test_who_did_not_end_when_it_was_asked_to_and_was_killed_is_not_named(tmp_path):
    log(tmp_path, 1, "error: the disk is full.")
    failures = {0: failure(0, -signal.SIGKILL, 105), 1: failure(1, 2, 100), 2: failure(2, -signal.SIGTERM, 105)}
    assert why(failures, tmp_path).startswith("rank 1 has failed, and the others were stopped: the disk is full.")


def test_whose_own_error_it_was_is_named_and_not_those_who_missed_it(tmp_path):
    log(tmp_path, 0, "error: rank 0 could not hear from rank 2 within 60 s.")
    log(tmp_path, 2, "error: the loss is nan on island 2 in round 1.")
    text = why({0: failure(0, MISSED_ANOTHER), 1: failure(1, -signal.SIGTERM), 2: failure(2, 2)}, tmp_path)
    assert "rank 2 has failed" in text
    assert "the loss is nan on island 2 in round 1. " in text


def test_of_several_that_missed_somebody_the_first_is_named(tmp_path):
    for rank in (0, 1):
        log(tmp_path, rank, f"error: rank {rank} could not hear from rank 2 within 3 s.")
    missed = {0: failure(0, MISSED_ANOTHER, 101), 1: failure(1, MISSED_ANOTHER, 100)}
    text = why({**missed, 2: failure(2, -signal.SIGTERM, 90)}, tmp_path)
    assert "rank 1 has failed" in text
    assert "could not hear from rank 2" in text


@pytest.mark.parametrize(("saved", "says"), [(True, "Go on: atoll run --resume"), (False, "Nothing was saved yet.")])
def test_it_is_said_whether_the_run_can_go_on(tmp_path, saved, says):
    (tmp_path / "checkpoints" / ("00000004" if saved else ".00000004.saving")).mkdir(parents=True)
    assert says in why({0: failure(0, 1)}, tmp_path)


def test_who_says_nothing_is_looked_up_in_its_log(tmp_path):
    assert str(log_of(tmp_path, 3)) in why({3: failure(3, 1)}, tmp_path)
