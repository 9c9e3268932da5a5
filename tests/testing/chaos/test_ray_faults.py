"""Hub and workers of a run on Ray are found by their logs, and faults are injected into them."""

import json
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import CHAOS_LOG, Cut, FaultScript, Freeze, FullDisk, Kill, TimedFault, UpdateFault
from atoll.testing.chaos.ray_faults import HUB, check_ray_script, inject_ray_faults, ray_processes
from tests.samples import arrived

NODE = platform.node()
FIRST = arrived()


def title_of(process):
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


def state_of(process):
    """As Linux has it: T is one that is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture
def processes():
    """Two that have the title of Ray's, and one that has not."""
    started = [
        subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
        for title in ("ray::HubProcess", "ray::WorkerProcess.work", "another program")
    ]
    until(lambda: all(title_of(process) for process in started))  # which a process has a moment after it has begun
    yield started
    for process in started:
        process.kill()
        process.communicate()


def write(folder, name, *lines):
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / f"{name}.log").write_text("".join(f"01:02:03 {line}\n" for line in lines))


def test_the_latest_processes_are_found_in_the_logs(tmp_path, processes):
    hub, worker, other = (process.pid for process in processes)
    write(tmp_path, "hub", f"hub on {NODE}, process {other}, 1 thread(s)", f"hub on {NODE}, process {hub}, 1 thread(s)")
    write(tmp_path, "worker-0", f"worker 0: incarnation 0: process {worker} on {NODE}, 1 thread(s)", "worker 0: round 3: duplicate")
    write(tmp_path, "worker-1", f"worker 1: incarnation 1: process {other} on {NODE}, 1 thread(s)")
    write(tmp_path, "worker-2", f"worker 2: incarnation 2: process {worker} on far.away, 1 thread(s)")
    write(tmp_path, "worker-3")
    found = ray_processes(tmp_path)
    assert {name: process.pid for name, process in found.items()} == {HUB: hub, "worker-0": worker, "worker-1": other}
    assert [found[name].poll() is None for name in (HUB, "worker-0", "worker-1")] == [True, True, False], "not one with its number"


def test_the_clock_starts_at_the_first_arrived_update(tmp_path, processes):
    hub, worker, _ = processes
    write(tmp_path, "hub", f"hub on {NODE}, process {hub.pid}, 1 thread(s)")
    chaos = FaultInjector(FaultScript(faults=(TimedFault(at_s=5.0, fault=Kill(victim=HUB)),)), tmp_path / "chaos.jsonl")
    chaos.step(100.0, ray_processes(tmp_path))
    chaos.emit(FIRST)
    chaos.step(104.0, ray_processes(tmp_path))
    assert hub.poll() is None
    chaos.step(105.0, ray_processes(tmp_path))
    assert hub.wait() == -signal.SIGKILL
    assert ray_processes(tmp_path)[HUB].poll() is not None
    assert worker.poll() is None


# --------------------------------------------------------------------------------------------- inject_ray_faults ----------


def script(*faults):
    return FaultScript(faults=tuple(TimedFault(at_s=0.0, fault=fault) for fault in faults))


def done(folder):
    return [json.loads(line) for line in (folder / CHAOS_LOG).read_text().splitlines()]


def test_faults_are_injected_in_a_thread_and_skipped_on_other_machines(tmp_path, processes):
    hub, worker, _ = processes
    write(tmp_path, "hub", f"hub on {NODE}, process {hub.pid}, 1 thread(s)")
    write(tmp_path, "worker-0", f"worker 0: incarnation 0: process {worker.pid} on {NODE}, 1 thread(s)")
    write(tmp_path, "worker-1", f"worker 1: incarnation 1: process {worker.pid} on far.away, 1 thread(s)")
    with inject_ray_faults(script(Kill(victim="worker-1"), Kill(victim=HUB)), tmp_path) as chaos:
        assert done(tmp_path) == [], "its clock has not begun"
        chaos.emit(FIRST)
        assert hub.wait(timeout=20) == -signal.SIGKILL
    assert worker.poll() is None
    skipped, killed = done(tmp_path)
    assert skipped["skipped"] == {"fault": "Kill", "victim": "worker-1", "why": "no such process"}
    assert killed["injected"] == {"fault": "Kill", "victim": HUB, "pid": hub.pid}


def test_a_frozen_hub_continues_when_the_run_ends_with_an_exception(tmp_path, processes):
    hub, *_ = processes
    write(tmp_path, "hub", f"hub on {NODE}, process {hub.pid}, 1 thread(s)")

    def interrupted(chaos):
        chaos.emit(FIRST)
        until(lambda: state_of(hub) == "T")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), inject_ray_faults(script(Freeze(victim=HUB, for_s=1000.0)), tmp_path) as chaos:
        interrupted(chaos)
    until(lambda: state_of(hub) != "T")
    assert [list(one)[1] for one in done(tmp_path)] == ["injected", "reverted"]


def test_a_fault_that_cannot_be_logged_is_not_injected_and_raises_at_the_end(tmp_path, processes):
    hub, *_ = processes
    write(tmp_path, "hub", f"hub on {NODE}, process {hub.pid}, 1 thread(s)")

    def unwritable(chaos):
        (tmp_path / CHAOS_LOG).unlink()
        (tmp_path / CHAOS_LOG).mkdir()
        chaos.emit(FIRST)
        until(lambda: "chaos" not in {thread.name for thread in threading.enumerate()})

    with pytest.raises(IsADirectoryError), inject_ray_faults(script(Kill(victim=HUB)), tmp_path) as chaos:
        unwritable(chaos)
    assert hub.poll() is None


def test_faults_of_ray_processes_are_accepted():
    check_ray_script(
        script(Kill(victim=HUB), Freeze(victim="worker-1", for_s=1.0), FullDisk(victim=HUB, file_bytes=1, for_s=1.0)), 2
    )


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            script(Kill(victim="worker-2")),
            r"names worker-2; the run starts hub, worker-0, worker-1\. Name one of these",
        ),
        (script(Kill(victim="island-0000"), Kill(victim="lighthouse")), "names island-0000, lighthouse"),
        (
            script(Cut(link="link", for_s=1.0)),
            r"the links link; .* has none.*FullDisk of hub, worker-0, worker-1.*Leave out Cut",
        ),
        (
            FaultScript(update_faults=(UpdateFault(island=HUB, round=1, kind="nan"),)),
            r"update faults of hub.*\(--engine elastic\).*Leave out update_faults",
        ),
    ],
)
def test_other_faults_are_refused_with_what_is_allowed(script, says):
    with pytest.raises(ConfigError, match=says):
        check_ray_script(script, 2)
