"""Hub and workers of a run on Ray are found by what they say of themselves, and broken."""

import platform
import signal
import subprocess
import sys

import pytest

from atoll.events import Arrived
from atoll.testing.chaos import HUB, At, Chaos, Kill, Script, ray_processes

NODE = platform.node()
FIRST = Arrived(
    island=0,
    round=0,
    window=0,
    shard=0,
    steps=4,
    pushed_s=1.0,
    virtual_time_s=None,
    wall_time_s=1.0,
    version=1,
    staleness=0,
    applied=True,
    norm=1.0,
    sent_bytes=4,
)


@pytest.fixture
def processes():
    """Two that have the title of Ray's, and one that has not."""
    started = [
        subprocess.Popen([title, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
        for title in ("ray::HubActor", "ray::WorkerActor.work", "somebody else")
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def write(folder, name, *lines):
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / f"{name}.log").write_text("".join(f"01:02:03 {line}\n" for line in lines))


def test_hub_and_workers_are_found_as_their_logs_last_name_them(tmp_path, processes):
    hub, worker, other = (process.pid for process in processes)
    write(tmp_path, "hub", f"hub on {NODE}, process {other}, 1 thread(s)", f"hub on {NODE}, process {hub}, 1 thread(s)")
    write(tmp_path, "worker-0", f"worker 0: life 0: process {worker} on {NODE}, 1 thread(s)", "worker 0: round 3: again")
    write(tmp_path, "worker-1", f"worker 1: life 1: process {other} on {NODE}, 1 thread(s)")
    write(tmp_path, "worker-2", f"worker 2: life 2: process {worker} on far.away, 1 thread(s)")
    write(tmp_path, "worker-3")
    found = ray_processes(tmp_path)
    assert {name: process.pid for name, process in found.items()} == {HUB: hub, "worker-0": worker, "worker-1": other}
    assert [found[name].poll() is None for name in (HUB, "worker-0", "worker-1")] == [True, True, False], "not one with its number"


def test_a_script_kills_a_hub_and_its_clock_begins_with_the_first_update_that_arrives(tmp_path, processes):
    hub, worker, _ = processes
    write(tmp_path, "hub", f"hub on {NODE}, process {hub.pid}, 1 thread(s)")
    chaos = Chaos(Script(faults=(At(at_s=5.0, fault=Kill(victim=HUB)),)), tmp_path / "chaos.jsonl")
    chaos.step(100.0, ray_processes(tmp_path))
    chaos.emit(FIRST)
    chaos.step(104.0, ray_processes(tmp_path))
    assert hub.poll() is None
    chaos.step(105.0, ray_processes(tmp_path))
    assert hub.wait() == -signal.SIGKILL
    assert ray_processes(tmp_path)[HUB].poll() is not None
    assert worker.poll() is None
