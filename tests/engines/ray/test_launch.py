"""Driving a run on Ray, as far as that goes without Ray."""

import fcntl
import os

import pytest

from atoll import recipes
from atoll.core.config.json_records import to_json
from atoll.core.config.overrides import override
from atoll.core.errors import CheckpointError, ConfigError, ExchangeFailed
from atoll.engines.ray.launch import drive, resume_on_ray
from atoll.engines.ray.process_parts import breaking, outlast_hub
from atoll.engines.ray.spec import Ray, on_workers, write_ray
from atoll.runs.folder import RunFolder
from atoll.runs.run import candidates
from atoll.telemetry.event_log import JsonlSink
from atoll.testing.chaos.faults import CHAOS_LOG, FaultScript, Kill, TimedFault
from atoll.testing.simulated_runs import arrived

AT_ONCE = Ray(limit_s=1e-9)


@pytest.fixture
def folder(tmp_path):
    """Of a run whose hub has taken a round, and saved nothing."""
    run = override(recipes.toy_async(), ["data.examples=512", "data.eval_examples=128"], candidates)
    folder = RunFolder.create(tmp_path / "run", to_json(on_workers(run, 2)), ["a test"])
    with JsonlSink(folder.events) as log:
        log.emit(arrived())
    return folder


def test_a_run_is_not_gone_on_with_while_a_hub_of_it_still_writes(folder):
    hub = os.open(folder.path / "hub.lock", os.O_WRONLY | os.O_CREAT)
    fcntl.flock(hub, fcntl.LOCK_EX)
    before = folder.events.read_bytes()
    with pytest.raises(ExchangeFailed, match=r"still keeps .*run, after 1e-09 s \(--limit\).*end it, and resume"):
        drive(folder, AT_ONCE)
    assert folder.events.read_bytes() == before
    os.close(hub)
    with pytest.raises(CheckpointError, match="has no checkpoint, but its log has 1 rounds"):
        drive(folder, AT_ONCE)


def test_whoever_waits_for_a_hub_says_so_once_and_holds_nothing_afterwards(folder):
    hub, said = os.open(folder.path / "hub.lock", os.O_WRONLY | os.O_CREAT), []
    fcntl.flock(hub, fcntl.LOCK_EX)

    def say(line):
        said.append(line)
        os.close(hub)

    outlast_hub(folder.path, limit_s=20.0, say=say)
    outlast_hub(folder.path, limit_s=20.0, say=said.append)
    assert said == ["the hub of an earlier command is still there, and is waited for"]


def test_a_run_is_not_gone_on_with_by_a_script_of_what_cannot_happen_to_it(folder):
    write_ray(folder.path, Ray(most=3))
    left = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    script = FaultScript(faults=(TimedFault(at_s=1.0, fault=Kill(victim="worker-3")),))
    with pytest.raises(ConfigError, match=r"has the victims worker-3; the run starts hub, worker-0, worker-1, worker-2\. Name"):
        resume_on_ray(folder.path, chaos=script)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path in left} == left
    assert not (folder.path / CHAOS_LOG).exists()


def test_a_run_without_a_script_is_broken_by_nobody(folder):
    assert breaking(None, folder.path) is None
    assert not (folder.path / CHAOS_LOG).exists()
