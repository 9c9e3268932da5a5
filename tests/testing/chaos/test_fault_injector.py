"""What is to go wrong goes wrong at its time, to real processes, is undone, and is written down."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from atoll.core.errors import ConfigError
from atoll.core.events import Attended
from atoll.testing.chaos import At, Chaos, Cut, Freeze, FullDisk, Kill, Script, Slow

FIRST = Attended(round=1, known=1, alive=1, participating=1, attempts=1, epoch=2, digest="0", virtual_time_s=None, wall_time_s=9.0)


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def begun(tmp_path, *faults, now_s=100.0, lines=None):
    """A script whose clock has begun."""
    chaos = Chaos(Script(faults=faults), tmp_path / "chaos.jsonl", lines=lines)
    chaos.step(now_s, {})
    chaos.emit(FIRST)
    return chaos


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]


def test_nothing_happens_before_the_first_commit(tmp_path, victim):
    chaos = Chaos(Script(faults=(At(at_s=0.0, fault=Kill(victim="a")),)), tmp_path / "chaos.jsonl")
    chaos.step(1e6, {"a": victim})
    assert victim.poll() is None
    assert written(tmp_path) == []


def test_a_process_is_killed_at_its_time_and_not_earlier(tmp_path, victim):
    chaos = begun(tmp_path, At(at_s=5.0, fault=Kill(victim="a")))
    chaos.step(104.9, {"a": victim})
    assert victim.poll() is None
    chaos.step(105.25, {"a": victim})
    assert victim.wait() == -signal.SIGKILL
    assert written(tmp_path)[-1] == {"at_s": 5.25, "did": {"fault": "Kill", "victim": "a", "pid": victim.pid}}


def test_a_frozen_process_goes_on_after_a_while(tmp_path, victim):
    chaos = begun(tmp_path, At(at_s=1.0, fault=Freeze(victim="a", for_s=10.0)))
    chaos.step(101.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WSTOPPED).si_status == signal.SIGSTOP
    chaos.step(110.9, {"a": victim})
    chaos.step(111.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT
    assert [next(iter(line.keys() - {"at_s"})) for line in written(tmp_path)] == ["saw", "did", "mended"]


def test_of_two_freezes_that_overlap_the_longer_one_counts(tmp_path, victim):
    faults = [At(at_s=at_s, fault=Freeze(victim="a", for_s=for_s)) for at_s, for_s in ((1.0, 3.0), (2.0, 10.0))]
    chaos = begun(tmp_path, *faults)
    for now_s in (101.0, 102.0, 104.0, 111.9):
        chaos.step(now_s, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WSTOPPED).si_status == signal.SIGSTOP
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED | os.WNOHANG) is None
    chaos.step(112.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT


def test_what_is_still_broken_at_the_end_is_mended(tmp_path, victim):
    chaos = begun(tmp_path, At(at_s=1.0, fault=Freeze(victim="a", for_s=1e6)))
    chaos.step(101.0, {"a": victim})
    os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
    chaos.close()
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT


def test_who_does_not_run_is_left_alone_and_that_is_said(tmp_path, victim):
    victim.kill()
    victim.wait()
    chaos = begun(tmp_path, At(at_s=0.0, fault=Kill(victim="a")), At(at_s=0.0, fault=Kill(victim="b")))
    chaos.step(100.0, {"a": victim})
    assert [line["skipped"]["why"] for line in written(tmp_path)[1:]] == ["it does not run now", "there is none"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of other processes are Linux's")
def test_a_full_disk_is_full_for_its_process_alone_and_for_its_time(tmp_path):
    program = """
import pathlib, sys
for size in sys.stdin:
    try:
        pathlib.Path(sys.argv[1]).write_bytes(bytes(int(size)))
        print("written", flush=True)
    except OSError:
        print("full", flush=True)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def tries(size):
            process.stdin.write(f"{size}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        chaos = begun(tmp_path, At(at_s=1.0, fault=FullDisk(victim="a", file_bytes=1000, for_s=10.0)))
        before = tries(5000)
        chaos.step(101.0, {"a": process})
        during = [tries(5000), tries(500)]
        chaos.step(111.0, {"a": process})
        assert [before, during, tries(5000)] == ["written", ["full", "written"], "written"]
        process.stdin.close()


class Wire:
    """A line that remembers what was done to it."""

    def __init__(self):
        self.done = []

    def cut(self):
        self.done.append("cut")

    def shape(self, mbit_per_s):
        self.done.append(mbit_per_s)

    def mend(self):
        self.done.append("mended")


def test_lines_are_cut_and_shaped_and_mended_in_the_order_of_time(tmp_path):
    line = Wire()
    slow, cut = At(at_s=5.0, fault=Slow(line="l", mbit_per_s=2.0, for_s=1.0)), At(at_s=1.0, fault=Cut(line="l", for_s=2.0))
    chaos = begun(tmp_path, slow, cut, lines={"l": line})
    for now_s in (101.0, 102.0, 103.0, 105.0, 106.0):
        chaos.step(now_s, {})
    assert line.done == ["cut", "mended", 2.0, "mended"]


def test_a_line_that_is_cut_stays_so_when_a_shorter_fault_of_it_ends(tmp_path):
    line = Wire()
    faults = [
        At(at_s=1.0, fault=Cut(line="l", for_s=10.0)),
        At(at_s=2.0, fault=Slow(line="l", mbit_per_s=2.0, for_s=2.0)),
        At(at_s=3.0, fault=Slow(line="l", mbit_per_s=5.0, for_s=20.0)),
    ]
    chaos = begun(tmp_path, *faults, lines={"l": line})
    for now_s in range(101, 125):
        chaos.step(float(now_s), {})
    assert line.done == ["cut"] * 4 + [5.0, "mended"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of other processes are Linux's")
def test_of_two_full_disks_that_overlap_the_smaller_counts_and_what_was_before_comes_back(tmp_path, victim):
    faults = [At(at_s=at_s, fault=FullDisk(victim="a", file_bytes=b, for_s=5.0)) for at_s, b in ((1.0, 100), (2.0, 900))]
    before, found = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE), []
    chaos = begun(tmp_path, *faults)
    for now_s in (101.0, 102.0, 106.0, 107.0):
        chaos.step(now_s, {"a": victim})
        found.append(resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[0])
    assert found == [100, 100, 900, before[0]]


def test_a_script_for_a_line_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lines \['sea'\], and there are \[\]"):
        Chaos(Script(faults=(At(at_s=1.0, fault=Cut(line="sea", for_s=1.0)),)), tmp_path / "chaos.jsonl")
