"""Faults are injected into real processes at their times, reverted, and logged."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from atoll.core.events import Attended
from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import Cut, CutOneWay, CutPair, FaultScript, Freeze, FullDisk, Kill, Slow, TimedFault

FIRST = Attended(round=1, known=1, alive=1, participating=1, attempts=1, epoch=2, digest="0", virtual_time_s=None, wall_time_s=9.0)


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def started_injector(tmp_path, *faults, now_s=100.0, links=None):
    """An injector whose clock has started."""
    injector = FaultInjector(FaultScript(faults=faults), tmp_path / "chaos.jsonl", links=links)
    injector.step(now_s, {})
    injector.emit(FIRST)
    return injector


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]


def test_nothing_is_injected_before_the_first_commit(tmp_path, victim):
    injector = FaultInjector(FaultScript(faults=(TimedFault(at_s=0.0, fault=Kill(victim="a")),)), tmp_path / "chaos.jsonl")
    injector.step(1e6, {"a": victim})
    assert victim.poll() is None
    assert logged(tmp_path) == []


def test_a_process_is_killed_at_its_time(tmp_path, victim):
    injector = started_injector(tmp_path, TimedFault(at_s=5.0, fault=Kill(victim="a")))
    injector.step(104.9, {"a": victim})
    assert victim.poll() is None
    injector.step(105.25, {"a": victim})
    assert victim.wait() == -signal.SIGKILL
    assert logged(tmp_path)[-1] == {"at_s": 5.25, "injected": {"fault": "Kill", "victim": "a", "pid": victim.pid}}


def test_a_frozen_process_continues_after_its_duration(tmp_path, victim):
    injector = started_injector(tmp_path, TimedFault(at_s=1.0, fault=Freeze(victim="a", for_s=10.0)))
    injector.step(101.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WSTOPPED).si_status == signal.SIGSTOP
    injector.step(110.9, {"a": victim})
    injector.step(111.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT
    assert [next(iter(line.keys() - {"at_s"})) for line in logged(tmp_path)] == ["observed", "injected", "reverted"]


def test_overlapping_freezes_last_until_the_later_end(tmp_path, victim):
    faults = [TimedFault(at_s=at_s, fault=Freeze(victim="a", for_s=for_s)) for at_s, for_s in ((1.0, 3.0), (2.0, 10.0))]
    injector = started_injector(tmp_path, *faults)
    for now_s in (101.0, 102.0, 104.0, 111.9):
        injector.step(now_s, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WSTOPPED).si_status == signal.SIGSTOP
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED | os.WNOHANG) is None
    injector.step(112.0, {"a": victim})
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT


def test_close_reverts_active_faults(tmp_path, victim):
    injector = started_injector(tmp_path, TimedFault(at_s=1.0, fault=Freeze(victim="a", for_s=1e6)))
    injector.step(101.0, {"a": victim})
    os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
    injector.close()
    assert os.waitid(os.P_PID, victim.pid, os.WCONTINUED).si_status == signal.SIGCONT


def test_a_fault_of_a_process_that_does_not_run_is_skipped_and_logged(tmp_path, victim):
    victim.kill()
    victim.wait()
    injector = started_injector(
        tmp_path, TimedFault(at_s=0.0, fault=Kill(victim="a")), TimedFault(at_s=0.0, fault=Kill(victim="b"))
    )
    injector.step(100.0, {"a": victim})
    assert [line["skipped"]["why"] for line in logged(tmp_path)[1:]] == ["it is not running", "no such process"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit needs Linux")
def test_a_full_disk_limits_one_process_for_its_duration(tmp_path):
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

        injector = started_injector(tmp_path, TimedFault(at_s=1.0, fault=FullDisk(victim="a", file_bytes=1000, for_s=10.0)))
        before = tries(5000)
        injector.step(101.0, {"a": process})
        during = [tries(5000), tries(500)]
        injector.step(111.0, {"a": process})
        assert [before, during, tries(5000)] == ["written", ["full", "written"], "written"]
        process.stdin.close()


class RecordingLink:
    """Records the calls to it."""

    def __init__(self):
        self.done = []

    def cut(self, *, one_way=False):
        self.done.append("cut one way" if one_way else "cut")

    def separate(self, other, *, apart):
        self.done.append((other, apart))

    def shape(self, mbit_per_s):
        self.done.append(mbit_per_s)

    def restore(self):
        self.done.append("restored")


def test_links_are_cut_shaped_and_restored_in_order_of_time(tmp_path):
    link = RecordingLink()
    slow, cut = (
        TimedFault(at_s=5.0, fault=Slow(link="l", mbit_per_s=2.0, for_s=1.0)),
        TimedFault(at_s=1.0, fault=Cut(link="l", for_s=2.0)),
    )
    injector = started_injector(tmp_path, slow, cut, links={"l": link})
    for now_s in (101.0, 102.0, 103.0, 105.0, 106.0):
        injector.step(now_s, {})
    assert link.done == ["cut", "restored", 2.0, "restored"]


def test_a_cut_link_stays_cut_when_a_shorter_fault_ends(tmp_path):
    link = RecordingLink()
    faults = [
        TimedFault(at_s=1.0, fault=Cut(link="l", for_s=10.0)),
        TimedFault(at_s=2.0, fault=Slow(link="l", mbit_per_s=2.0, for_s=2.0)),
        TimedFault(at_s=3.0, fault=Slow(link="l", mbit_per_s=5.0, for_s=20.0)),
    ]
    injector = started_injector(tmp_path, *faults, links={"l": link})
    for now_s in range(101, 125):
        injector.step(float(now_s), {})
    assert link.done == ["cut"] * 4 + [5.0, "restored"]


def test_a_link_is_cut_in_one_direction_while_no_fault_cuts_both(tmp_path):
    link = RecordingLink()
    faults = [
        TimedFault(at_s=1.0, fault=CutOneWay(link="l", for_s=4.0)),
        TimedFault(at_s=2.0, fault=Cut(link="l", for_s=1.0)),
    ]
    injector = started_injector(tmp_path, *faults, links={"l": link})
    for now_s in range(101, 106):
        injector.step(float(now_s), {})
    assert link.done == ["cut one way", "cut", "cut one way", "restored"]


def test_a_pair_stays_apart_until_its_last_fault_ends(tmp_path):
    one, other = RecordingLink(), RecordingLink()
    faults = [
        TimedFault(at_s=1.0, fault=CutPair(link="a", other="b", for_s=1.0)),
        TimedFault(at_s=1.5, fault=CutPair(link="b", other="a", for_s=2.0)),
    ]
    injector = started_injector(tmp_path, *faults, links={"a": one, "b": other})
    for now_s in (101.0, 101.5, 102.0, 103.5):
        injector.step(now_s, {})
    assert (one.done, other.done) == ([(other, True), (other, True), (other, True), (other, False)], [])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit needs Linux")
def test_overlapping_full_disks_apply_the_smaller_limit_and_restore_the_old_one(tmp_path, victim):
    faults = [TimedFault(at_s=at_s, fault=FullDisk(victim="a", file_bytes=b, for_s=5.0)) for at_s, b in ((1.0, 100), (2.0, 900))]
    before, found = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE), []
    injector = started_injector(tmp_path, *faults)
    for now_s in (101.0, 102.0, 106.0, 107.0):
        injector.step(now_s, {"a": victim})
        found.append(resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[0])
    assert found == [100, 100, 900, before[0]]
